"""dump2.py BUNDLE OUT: predictions of every training turn from true histories by packed sequences (float32 -> float16), those of test turns as dump.py."""
import sys, numpy as np, jax, jax.numpy as jnp, dataclasses, time
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.train.registry import find_stage
from animegamer_jax.models.mllm import pad_batch, padded_length
from animegamer_jax.train.stages.packing import window_ends
from animegamer_jax.data.datasets import open_features
keep_compiled_programs()
b = Bundle.open(sys.argv[1]); out = sys.argv[2]
kind, recipe = find_stage("mllm")
recipe = dataclasses.replace(recipe, targets="every", history_shown=0.0, history_noise=0.0, word_dropout=0.0, dtype="float32")
stage = kind(recipe, b.config, b.protocol, tokenizer_dir=b.tokenizer_dir)
mllm, enc = b.load("mllm", dtype="float32"), b.load("encoder", dtype="float32")
@jax.jit
def predict(mllm, enc, g, key):
    batch = stage.make_batch(enc, g, key)
    batch = pad_batch(batch, padded_length(batch.ids.shape[1]))
    x = mllm.embed(batch.ids, batch.history_mask, batch.history)
    hidden, _ = mllm.mistral(x, batch.tokens)
    at = jnp.take_along_axis(hidden, batch.query_slots[:, :, None], axis=1)
    r = mllm.output_resampler(at).astype(jnp.float32)
    t = batch.target.astype(jnp.float32)
    shape = (len(r), -1, 44, r.shape[-1])
    return r.reshape(shape).astype(jnp.float16), jnp.square(r - t).reshape(*shape[:1], -1, 44, r.shape[-1])[:, :, 8:].mean((2, 3))
features = open_features("/work/train/d/features")
for split in sys.argv[3:] or ("test", "train"):
    turns = features.turns(split); n = len(turns)
    ends = list(window_ends(turns, 5)); s = stage.read_samples("/work/train/d/features", split="train") if split == "train" else None
    if s is None:
        from animegamer_jax.train.stages.mllm import game_samples, ModelConfig
        s = game_samples(features, split=split, windows=stage.windows(), config=ModelConfig(encoder=b.config.encoder), numbers=ends, shown=False)
    B, t0 = 20, time.time(); reps = np.zeros((n, 44, 256), np.float16); errs = []
    for i in range(0, len(s), B):
        rows = [s[k] for k in range(i, min(i + B, len(s)))]; m = len(rows)
        rows += rows[:1] * (B - m)
        if split == "test": rows = [x._replace(shown=x.image) for x in rows]
        g = jax.tree.map(lambda *x: np.stack(x), *rows)
        r, e = map(np.asarray, predict(mllm, enc, g, jax.random.key(i)))
        for k in range(m):
            last, h = ends[i + k], int(rows[k].num_history)
            reps[last - h : last + 1] = r[k, 4 - h :]
            if h == 4: errs.append(e[k])
        if i % 200 == 0: print(split, i, len(s), round(time.time() - t0), np.mean(errs, 0), flush=True)
    print(split, np.mean(errs, 0)); assert (np.abs(reps).max((1, 2)) > 0).all()
    np.save(f"{out}-{split}.npy", reps)
