"""assemble.py OUT BASE PART...: networks of PARTs (later ones win) over those of BASE."""
import sys
from pathlib import Path
from animegamer_jax.bundle.bundle import NETWORKS, Bundle, BundleWriter
out, base, *parts = sys.argv[1:]
bundles = [Bundle.open(p) for p in parts[::-1]] + [Bundle.open(base)]
last = bundles[0]
with BundleWriter(out, name="toy", protocol=last.protocol, overwrite=True, stages=last.info.stages) as w:
    for n in NETWORKS:
        b = next((b for b in bundles if b.has(n)), None)
        if b:
            w.write_network(n, getattr(b.config, n), b.read_in_order(n, b.leaves(n)))
    w.write_tokenizer(Path(str(bundles[-1].path)) / "tokenizer")
