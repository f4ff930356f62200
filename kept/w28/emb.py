import sys; sys.path.insert(0, "/work/main/scripts/toy")
from pathlib import Path
from animegamer_jax.bundle.bundle import Bundle
import embed
src = Bundle.open(sys.argv[1]); embed.write_bundle(src, Path(sys.argv[2]))
print(Bundle.open(sys.argv[2]).digest(), src.digest())
