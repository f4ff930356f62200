"""exp3.py NAME held(1|2) patch width layers inter heads batch minutes lr total"""
import sys, time, dataclasses, numpy as np, jax, jax.numpy as jnp, optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.data.datasets import open_features
from animegamer_jax.models.latents import cosines, to_decoder, from_decoder
from animegamer_jax.models.dit import DiT
from animegamer_jax.models.encoder import ShotEncoder
name, held, patch, width, layers, inter, heads, batch = sys.argv[1], *map(int, sys.argv[2:9]); minutes, lr = map(float, sys.argv[9:11]); total=int(sys.argv[11])
b=Bundle.open('/work/train/w7/decoder/model'); vc=b.config.vae
f=open_features('/work/train/w5/features'); sch=diffusion.Schedule(); sig=sch.signal_levels()
F=17 if held==1 else 9
def load(split, n):
    l=f.latents(split); src=f.turns(split); n=min(n,len(src)); rows=range(n)
    M=np.stack([l[i]['moments'][::held,...,:24] for i in rows]); R=[src[i] for i in rows]
    return M, np.stack([r['text_features'] for r in R]), np.stack([r['image_features'] for r in R]), np.array([r['motion_value'] for r in R],np.float32), np.array([str(r['motion']) for r in R])
tr=load('train',int(sys.argv[12]) if len(sys.argv)>12 else 2500); te=load('test',100)
if held>1:
    c=np.einsum('kf,nfhwz->nkhwz',cosines(F),tr[0][:600].astype(np.float32)); c=c-c.mean(0,keepdims=True)
    sd=np.sqrt((c**2).mean((0,2,3,4))); c17=np.array(vc.frequency_scales)
    vc=dataclasses.replace(vc,frequency_scales=(float(2.46/(sd[0]*vc.scaling_factor)),)+(2.6,)*(F-1)); print('sd',sd.round(3))
dc=dataclasses.replace(b.config.dit, latent_frames=F, patch_size=patch, hidden_size=width, num_layers=layers, intermediate_size=inter, num_attention_heads=heads, dtype='bfloat16')
ec=dataclasses.replace(b.config.encoder, representation_size=width, dtype='bfloat16')
dit=DiT(dc,rngs=nnx.Rngs(0)); enc=ShotEncoder(ec,rngs=nnx.Rngs(1))
try:
    from animegamer_jax.train.stages.foundations.dit import open_gates; open_gates(dit)
except Exception as e: print('gates',e)
print(name,'params',sum(x.size for x in jax.tree.leaves(nnx.state(dit,nnx.Param)))/1e6)
mesh=Mesh(np.array(jax.devices()),('d',)); rep=NamedSharding(mesh,P()); sh=NamedSharding(mesh,P('d'))
model=nnx.Dict({'dit':dit,'enc':enc}); gd,params=nnx.split(model)
params=jax.device_put(params,rep)
opt=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0,lr,100,total,lr*0.05),b1=.9,b2=.95,weight_decay=1e-4))
state=jax.device_put(opt.init(params),rep)
def loss_fn(params,m,t_,im,mv,key):
    mod=nnx.merge(gd,params); dit,enc=mod['dit'],mod['enc']
    x=to_decoder(m.astype(jnp.float32),vc); k1,k2=jax.random.split(key)
    n=jax.random.normal(k1,x.shape); B=len(x)
    u=(jnp.arange(B)+jax.random.uniform(k2,(B,)))/B; u=2*u/(1+u)
    ts=jnp.floor(u*1000).astype(jnp.int32)
    ctx=enc(t_.astype(jnp.float32),im.astype(jnp.float32))
    noised,target=diffusion.add_noise(sch,x,n,ts)
    v=dit(noised,timestep=ts.astype(jnp.float32),motion=mv,context=ctx)
    return diffusion.v_loss(v,target).mean()
@jax.jit
def step(params,state,batch,key):
    l,g=jax.value_and_grad(loss_fn)(params,*batch,key)
    u,state=opt.update(g,state,params); return optax.apply_updates(params,u),state,l
@jax.jit
def est(params,m,t_,im,mv,t,a,s,key):
    mod=nnx.merge(gd,params); x=to_decoder(m.astype(jnp.float32),vc); n=jax.random.normal(key,x.shape)
    ctx=mod['enc'](t_.astype(jnp.float32),im.astype(jnp.float32)); xt=a*x+s*n
    v=mod['dit'](xt,timestep=jnp.full(len(x),t),motion=mv,context=ctx); return from_decoder(a*xt-s*v,vc)
def full(z): return z if held==1 else np.repeat(z,2,axis=1)[:,:17]
def check(params,data,tag):
    m,t_,im,mv,mot=[d[:100] for d in data]; X=full(m.astype(np.float32))
    for t in (999,600,300):
        a=np.float32(sig[t]); s=np.float32(np.sqrt(1-a*a)); E=[]
        for i in range(0,len(m),20):
            E.append(np.asarray(est(params,m[i:i+20],t_[i:i+20],im[i:i+20],mv[i:i+20],float(t),a,s,jax.random.key(i)),np.float32))
        e=full(np.concatenate(E))-X; mean=lambda z: z.mean(1,keepdims=True)
        dce=(mean(e)**2).mean(); dcv=((mean(X)-mean(X).mean(0,keepdims=True))**2).mean(); ae=(e-mean(e))**2; av=(X-mean(X))**2
        r=lambda q: round(float(ae[q].mean()/av[q].mean()),2)
        print(tag,t,'DC',round(float(dce/dcv),3),'AC',r(slice(None)),{str(k):r(mot==k) for k in sorted(set(mot)) if k!='stand'} if t==999 else '',flush=True)
rng=np.random.default_rng(0); key=jax.random.key(0); i=0; ls=[]; spent=0; nxt=240
while i<total and spent<minutes*60:
    t1=time.time(); rows=rng.choice(len(tr[0]),batch,replace=False)
    bt=jax.device_put(tuple(d[rows] for d in tr[:4]),sh)
    params,state,l=step(params,state,bt,jax.random.fold_in(key,i)); ls.append(float(l)); i+=1
    if i>1: spent+=time.time()-t1
    if spent>=nxt:
        nxt+=240; print(f'{name} step {i} {spent:.0f}s {i/max(spent,1e-9):.2f}/s loss {np.mean(ls[-200:]):.4f}'); check(params,te,'  test')
print(f'{name} step {i} {spent:.0f}s loss {np.mean(ls[-200:]):.4f}'); check(params,te,'  test'); check(params,tr,'  train')
