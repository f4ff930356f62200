"""Writes the networks that a stage changed in bfloat16, with its metrics and its run's description."""
import json, shutil, sys
from pathlib import Path
import jax.numpy as jnp, numpy as np
from animegamer_jax.bundle.bundle import Bundle, BundleWriter
folder, out = Path(sys.argv[1]), Path(sys.argv[2])
out.mkdir(parents=True)
b = Bundle.open(folder / "model")
have = [n for n in ("mllm", "encoder", "dit") if b.has(n)]
have = {"mllm": ["mllm"], "adapt": ["dit"], "nopics-a": ["mllm", "dit"]}.get(folder.name, [n for n in have if n != "mllm"])
with BundleWriter(out / "model", name=b.info.name, protocol=b.protocol, packing="bytes", stages=b.info.stages) as w:
    for n in have:
        w.write_network(n, getattr(b.config, n), ((k, x.astype(jnp.bfloat16)) for k, x in b.read_in_order(n, b.leaves(n))))
shutil.copy(folder / "model/config.json", out / "config.json")
for f in folder.glob("metrics.jsonl"):
    shutil.copy(f, out)
for f in folder.glob("checkpoints/*/run_config/metadata"):
    shutil.copy(f, out / f"run_config-{f.parent.parent.name}")
if folder.name == "t2v":
    sys.path.insert(0, "scripts/toy")
    import jax
    from baseline import load_context
    layer = load_context(folder, t5_size=b.config.t5.d_model, hidden_size=b.config.dit.hidden_size)
    np.savez(out / "context.npz", kernel=np.asarray(layer.kernel.get_value(), np.float32), bias=np.asarray(layer.bias.get_value(), np.float32))
