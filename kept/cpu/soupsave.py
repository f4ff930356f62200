"""soupsave.py A OUT: w15/adaptp/model with dit = A*adaptp + (1-A)*joint."""
import sys; import numpy as np, jax.numpy as jnp
from pathlib import Path
from animegamer_jax.bundle.bundle import NETWORKS, Bundle, BundleWriter
a, out = float(sys.argv[1]), sys.argv[2]
b = Bundle.open("RUN/w15/adaptp/model"); j = Bundle.open("RUN/kept/decoder/model")
with BundleWriter(out, name="toy", protocol=b.protocol, overwrite=True, stages=tuple(s for s in b.info.stages if s != "adapt")) as w:
    for n in NETWORKS:
        if not b.has(n): continue
        it = b.read_in_order(n, b.leaves(n))
        if n == "dit":
            other = dict(j.read_in_order(n, j.leaves(n)))
            it = ((k, (a * jnp.asarray(v, jnp.float32) + (1 - a) * jnp.asarray(other[k], jnp.float32)).astype(v.dtype)) for k, v in it)
        w.write_network(n, getattr(b.config, n), it)
    w.write_tokenizer(Path(str(b.path)) / "tokenizer")
