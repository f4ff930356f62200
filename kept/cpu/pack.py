"""pack.py BUNDLE NETWORK OUT.npz: a network's weights as bf16 bits."""
import sys; import numpy as np, jax.numpy as jnp
from animegamer_jax.bundle.bundle import Bundle
src, net, out = sys.argv[1:]
b = Bundle.open(src)
np.savez(out, **{f"{net}.{k}": np.asarray(v).astype(jnp.bfloat16).view(np.uint16) for k, v in b.read_in_order(net, b.leaves(net))})
