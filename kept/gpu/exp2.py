"""exp.py NAME patch width layers inter heads batch minutes lr high_share [data]"""
import sys, time, dataclasses, numpy as np, jax, jax.numpy as jnp, optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.configs import make_toy
from animegamer_jax.data.datasets import open_features
from animegamer_jax.models.latents import cosines, to_decoder
from animegamer_jax.models.dit import DiT
from animegamer_jax.models.encoder import ShotEncoder
from animegamer_jax.train.stages.foundations.dit import open_gates
name, patch, width, layers, inter, heads, batch, minutes, lr, high = sys.argv[1], *map(int, sys.argv[2:8]), *map(float, sys.argv[8:11])
data = sys.argv[11] if len(sys.argv) > 11 else './out/w4/fmid'
b=Bundle.open('./out/w4/decoder/model'); vc=b.config.vae
f=open_features(data); sch=diffusion.Schedule(); sig=sch.signal_levels()
def load(split, n):
    l=f.latents(split); src=f.turns(split); n=min(n,len(src)); rows=range(n)
    M=np.stack([l[i]['moments'][...,:24] for i in rows]); R=[src[i] for i in rows]
    return M, np.stack([r['text_features'] for r in R]), np.stack([r['image_features'] for r in R]), np.array([r['motion_value'] for r in R],np.float32), np.array([str(r['motion']) for r in R])
tr=load('train',100000); te=load('test',60)
toy=make_toy()
dc=dataclasses.replace(b.config.dit, patch_size=patch, hidden_size=width, num_layers=layers, intermediate_size=inter, num_attention_heads=heads, dtype='bfloat16')
ec=dataclasses.replace(b.config.encoder, representation_size=width, dtype='bfloat16')
import os
I=Bundle.open(os.environ['INIT']); dit=I.load('dit',dtype='bfloat16'); enc=I.load('encoder',dtype='bfloat16')
f32=lambda m: nnx.update(m, jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(m,nnx.Param)))
f32(dit); f32(enc)
print(name,'params',sum(x.size for x in jax.tree.leaves(nnx.state(dit,nnx.Param)))/1e6)
mesh=Mesh(np.array(jax.devices()),('d',)); rep=NamedSharding(mesh,P()); sh=NamedSharding(mesh,P('d'))
model=nnx.Dict({'dit':dit,'enc':enc}); gd,params=nnx.split(model)
params=jax.device_put(params,rep)
total=int(float(sys.argv[12])) if len(sys.argv)>12 else 4000
opt=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0,lr,100,total,lr*0.05),b1=.9,b2=.95,weight_decay=1e-4))
state=jax.device_put(opt.init(params),rep)
def loss_fn(params,m,t_,im,mv,key):
    mod=nnx.merge(gd,params); dit,enc=mod['dit'],mod['enc']
    x=to_decoder(m.astype(jnp.float32),vc); k1,k2,k3,k4=jax.random.split(key,4)
    n=jax.random.normal(k1,x.shape); B=len(x)
    ts=jnp.floor((jnp.arange(B)+jax.random.uniform(k2,(B,)))/B*1000).astype(jnp.int32)
    ts=jnp.where(jax.random.uniform(k3,(B,))<high, 999-jnp.floor(200*jax.random.uniform(k4,(B,))).astype(jnp.int32), ts)
    ctx=enc(t_.astype(jnp.float32),im.astype(jnp.float32))
    noised,target=diffusion.add_noise(sch,x,n,ts)
    v=dit(noised,timestep=ts.astype(jnp.float32),motion=mv,context=ctx)
    return diffusion.v_loss(v,target).mean()
@jax.jit
def step(params,state,batch,key):
    l,g=jax.value_and_grad(loss_fn)(params,*batch,key)
    u,state=opt.update(g,state,params); return optax.apply_updates(params,u),state,l
C=cosines(17)
@jax.jit
def est(params,m,t_,im,mv,t,a,s,key):
    mod=nnx.merge(gd,params); x=to_decoder(m.astype(jnp.float32),vc); n=jax.random.normal(key,x.shape)
    ctx=mod['enc'](t_.astype(jnp.float32),im.astype(jnp.float32)); xt=a*x+s*n
    v=mod['dit'](xt,timestep=jnp.full(len(x),t),motion=mv,context=ctx); return a*xt-s*v, x
def check(params,data,tag):
    m,t_,im,mv,lev=[d[:100] for d in data]; out=[]
    for t in (999,600,300):
        a=np.float32(sig[t]); s=np.float32(np.sqrt(1-a*a)); E=[];X=[]
        for i in range(0,len(m),20):
            e,x=est(params,m[i:i+20],t_[i:i+20],im[i:i+20],mv[i:i+20],float(t),a,s,jax.random.key(i)); E.append(np.asarray(e-x,np.float32));X.append(np.asarray(x))
        e=np.einsum('kf,nfhwz->nkhwz',C,np.concatenate(E)); c=np.einsum('kf,nfhwz->nkhwz',C,np.concatenate(X)); c=c-c.mean(0,keepdims=True)
        r=lambda q,sl: round(float((e[q][:,sl]**2).mean()/(c[q][:,sl]**2).mean()),3); al=slice(None)
        out.append((t,'DC',r(al,slice(0,1)),'AC',r(al,slice(1,17)),{str(k):r(lev==k,slice(1,17)) for k in sorted(set(lev)) if (lev==k).any()} if t==999 else ''))
    print(tag,*out,flush=True)
rng=np.random.default_rng(0); key=jax.random.key(0); t0=time.time(); i=0; ls=[]; nxt=0
spent=0
while i<total and spent<minutes*60:
    t1=time.time(); rows=rng.choice(len(tr[0]),batch,replace=False)
    bt=jax.device_put(tuple(d[rows] for d in tr[:4]),sh)
    params,state,l=step(params,state,bt,jax.random.fold_in(key,i)); ls.append(float(l)); i+=1
    if i>1: spent+=time.time()-t1
    if spent>=nxt:
        nxt+=120; print(f'{name} step {i} {spent:.0f}s {i/max(spent,1e-9):.2f}/s loss {np.mean(ls[-200:]):.4f}'); check(params,te,'  test'); check(params,tr,'  train')
print(f'{name} step {i} {spent:.0f}s loss {np.mean(ls[-200:]):.4f}'); check(params,te,'  test'); check(params,tr,'  train')
import pickle; pickle.dump(jax.tree.map(np.asarray,nnx.to_pure_dict(params)),open(f'./out/exp-{name}.pkl','wb'))
