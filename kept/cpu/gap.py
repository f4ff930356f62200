import sys, numpy as np, jax, jax.numpy as jnp, dataclasses
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.train.registry import find_stage
from animegamer_jax.train.stages.mllm import lay_out
b = Bundle.open(sys.argv[1])
kind, recipe = find_stage("mllm"); recipe = dataclasses.replace(recipe, targets="last")
stage = kind(recipe, b.config, b.protocol, tokenizer_dir=b.tokenizer_dir)
mllm, enc = b.load("mllm"), b.load("encoder")
@jax.jit
def err(mllm, enc, g):
    p = lay_out(enc, g, stage.layout)
    f, _ = mllm.predict(p.prompt, p.history, stage.layout)
    return jnp.square(f - p.representations[:, -1]).mean((1, 2))
for split in ("train", "test"):
    s = stage.read_samples("RUN/d/features", split=split)
    n = min(len(s), 400); idx = np.random.default_rng(0).permutation(len(s))[:n]
    e, h = [], []
    for i in range(0, n, 50):
        g = jax.tree.map(lambda *x: np.stack(x), *[s[int(k)] for k in idx[i:i+50]])
        e.append(np.asarray(err(mllm, enc, g))); h.append(g.num_history)
    e, h = np.concatenate(e), np.concatenate(h)
    print(split, e.mean().round(4), "by turn", [e[h == k].mean().round(4) for k in range(5)], flush=True)
