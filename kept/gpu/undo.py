"""The bundle before the warm-up: all but the encoder."""
import sys
from pathlib import Path
from animegamer_jax.bundle.bundle import NETWORKS, Bundle, BundleWriter
b = Bundle.open(sys.argv[1])
with BundleWriter(sys.argv[2], name="toy", protocol=b.protocol, overwrite=True, stages=("foundations-clip", "foundations-t5", "foundations-vae", "foundations-dit")) as w:
    for n in NETWORKS:
        if b.has(n) and n != "encoder":
            w.write_network(n, getattr(b.config, n), b.read_in_order(n, b.leaves(n)))
    w.write_tokenizer(Path(str(b.path)) / "tokenizer")
