"""err.py MODEL: error from noise by motion on 100 train and 100 test turns, at several diffusion steps."""
import sys, numpy as np, jax, jax.numpy as jnp
from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.data.datasets import open_features
from animegamer_jax.models.latents import cosines, to_decoder
b=Bundle.open(sys.argv[1]); vc=b.config.vae
f=open_features('/work/train/w5/features'); N=100
dit=b.load('dit'); enc=b.load('encoder'); C=cosines(17); sig=diffusion.Schedule().signal_levels()
@jax.jit
def est(dit,x,n,t,a,s,m,c):
    xt=a*x+s*n; return a*xt-s*dit(xt,timestep=jnp.full(len(n),t),motion=m,context=c)
for split in ('train','test'):
    l=f.latents(split); src=f.turns(split)
    R=[src[i] for i in range(N)]; M=np.stack([np.asarray(l[i]['moments'],np.float32) for i in range(N)])[...,:24]
    mot=np.array([str(r['motion']) for r in R]); mv=np.array([r['motion_value'] for r in R],np.float32)
    ctx=enc(jnp.asarray(np.stack([r['text_features'] for r in R]),jnp.float32),jnp.asarray(np.stack([r['image_features'] for r in R]),jnp.float32))
    X=to_decoder(jnp.asarray(M),vc); Xn=np.asarray(X); c=np.einsum('kf,nfhwz->nkhwz',C,Xn)
    for t in (999,900,800,600,300):
        a=np.float32(sig[t]); s=np.float32(np.sqrt(1-a*a)); E=[]
        for i in range(0,N,20):
            n=jax.random.normal(jax.random.key(i),X[i:i+20].shape); E.append(np.asarray(est(dit,X[i:i+20],n,float(t),a,s,jnp.asarray(mv[i:i+20]),ctx[i:i+20])))
        ee=np.einsum('kf,nfhwz->nkhwz',C,np.concatenate(E)-Xn)
        r=lambda q: round(float((ee[q][:,1:]**2).mean()/(c[q][:,1:]**2).mean()),2)
        dc=c[:,0]-c[:,0].mean(0); print(split,t,f'a={a:.3f}','DC',round(float((ee[:,0]**2).mean()/(dc**2).mean()),3),'AC',r(slice(None)),{m:r(mot==m) for m in sorted(set(mot))},flush=True)
