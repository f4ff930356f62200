"""dump.py BUNDLE OUT: the language model's predictions of every turn from true histories, bf16 -> float16 npy."""
import sys, numpy as np, jax, jax.numpy as jnp, dataclasses, time
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.train.registry import find_stage
from animegamer_jax.train.stages.mllm import lay_out
keep_compiled_programs()
b = Bundle.open(sys.argv[1]); out = sys.argv[2]
kind, recipe = find_stage("mllm"); recipe = dataclasses.replace(recipe, targets="last", history_shown=0.0)
stage = kind(recipe, b.config, b.protocol, tokenizer_dir=b.tokenizer_dir)
mllm, enc = b.load("mllm", dtype="bfloat16"), b.load("encoder", dtype="bfloat16")
@jax.jit
def predict(mllm, enc, g):
    p = lay_out(enc, g, stage.layout)
    return mllm.represent(p.prompt, p.history, stage.layout).astype(jnp.float16)
for split in ("test", "train"):
    s = stage.read_samples("RUN/d/features", split=split)
    n, B, t0 = len(s), 50, time.time()
    reps = np.zeros((n, 44, 256), np.float16)
    for i in range(0, n, B):
        g = jax.tree.map(lambda *x: np.stack(x), *[s[k] for k in range(i, min(i + B, n))])
        m = len(g.num_history)
        if m < B: g = jax.tree.map(lambda x: np.concatenate([x, x[:1].repeat(B - m, 0)]), g)
        reps[i:i + m] = np.asarray(predict(mllm, enc, g))[:m]
        if i % 1000 == 0: print(split, i, n, round(time.time() - t0), flush=True)
    np.save(f"{out}-{split}.npy", reps)
