"""info2.py CLIP_BUNDLE OUT.npz N: CLIP's patches of first frames of w5's games; then how much of the first latents ridge regression leaves unexplained."""
import sys, numpy as np, jax, jax.numpy as jnp
from concurrent.futures import ThreadPoolExecutor
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.data.datasets import open_games, open_features
from animegamer_jax.data.samples import read_frames
from animegamer_jax.data.features import see_frames
clip=Bundle.open(sys.argv[1]).load('clip'); g=open_games('/work/train/w5/games'); N=int(sys.argv[3]); out={}
for split,n in (('train',N),('test',100)):
    t=g.turns(split); fs=[]
    with ThreadPoolExecutor(2) as ex:
        for i in range(0,n,100):
            fr=np.stack([x[0] for x in ex.map(lambda r: read_frames(r,info=g.info,num_frames=g.info.num_frames),[t[j] for j in range(i,min(i+100,n))])])
            fs.append(np.asarray(see_frames(clip,jnp.asarray(fr)),np.float32).astype(np.float16))
    out[split]=np.concatenate(fs)
np.savez(sys.argv[2],**out)
f=open_features('/work/train/w5/features')
def lat(split,n):
    l=f.latents(split); Z=np.stack([np.asarray(l[i]['moments'][0,...,:24],np.float32) for i in range(n)]); return Z.reshape(n,6,2,6,3,24).transpose(0,1,3,2,4,5).reshape(n,36,144)
M=min(N,2500); X,Xt=out['train'][:M].astype(np.float32),out['test'].astype(np.float32); Z,Zt=lat('train',M),lat('test',100)
def neigh(X):
    n=len(X); g=X.reshape(n,6,6,-1); p=np.pad(g,((0,0),(1,1),(1,1),(0,0))); return np.concatenate([p[:,i:i+6,j:j+6] for i in range(3) for j in range(3)],-1).reshape(n,36,-1)
for name,fn in (('patch',lambda x:x),('3x3',neigh)):
    A,At=fn(X),fn(Xt); mu=A.mean(0); zm=Z.mean(0); s=A.std((0,1)); A,At=(A-mu)/s,(At-mu)/s; ev=vv=0
    best=None
    for lam in (30,300):
        ev=vv=0
        for p in range(36):
            W=np.linalg.solve(A[:,p].T@A[:,p]+lam*np.eye(A.shape[-1]),A[:,p].T@(Z[:,p]-zm[p])); ev+=((At[:,p]@W-(Zt[:,p]-zm[p]))**2).mean(); vv+=((Zt[:,p]-zm[p])**2).mean()
        print(name,'ridge',lam,'unexplained',round(float(ev/vv),4),flush=True)
