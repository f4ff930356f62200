"""lev.py MODEL GAMES STEPS... : levels of decoder's clips of true representations, by level and motion."""
import sys, numpy as np, time
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.evaluate.worlds import FrameSize
from animegamer_jax.media.motion import FLICKER, measure_motion, motion_level
from animegamer_jax.toy.evaluation import WORLD
from animegamer_jax.toy.scene import LEVELS, MOTION_EDGES
from animegamer_jax.toy.scoring.decoder_samples import sample_shots, true_representations
from animegamer_jax.toy.scoring.benchmark import toy_games
from animegamer_jax.toy.scoring.reader import load_reader, read_clips
from animegamer_jax.toy.scoring.attributes import VALUES, labels
from animegamer_jax.models.vae import signed, to_uint8
from animegamer_jax.models.latents import mode
import jax, jax.numpy as jnp
m=sys.argv[1]; N=int(sys.argv[2]); b=Bundle.open(m)
bm=WORLD.make_benchmark('test',num_games=N,num_turns=5,seed=1000)
true=WORLD.true_clips(bm,FrameSize(17,96,144))
games=toy_games(bm); lv=np.array([[t.motion_level for t in g.turns] for g in bm.games]); mot=np.array([[t.scene.motion for t in g] for g in games])
scenes=[t.scene for g in games for t in g]
texts=[str(t.full_motion) for g in bm.games for t in g.turns]
rep=true_representations(b,texts,true[:,:,0].reshape(-1,96,144,3)).reshape(*lv.shape,-1,b.config.encoder.representation_size)
reader=load_reader()
def show(name,clips):
    c=clips.reshape(-1,*clips.shape[2:]); v=measure_motion(c,noise=FLICKER); l=np.array([motion_level(x,edges=MOTION_EDGES) for x in v.tolist()]); e=lv.ravel(); r=l==e
    ps=-10*np.log10(((c/255.-true.reshape(c.shape)/255.)**2).mean((1,2,3,4))).mean()
    print(name,f'ACC-F {r.mean():.3f} MAE {abs(l-e).mean():.3f} PSNR {ps:.2f}',' '.join(f'{k}: {np.median(v[e==k]):.1f} ({r[e==k].mean():.2f}; {(l>e)[e==k].mean():.2f} over)' for k in LEVELS),flush=True)
    print('   by motion',{str(k): round(float(r[mot.ravel()==k].mean()),2) for k in sorted(set(mot.ravel()))})
    f=read_clips(reader,c); print('   read',{n:round(float((f[n]==labels(scenes,n))[labels(scenes,n)>=0].mean()),3) for n in VALUES if (labels(scenes,n)>=0).any()},flush=True)
    return v
show('true',true)
vae=b.load('vae'); rec=jax.jit(lambda f: to_uint8(vae.decode(mode(vae.encode(signed(f))))))
c=true.reshape(-1,*true.shape[2:]); show('vae',np.concatenate([np.asarray(rec(jnp.asarray(c[i:i+5]))) for i in range(0,len(c),5)]).reshape(true.shape))
out={}
for s in sys.argv[3:]:
    s,_,g=s.partition('x'); g=[float(q) for q in g.split(',')] if g else [1]*5
    vals=tuple(np.array(b.protocol.motion_values)*np.array(g)); t0=time.time()
    clips=sample_shots(b,representations=rep,levels=lv,seeds=range(1000,1000+N),steps=int(s),motion_values=vals)
    v=show(f'{s} steps {g} {time.time()-t0:.0f}s',clips); out[s+str(g)]=clips
np.savez_compressed('/tmp/lev.npz',lv=lv,mot=mot,true=true,**{k.replace('[','_').replace(']','').replace(', ','_').replace('.','p'):x for k,x in out.items()})
