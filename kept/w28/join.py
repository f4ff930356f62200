"""join.py MLLM.npz DIT.npz OUT: kept/decoder/model with the language model and the decoder of the files (bf16 bits)."""
import sys, dataclasses; import numpy as np, jax.numpy as jnp
from pathlib import Path
from animegamer_jax.bundle.bundle import NETWORKS, Bundle, BundleWriter
from animegamer_jax.configs import make_toy
from animegamer_jax.bundle import bundle as mod
out = sys.argv[3]
b = Bundle.open("/work/train/kept/decoder/model")
z = {n: np.load(f) for n, f in zip(("mllm", "dit"), sys.argv[1:])}
mc = make_toy().mllm; mc = dataclasses.replace(mc, mistral=dataclasses.replace(mc.mistral, vocab_size=250), param_dtype="bfloat16")
with BundleWriter(out, name="toy", protocol=b.protocol, overwrite=True, stages=(*b.info.stages, "mllm", "adapt")) as w:
    for n in NETWORKS:
        if n == "mllm" or n == "dit":
            have = {k.removesuffix(".value").removeprefix(n + "."): z[n][k].view(jnp.bfloat16) for k in z[n].files}
            cfg = mc if n == "mllm" else b.config.dit
            w.write_network(n, cfg, iter([(k, v) for k, v in sorted(have.items())]))
        elif b.has(n):
            w.write_network(n, getattr(b.config, n), iter(b.read_in_order(n, b.leaves(n))))
    w.write_tokenizer(Path(str(b.path)) / "tokenizer")
