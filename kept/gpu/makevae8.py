"""makevae8.py OUT: clip of w8, T5 and VAE as before, temporal compression 2, scales measured on w8's games; prints PSNR on 100 held-out clips."""
import sys, dataclasses, numpy as np, jax, jax.numpy as jnp
from pathlib import Path
from concurrent.futures import ThreadPoolExecutor
from animegamer_jax.bundle.bundle import Bundle, BundleWriter
from animegamer_jax.toy.world import PROTOCOL
from animegamer_jax.data.datasets import open_games
from animegamer_jax.data.samples import read_frames
from animegamer_jax.models.vae import signed
from animegamer_jax.models.latents import cosines, mode, split_moments
from animegamer_jax.train.stages.foundations.vae import psnr
from animegamer_jax.configs import make_toy
out=sys.argv[1]
old=Bundle.open('/work/train/g0/kept/vae'); clip=Bundle.open('/work/train/w8/clip/model')
vc=dataclasses.replace(old.config.vae, temporal_compression=2, scaling_factor=1.0, frequency_scales=())
print(vc); print('toy', make_toy().vae)
def write(path, vc):
    with BundleWriter(path, name='toy', protocol=PROTOCOL, overwrite=True, stages=('foundations-clip','foundations-t5','foundations-vae')) as w:
        for n,b,c in (('clip',clip,clip.config.clip),('t5',old,old.config.t5),('vae',old,vc)):
            w.write_network(n, c, b.read_in_order(n, b.leaves(n)))
        w.write_tokenizer(Path(str(clip.path))/'tokenizer')
write('/tmp/vae8', vc)
vae=Bundle.open('/tmp/vae8').load('vae')
g=open_games('/work/train/w8/games'); ex=ThreadPoolExecutor(2)
def clips(split, idx):
    t=g.turns(split); return np.stack(list(ex.map(lambda i: read_frames(t[i],info=g.info,num_frames=g.info.num_frames), idx)))
@jax.jit
def means(vae, frames):
    latents, lv = split_moments(vae.encode(signed(frames)))
    fr=jnp.einsum("kf,bfhwz->bkhwz", cosines(latents.shape[1]), latents)
    return latents.mean(), jnp.square(fr).mean((0,2,3,4))+jnp.exp(lv).mean()
rng=np.random.default_rng(0); n=len(g.turns('train')); print(n,'train turns',len(g.turns('test')))
found=[means(vae, jnp.asarray(clips('train', rng.integers(0,n,4)))) for _ in range(64)]
mean=np.mean([f[0] for f in found]); sq=np.array([f[1] for f in found],np.float64).mean(0); sq[0]-=len(sq)*mean**2
factor=1/np.sqrt(sq.mean()); dev=np.sqrt(sq)*factor; p=.5
scales=dev**-p/np.sqrt(np.mean(dev**(2-2*p)))
print('factor',factor,'scales',scales)
write(out, dataclasses.replace(vc, scaling_factor=float(factor), frequency_scales=tuple(map(float,scales))))
@jax.jit
def rec(vae,frames):
    true=signed(frames); made=vae.decode(mode(vae.encode(true))); e=jnp.square(jnp.clip(made,-1,1)-true)
    return psnr(made,true), 10*jnp.log10(4/e.mean((1,2,3,4)))
ps=[]
for i in range(0,100,4): ps.append(np.asarray(rec(vae, jnp.asarray(clips('test', range(i,i+4))))[1]))
ps=np.concatenate(ps); print('PSNR', ps.mean().round(2), np.percentile(ps,[0,10,50,90,100]).round(2))
