"""tob.py NPZ NETWORK TEMPLATE OUT: TEMPLATE with the network's weights of NPZ (bf16 bits)."""
import sys; import numpy as np, jax.numpy as jnp
from pathlib import Path
from animegamer_jax.bundle.bundle import NETWORKS, Bundle, BundleWriter
npz, net, template, out = sys.argv[1:]
z = np.load(npz); b = Bundle.open(template)
have = {k.removesuffix(".value"): z[k].view(jnp.bfloat16) for k in z.files}
with BundleWriter(out, name="toy", protocol=b.protocol, overwrite=True, stages=b.info.stages) as w:
    for n in NETWORKS:
        if not b.has(n): continue
        leaves = b.leaves(n)
        if n != net: arrays = b.read_in_order(n, leaves)
        else:
            names = [next(k for k in have if k == f"{n}.{l}" or k == l) for l in leaves]
            arrays = [(l, have[k].astype(np.float32).reshape(leaves[l].shape)) for l, k in zip(leaves, names)]
        w.write_network(n, getattr(b.config, n), iter(arrays))
    w.write_tokenizer(Path(str(b.path)) / "tokenizer")
