"""accread3.py REPS [REPS2...]: a 2-layer reader of the accessory trained on true E_a tokens; read on true and on predicted ones of held-out later turns."""
import sys, time; import numpy as np, jax, jax.numpy as jnp, optax
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.data.datasets import open_features
b=Bundle.open("/work/train/w23/adapt/model"); enc=b.load("encoder",dtype="float32")
f=open_features("/work/train/d/features")
def read(split,n):
    T=f.turns(split); rows=[T[i] for i in range(min(n,len(T)))]
    img=np.stack([np.asarray(r["image_features"],np.float32) for r in rows])
    tok=np.concatenate([np.asarray(enc.image_tokens(jnp.asarray(img[i:i+100]))) for i in range(0,len(img),100)])
    return rows,tok
R,X=read("train",10000); RT,XT=read("test",500)
cap=lambda r: r["captions"][4]
C={c:i for i,c in enumerate(sorted({cap(r) for r in R}))}; print(len(C),list(C)[:8])
y=np.array([C[cap(r)] for r in R]); yt=np.array([C.get(cap(r),-1) for r in RT])
later=np.zeros(len(RT),bool)
for i,r in enumerate(RT):
    t=r["turn"]; later[i]=any(RT[j]["captions"][4]==cap(r) and RT[j]["captions"][1]==r["captions"][1] for j in range(i-t,i))
def init(k):
    ks=jax.random.split(k,8); d,h=X.shape[-1],256; g=lambda k,a,b: jax.random.normal(k,(a,b))/np.sqrt(a)
    return {"i":g(ks[0],d,h),"p":jax.random.normal(ks[1],(X.shape[1],h))*.02,"o":g(ks[2],h,len(C))*.1,"b":jnp.zeros(len(C)),
      "l":[{"q":g(ks[3+j],h,h),"k":g(ks[4+j],h,h),"v":g(ks[5+j],h,h),"w":g(ks[6+j],h,h)*.5,"u":g(ks[3+j],h,512),"d":g(ks[4+j],512,h)*.5} for j in range(2)]}
n=lambda x: (x-x.mean(-1,keepdims=True))/jnp.sqrt(x.var(-1,keepdims=True)+1e-5)
def net(p,x):
    x=n(x@p["i"])+p["p"]
    for l in p["l"]:
        z=n(x); q,k,v=[(z@l[a]).reshape(*z.shape[:2],4,64) for a in "qkv"]
        a=jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk",q,k)/8,-1)
        x=x+jnp.einsum("bhqk,bkhd->bqhd",a,v).reshape(z.shape)@l["w"]
        x=x+jax.nn.gelu(n(x)@l["u"])@l["d"]
    s=n(x)@p["o"]+p["b"]; return jax.nn.logsumexp(s,1)
def fit(X,y,steps=900):
    p=init(jax.random.key(0)); o=optax.adamw(optax.cosine_decay_schedule(2e-3,steps),weight_decay=.01); s=o.init(p)
    @jax.jit
    def step(p,s,x,y,k):
        x=x+.1*jax.random.normal(k,x.shape)
        l,g=jax.value_and_grad(lambda p: optax.softmax_cross_entropy_with_integer_labels(net(p,x),y).mean())(p)
        u,s=o.update(g,s,p); return optax.apply_updates(p,u),s,l
    rng=np.random.default_rng(0)
    for i in range(steps):
        j=rng.integers(0,len(X),128); p,s,l=step(p,s,X[j],y[j],jax.random.key(i))
        if i%100==0: print(i,float(l),flush=True)
    return p
score=lambda p,x: float((np.asarray(jax.jit(net)(p,x)).argmax(1)==yt)[later].mean())
import os,pickle
t=time.time()
p=pickle.load(open("accreader.pkl","rb")) if os.path.exists("accreader.pkl") else fit(X,y,700)
pickle.dump(jax.tree.map(np.asarray,p),open("accreader.pkl","wb")); print("reader of true tokens: true",score(p,XT),"n",later.sum(),round(time.time()-t),"s",flush=True)
for r in sys.argv[1:]:
    P=np.load(r+"-test.npy")[:, -X.shape[1]:].astype(np.float32)[:len(RT)]
    print(r,"reader of true tokens on predictions",score(p,P),"mse later",np.square(P-XT)[later].mean(),flush=True)
    try: PT=np.load(r+"-train.npy")[:, -X.shape[1]:].astype(np.float32)[:len(X)]
    except FileNotFoundError: continue
    q=fit(PT,y); print(r,"reader of predictions on predictions",score(q,P),flush=True)
