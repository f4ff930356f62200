import sys, numpy as np, jax, jax.numpy as jnp
from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.data.datasets import open_features
from animegamer_jax.models.latents import cosines, to_decoder
b=Bundle.open('./out/w4/decoder/model'); vc=b.config.vae
f=open_features('./out/w4/fmid'); l=f.latents('train'); src=f.turns('train'); N=300
R=[src[i] for i in range(N)]; M=np.stack([np.asarray(l[i]['moments'],np.float32) for i in range(N)])[...,:24]
lev=np.array([r['motion_level'] for r in R]); mot=np.array([str(r['motion']) for r in R]); mv=np.array([r['motion_value'] for r in R],np.float32)
dit=b.load('dit'); enc=b.load('encoder')
ctx=enc(jnp.asarray(np.stack([r['text_features'] for r in R]),jnp.float32),jnp.asarray(np.stack([r['image_features'] for r in R]),jnp.float32))
X=to_decoder(jnp.asarray(M),vc); C=cosines(17); sig=diffusion.Schedule().signal_levels()
@jax.jit
def est(dit,n,m,c): return -dit(n,timestep=jnp.full(len(n),999.),motion=m,context=c)
E=[]
for i in range(0,N,20):
    n=jax.random.normal(jax.random.key(i),X[i:i+20].shape); E.append(np.asarray(est(dit,n,jnp.asarray(mv[i:i+20]),ctx[i:i+20])))
P=np.concatenate(E); Xn=np.asarray(X); e=P-Xn
c=np.einsum('kf,nfhwz->nkhwz',C,Xn)[:,1:]; ee=np.einsum('kf,nfhwz->nkhwz',C,e)[:,1:]
for m in sorted(set(mot)):
    print(m,(mot==m).sum(),'AC err',round(float((ee[mot==m]**2).mean()/(c[mot==m]**2).mean()),3),'var',round(float((c[mot==m]**2).mean()),3),[(k,round(float((ee[(mot==m)&(lev==k)]**2).mean()/(c[(mot==m)&(lev==k)]**2).mean()),2)) for k in range(1,6) if ((mot==m)&(lev==k)).any()])
# by frequency
print('by frequency', [round(float((ee[:,k]**2).mean()/(c[:,k]**2).mean()),2) for k in range(16)])
# per-pixel share: how concentrated
ce=(c**2).sum((1,4)).reshape(N,-1); ce.sort(axis=1); print('share of AC energy in top 20% of places', round(float(ce[:,-43:].sum()/ce.sum()),2))
np.savez('./out/pred.npz',P=P[:8],X=Xn[:8])
