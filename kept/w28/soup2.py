"""soup2.py A B WEIGHT OUT: bundle A with dit = WEIGHT*A + (1-WEIGHT)*B."""
import sys; import jax.numpy as jnp
from pathlib import Path
from animegamer_jax.bundle.bundle import NETWORKS, Bundle, BundleWriter
pa, pb, a, out = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]
b = Bundle.open(pa); j = Bundle.open(pb)
with BundleWriter(out, name="toy", protocol=b.protocol, overwrite=True, stages=tuple(s for s in b.info.stages if s != "adapt")) as w:
    for n in NETWORKS:
        if not b.has(n): continue
        it = b.read_in_order(n, b.leaves(n))
        if n == "dit":
            other = dict(j.read_in_order(n, j.leaves(n)))
            it = ((k, (a * jnp.asarray(v, jnp.float32) + (1 - a) * jnp.asarray(other[k], jnp.float32)).astype(v.dtype)) for k, v in it)
        w.write_network(n, getattr(b.config, n), it)
    w.write_tokenizer(Path(str(b.path)) / "tokenizer")
