"""cal3.py BUNDLE: unconditional rows with the motion value of level 1."""
import sys; sys.path.insert(0,"BRANCH/scripts/toy")
import numpy as np, jax, jax.numpy as jnp
from steps import *
from animegamer_jax import diffusion
from animegamer_jax.game.rollout import decode_clip
from animegamer_jax.toy.scoring.attributes import VALUES, labels
from animegamer_jax.toy.scoring.benchmark import toy_games
from animegamer_jax.toy.scoring.reader import load_reader, read_clips
keep_compiled_programs()
bundle = Bundle.open(sys.argv[1]); games, seed = 12, 1000
benchmark = WORLD.make_benchmark("test", num_games=games, num_turns=5, seed=seed)
size = FrameSize(*clip_size(bundle.config.dit, bundle.config.vae))
true = WORLD.true_clips(benchmark, size)
levels = np.array([[t.motion_level for t in g.turns] for g in benchmark.games])
reps = np.load("RUN/cal-reps.npy")[:games].reshape(60, 44, 256)
truth = np.stack([labels([t.scene for t in g], "character") for g in toy_games(benchmark)])
dit, vae = bundle.load("dit"), bundle.load("vae"); c = dit.config
empty = bundle.load("encoder").unconditional().astype(jnp.float32)
table = diffusion.make_sampler_table(diffusion.schedule_of(bundle.protocol), 6)
@jax.jit
def draw(dit, vae, ctx, motion, low, key, s):
    shape = (len(ctx), c.latent_frames, c.latent_height, c.latent_width, c.latent_channels)
    rows = jnp.concatenate([jnp.broadcast_to(empty, ctx.shape), ctx]); m = jnp.concatenate([low, motion])
    def f(x, t, g):
        v = dit(jnp.concatenate([x, x]), timestep=jnp.broadcast_to(t, (2 * len(x),)), motion=m, context=rows)
        u, v = jnp.split(v, 2)
        return u + s * (v - u)
    noise = lambda i: jax.random.normal(jax.random.fold_in(key, i), shape)
    return decode_clip(vae, diffusion.sample(f, diffusion.start_sampler(noise(jnp.int32(5000))), table, noise=noise).x)[0]
from PIL import Image
sheets = []
for scale, v in ((1.7, (0.6, 5, 12, 28, 55)), (2.0, (0.6, 4.5, 10, 24, 48))):
    val = np.asarray(v, np.float32)[levels - 1].ravel()
    lo = np.full_like(val, 0.6)
    clips = np.concatenate([np.asarray(draw(dit, vae, jnp.asarray(reps[i:i+20], jnp.float32), jnp.asarray(val[i:i+20]), jnp.asarray(lo[i:i+20]), jax.random.key(i), scale)) for i in (0, 20, 40)])
    got = read_clips(load_reader(), clips)["character"].reshape(games, 5)
    clips = clips.reshape(games, 5, *clips.shape[1:])
    print(scale, v, f"character {(got == truth).mean():.3f}", *describe(clips, true, levels), flush=True)
    sheets.append(np.concatenate([np.concatenate(list(clips[g, :, 8]), 1) for g in range(6)], 0))
    Image.fromarray(np.concatenate(sheets, 1)).save("RUN/cal3.png")
