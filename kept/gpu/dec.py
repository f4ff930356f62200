import sys, time, numpy as np
sys.path.insert(0,'scripts/toy')
from pathlib import Path
from PIL import Image
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.evaluate.benchmarks.format import read_benchmark
from animegamer_jax.toy.scoring.decoder_samples import sample_shots, true_representations
from animegamer_jax.toy.scoring.reader import load_reader, read_clips
from animegamer_jax.toy.scoring.attributes import VALUES, labels
from animegamer_jax.toy.evaluation import WORLD
import ablations
from animegamer_jax.evaluate.play_games import score_clips
m=Path(sys.argv[1]); N=int(sys.argv[2]); steps=[int(x) for x in sys.argv[3].split(',')]
import dataclasses
bm=read_benchmark('toy'); bm=dataclasses.replace(bm, games=bm.games[:N]) if dataclasses.is_dataclass(bm) else bm.model_copy(update={'games': bm.games[:N]})
suite=ablations.make_decoder_suite(m,bm)
true=suite.true_clips
b=Bundle.open(m)
texts=[str(t.full_motion) for g in bm.games for t in g.turns]
f=true[:,:,0].reshape(-1,*true.shape[3:])
rep=true_representations(b,texts,f)
lv=np.array([[t.motion_level for t in g.turns] for g in bm.games])
for s in steps:
    t0=time.time()
    clips=sample_shots(b,representations=rep.reshape(*lv.shape,*rep.shape[1:]),levels=lv,seeds=[g.seed for g in bm.games],steps=s)
    v=score_clips(lambda t: clips[:,t], bm, suite)
    ps=-10*np.log10(((clips[:,:,0]/255.-true[:,:,0]/255.)**2).mean(axis=(2,3,4))).mean()
    print(s,'steps', f'{time.time()-t0:.0f} s, first frames {ps:.2f} dB', {k: round(float(np.nanmean(x)),3) for k,x in v.items() if np.asarray(x).dtype!=object}, flush=True)
    acc=v.get('ACC-F'); 
    if acc is not None:
        a=np.asarray(acc).reshape(lv.shape); print('levels',{l: round(float(a[lv==l].mean()),2) for l in range(1,6)})
    rows=[]
    for g in range(min(4,N)):
        rows.append(np.concatenate([np.concatenate([clips[g,t,0],clips[g,t,8],clips[g,t,16]],0) for t in range(5)],1))
        rows.append(np.concatenate([np.concatenate([true[g,t,0],true[g,t,16]],0) for t in range(5)],1))
    Image.fromarray(np.concatenate(rows,0)).save(f'./out/dec-{m.parent.name}-{s}.png')
