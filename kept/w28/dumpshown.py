"""dumpshown.py BUNDLE OUT LEVEL: CLIP's features of first frames of the training turns as the decoder redraws them from the
true ones noised to step LEVEL of 1000, with the predicted context and guidance 2.5. They stay aligned with the true clips."""
import sys, time; import numpy as np, jax, jax.numpy as jnp
from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.data import samples, windows
from animegamer_jax.data.datasets import open_features
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.models.latents import from_decoder, mode, to_decoder
from animegamer_jax.models.vae import to_uint8
keep_compiled_programs()
b, out, level = Bundle.open(sys.argv[1]), sys.argv[2], int(sys.argv[3])
count = int(sys.argv[4]) if len(sys.argv) > 4 else None
dit, vae, clip = b.load("dit"), b.load("vae"), b.load("clip")
empty = b.load("encoder").unconditional().astype(jnp.float32)
S = diffusion.Schedule(); grid = S.signal_levels()
times = np.linspace(level, 0, 4)[:-1].round().astype(int)  # three deterministic steps
@jax.jit
def redraw(dit, vae, clip, moments, ctx, motion, key):
    clean = to_decoder(mode(moments[:, : dit.config.patch_frames]), vae.config)
    eps = jax.random.normal(key, clean.shape)
    x = grid[level] * clean + np.sqrt(1 - grid[level] ** 2) * eps
    for i, t in enumerate(times):
        s, n = float(grid[t]), float(np.sqrt(1 - grid[t] ** 2))
        rows = jnp.concatenate([jnp.broadcast_to(empty, ctx.shape), ctx])
        v = dit(jnp.concatenate([x, x]), timestep=jnp.full(2 * len(x), float(t)), motion=jnp.concatenate([motion, motion]), context=rows)
        u, v = jnp.split(v, 2); v = u + 2.5 * (v - u)
        clean, noise = s * x - n * v, n * x + s * v
        after = float(grid[times[i + 1]]) if i + 1 < len(times) else 1.0
        x = after * clean + float(np.sqrt(1 - after ** 2)) * noise
    frame = to_uint8(vae.decode(from_decoder(x, vae.config)))[:, 0]
    return clip.see(frame), frame
features = open_features("/work/train/d/features")
for split in ("train",):
    turns, latents, reps = features.turns(split), features.latents(split), np.load(f"/work/train/reps7-{split}.npy")
    n = len(turns) if count is None else count; t0 = time.time(); found = None
    for i in range(0, n, 50):
        at = [min(k, n - 1) for k in range(i, i + 50)]
        rs = [turns[k] for k in at]
        m = np.stack([samples.read_moments(latents, k, r) for k, r in zip(at, rs)])
        f, frame = redraw(dit, vae, clip, jnp.asarray(m), jnp.asarray(reps[at], jnp.float32), jnp.asarray([r["motion_value"] for r in rs], jnp.float32), jax.random.key(i))
        f = np.asarray(f, np.float16)
        if found is None: found = np.zeros((n, *f.shape[1:]), np.float16)
        found[i : i + 50] = f[: n - i]
        if i == 0:
            from PIL import Image
            fr = np.asarray(frame)[:40].reshape(8, 5, *frame.shape[1:]); Image.fromarray(np.concatenate([np.concatenate(list(r), 1) for r in fr], 0)).save(f"{out}-{split}.png")
        if i % 1000 == 0: print(split, i, n, round(time.time() - t0), flush=True)
    np.save(f"{out}-{split}.npy", found)
