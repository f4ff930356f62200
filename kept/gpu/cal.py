import sys; sys.path.insert(0,'tests/media')
import numpy as np
from concurrent.futures import ProcessPoolExecutor
import test_motion as T
from animegamer_jax.toy.drawing import poses
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.media.motion import motion_value
import cv2
def one(a):
    cv2.setNumThreads(1)
    gains,m,l,seed=a; poses._GAINS.update(gains); rng=np.random.default_rng(seed)
    import dataclasses
    sc=T.draw_scene(rng,motion=m,level=l)
    from animegamer_jax.toy.scene import Details
    sc=dataclasses.replace(sc,seed=int(rng.integers(2**31)),details=dataclasses.replace(sc.details,distance=('near','far')[seed%2],side=('left','right')[seed//2%2]))
    return motion_value(render(sc))
if __name__=='__main__':
    G={k:list(v) for k,v in poses._GAINS.items()}; N=10
    with ProcessPoolExecutor(2) as ex:
        for it in range(5):
            jobs=[(G,m,l,1000*it+s) for m in T.MOTIONS for l in T.LEVELS for s in range(N)]
            v=np.array(list(ex.map(one,jobs,chunksize=10))).reshape(len(T.MOTIONS),5,N)
            lev=np.digitize(v,T.MOTION_EDGES)+1
            print(it,'right by level',(lev==np.array(T.LEVELS)[None,:,None]).mean((0,2)).round(3),flush=True)
            if it==4: break
            for i,m in enumerate(T.MOTIONS):
                for j in range(5):
                    G[m][j]=float(np.clip(G[m][j]*np.clip(T.MOTION_VALUES[j]/max(np.median(v[i,j]),.05),.4,2)**.9,.15,2.2))
        for i,m in enumerate(T.MOTIONS): print(f'    "{m}": ('+', '.join(f'{x:.2f}' for x in G[m])+'),', np.median(v[i],axis=1).round(1), [f'{a:.0f}-{b:.0f}' for a,b in zip(v[i].min(1),v[i].max(1))])
