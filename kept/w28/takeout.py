"""takeout.py RUN STEP OUT: bundle with the raw LM of a checkpoint (of w21/captions/model), and OUT/heads.npz"""
import sys; sys.path.insert(0,"/work/train/code26")
import numpy as np, jax, jax.numpy as jnp
import orbax.checkpoint as ocp
from pathlib import Path
from animegamer_jax.bundle.bundle import NETWORKS, Bundle, BundleWriter
run,step,out=sys.argv[1:4]; which=sys.argv[4] if len(sys.argv)>4 else "params"
path=Path("/work/train")/run/"checkpoints"/step/"state"
ck=ocp.PyTreeCheckpointer(); meta=ck.metadata(path).item_metadata.tree
ra=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), meta)
P=ck.restore(path,restore_args=ra)[which]
flat={}
def walk(t,pre):
    for k,v in t.items():
        if isinstance(v,dict): walk(v,pre+[str(k)])
        else: flat[".".join(pre+[str(k)])]=v
walk(P["mllm"],[])
flat={k.removesuffix(".value"):v for k,v in flat.items()}
b=Bundle.open("/work/train/w23/adapt/model")
with BundleWriter(out,name="toy",protocol=b.protocol,overwrite=True,stages=b.info.stages) as w:
    for n in NETWORKS:
        if not b.has(n): continue
        it=list(b.read_in_order(n,b.leaves(n)))
        if n=="mllm":
            keys=[k for k,_ in it]; clean={k:k.removesuffix(".value") for k in keys}
            missing=[k for k in keys if clean[k] not in flat and clean[k].removeprefix("mllm.") not in flat]
            assert not missing,(missing[:3],list(flat)[:3])
            it=[(k,jnp.asarray(flat.get(clean[k],flat.get(clean[k].removeprefix("mllm.")))).astype(v.dtype)) for k,v in it]
        w.write_network(n,getattr(b.config,n),iter(it))
    w.write_tokenizer(Path(str(b.path))/"tokenizer")
H={}
for n in [x for x in ("seen","noted","meant") if x in P]:
    for k,v in P[n].items():
        H[f"{n}.{k}"]=v["value"] if isinstance(v,dict) else v
np.savez(Path(out).parent/"heads.npz",**H)
