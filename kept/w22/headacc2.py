"""accuracy of the heads (raw weights of a checkpoint) on held-out later turns: headacc.py OUT STEP"""
import sys; sys.path.insert(0,"/work/train/code25")
import numpy as np, jax, jax.numpy as jnp, dataclasses, json
import orbax.checkpoint as ocp
from pathlib import Path
from flax import nnx
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.data.datasets import open_features
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.train.registry import find_stage
keep_compiled_programs()
out,step=sys.argv[1],sys.argv[2]
path=Path("/work/train")/out/"checkpoints"/step/"state"
ck=ocp.PyTreeCheckpointer(); meta=ck.metadata(path).item_metadata.tree
ra=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), meta)
tree=ck.restore(path,args=ocp.args.PyTreeRestore(restore_args=ra)) if False else ck.restore(path,restore_args=ra)
print(tree.keys() if hasattr(tree,"keys") else type(tree))
params=tree["params"]
b=Bundle.open("/work/train/w21/c2/model"); mllm,enc=b.load("mllm"),b.load("encoder")
def put(module, t):
    st=nnx.state(module,nnx.Param); flat=dict(nnx.to_flat_state(st))
    for p,v in flat.items():
        x=t
        for k in p: x=x[k] if k in x else x[str(k)]
        x=x["value"] if isinstance(x,dict) and "value" in x else x
        v[...]=jnp.asarray(x)
    nnx.update(module,nnx.from_flat_state(list(flat.items())))
put(mllm,params["mllm"])
H={n:{k:jnp.asarray(v["value"] if isinstance(v,dict) and "value" in v else v) for k,v in params[n].items()} for n in("seen","words","after")}
kind,recipe=find_stage("mllm"); recipe=dataclasses.replace(recipe,targets="every",caption_weight=1.0,word_weight=0.01)
st=kind(recipe,b.config,b.protocol,tokenizer_dir=b.tokenizer_dir)
lay=st.layout; pk=st.packed_layout
def pooled(h,x):
    x=x*jax.lax.rsqrt(jnp.square(x).mean(-1,keepdims=True)+1e-6)
    l=x@h["kernel"]+h["bias"]; return jax.nn.logsumexp(l,-2)-jnp.log(l.shape[-2])
@jax.jit
def f(mllm,enc,g):
    s=st.make_batch(enc,g,jax.random.key(0))
    e,sq,seen,q=mllm.errors(s,label_slots=pk.answers.ravel())
    B=g.num_history.shape[0]; w,n=lay.window,lay.num_queries
    _,told=st._caption_error({"mllm":mllm,"encoder":enc},g)
    mids=seen; seen=mids[0]
    return (pooled(H["after"],mids[1][:,pk.after]),pooled(H["seen"],seen[:,np.flatnonzero(pk.history)].reshape(B,w-1,n,-1)),pooled(H["words"],q.reshape(B,w,n,-1)),pooled(H["words"],told.reshape(B,w,n,-1)),sq.reshape(B,w,n))
feats=open_features("/work/train/d/features"); T=feats.turns("test")
from animegamer_jax.train.stages.packing import window_ends
s=st.read_samples("/work/train/d/features",split="test")
ends=[i for i in range(500) if T[i]["turn"]==4]
C=[c for c,_ in json.load(open("/work/train/capcls.json"))["c"]]
cid={c:i for i,c in enumerate(C)}
fam={}
import collections
for i in range(500):
    c=T[i]["captions"]
    for k,name in ((1,"character"),(4,"accessory"),(5,"variant"),(6,"view")):
        if c[k] in cid: fam.setdefault(name,set()).add(cid[c[k]])
fam={k:np.array(sorted(v)) for k,v in fam.items()}
R=collections.defaultdict(list); SQ=[]
for i in range(0,100,20):
    g=jax.tree.map(lambda *x:np.stack(x),*[s[e] for e in ends[i:i+20]])
    after,seen,words,told,sq=map(np.asarray,f(mllm,enc,g)); SQ.append(sq[:,1:,8:].mean())
    for r,e in enumerate(ends[i:i+20]):
        rows=[T[j] for j in range(e-4,e+1)]
        for t,row in enumerate(rows):
            for k,name in ((1,"character"),(4,"accessory"),(5,"variant"),(6,"view")):
                c=row["captions"][k]
                if c not in cid: continue
                ids=fam[name]; y=cid[c]
                if t<4: R["after",name].append(ids[after[r,t,ids].argmax()]==y)
                if t<4: R["seen",name].append(ids[seen[r,t,ids].argmax()]==y)
                R["told",name].append(ids[told[r,t,ids].argmax()]==y)
                key={"character":"character","accessory":"character","variant":"place","view":"place"}[name]
                if t and any(p[key]==row[key] for p in rows[:t]): R["words",name].append(ids[words[r,t,ids].argmax()]==y)
print("mse later",np.mean(SQ))
for k,v in sorted(R.items()): print(*k,round(np.mean(v),3),len(v))
