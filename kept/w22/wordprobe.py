"""what a ridge regression reads of details in the LM's predicted image tokens: wordprobe.py MODEL [N_TRAIN]"""
import sys; sys.path.insert(0,"/work/main")
import numpy as np, jax, jax.numpy as jnp, dataclasses
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.data.datasets import open_features
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.train.registry import find_stage
from animegamer_jax.train.stages.mllm import lay_out
keep_compiled_programs()
b=Bundle.open(sys.argv[1]); mllm,enc=b.load("mllm"),b.load("encoder")
N=int(sys.argv[2]) if len(sys.argv)>2 else 2000
kind,recipe=find_stage("mllm"); recipe=dataclasses.replace(recipe,targets="last")
st=kind(recipe,b.config,b.protocol,tokenizer_dir=b.tokenizer_dir)
lay=st.layout
@jax.jit
def f(mllm,enc,g):
    p=lay_out(enc,g,lay); return mllm.represent(p.prompt,p.history,lay)[:,-36:],p.representations[:,-1,-36:]
def collect(split,n):
    s=st.read_samples("/work/train/d/features",split=split); t=open_features("/work/train/d/features").turns(split)
    rows=[t[i] for i in range(n)]
    P,T=[],[]
    for i in range(0,n,50):
        g=jax.tree.map(lambda *x:np.stack(x),*[s[k] for k in range(i,i+50)])
        p,q=f(mllm,enc,g); P.append(np.asarray(p)); T.append(np.asarray(q))
    P,T=(np.concatenate(x).reshape(n,-1) for x in (P,T))
    seen={k:np.zeros(n,bool) for k in "avwc"}
    for i,r in enumerate(rows):
        for j in range(i-r["turn"],i):
            if rows[j]["character"]==r["character"]: seen["a"][i]=True
            if rows[j]["place"]==r["place"]: seen["v"][i]=True
    seen["w"]=seen["v"]; seen["c"]=np.array([r["turn"]>0 for r in rows])
    lab=dict(a=np.array([r["captions"][4] for r in rows]),v=np.array([r["captions"][5] for r in rows]),w=np.array([r["captions"][6] for r in rows]),c=np.array([r["character"] for r in rows]))
    return P,T,seen,lab
tr,te=collect("train",N),collect("test",500)
later=lambda x:x[2]["c"]
print("mse later train",np.square(tr[0]-tr[1])[later(tr)].mean().round(4),"test",np.square(te[0]-te[1])[later(te)].mean().round(4),"first test",np.square(te[0]-te[1])[~later(te)].mean().round(4))
for what,i in (("predicted",0),("true",1)):
    for k,name in dict(c="character",a="accessory",v="variant",w="view").items():
        a,bb=tr[2][k],te[2][k]
        X,Z=tr[i][a],te[i][bb]; m=X.mean(0); X,Z=X-m,Z-m
        names=np.unique(tr[3][k]); Y=(tr[3][k][a][:,None]==names)*1.0; ym=Y.mean(0)
        K=X@X.T; best=[]
        for lam in (1e-3,1e-2,1e-1):
            W=np.linalg.solve(K+lam*np.trace(K)/len(K)*np.eye(len(K)),Y-ym)
            best.append((names[(Z@X.T@W+ym).argmax(1)]==te[3][k][bb]).mean())
        print(what,name,len(names),"base",(te[3][k][bb]==names[ym.argmax()]).mean().round(3),"right",np.round(best,3),flush=True)
