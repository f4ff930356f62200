"""two.py: clips of true representations, of predictions, and of representations of a first picture of predictions."""
import sys; sys.path.insert(0,"BRANCH/scripts/toy")
import numpy as np, jax, jax.numpy as jnp
from PIL import Image
from steps import *
from sight import represent
from animegamer_jax import diffusion
from animegamer_jax.models.encoder import encode_frames
from animegamer_jax.game.rollout import decode_clip
from animegamer_jax.toy.scoring.attributes import VALUES, labels
from animegamer_jax.toy.scoring.benchmark import toy_games
from animegamer_jax.toy.scoring.reader import load_reader, read_clips
from animegamer_jax.game.player import Player
keep_compiled_programs()
B = Bundle.open("w15/final"); games, seed = 12, 1000
benchmark = WORLD.make_benchmark("test", num_games=games, num_turns=5, seed=seed)
size = FrameSize(*clip_size(B.config.dit, B.config.vae))
true = WORLD.true_clips(benchmark, size)
levels = np.array([[t.motion_level for t in g.turns] for g in benchmark.games])
reps = np.load("RUN/cal-reps.npy")[:games].reshape(60, 44, 256)
treps = represent(B, benchmark, exchanged=False).shots.reshape(60, 44, 256)
scenes=[[t.scene for t in g] for g in toy_games(benchmark)]
truth = {n: np.stack([labels(g, n) for g in scenes]) for n in VALUES}
vae = B.load("vae"); c = B.config.dit
shot = Player.from_bundle(B, steps=1, history="shown").networks.shot
empty = B.load("encoder").unconditional().astype(jnp.float32)
dits = {n: Bundle.open(p).load("dit") for n, p in (("pic", "w15/adaptp/model"), ("clip", "w15/adapt/model"), ("joint", "kept/decoder/model"))}
import functools
@functools.partial(jax.jit, static_argnames=("frames","steps","guided"))
def draw(dit, ctx, motion, low, key, s, frames, steps, guided=True):
    table = diffusion.make_sampler_table(diffusion.schedule_of(B.protocol), steps)
    shape = (len(ctx), frames, c.latent_height, c.latent_width, c.latent_channels)
    rows = jnp.concatenate([jnp.broadcast_to(empty, ctx.shape), ctx]); m = jnp.concatenate([low, motion])
    def f(x, t, g):
        if not guided: return dit(x, timestep=jnp.broadcast_to(t, (len(x),)), motion=motion, context=ctx)
        v = dit(jnp.concatenate([x, x]), timestep=jnp.broadcast_to(t, (2 * len(x),)), motion=m, context=rows)
        u, v = jnp.split(v, 2)
        return u + s * (v - u)
    noise = lambda i: jax.random.normal(jax.random.fold_in(key, i), shape)
    return decode_clip(vae, diffusion.sample(f, diffusion.start_sampler(noise(jnp.int32(5000))), table, noise=noise).x)[0]
def make(dit, ctx, v, low, s, frames, steps=6):
    val = np.asarray(v, np.float32)[levels - 1].ravel(); lo = val if low is None else np.full_like(val, low)
    return np.concatenate([np.asarray(draw(dit, jnp.asarray(ctx[i:i+20], jnp.float32), jnp.asarray(val[i:i+20]), jnp.asarray(lo[i:i+20]), jax.random.key(i), s, frames, steps, s != 1)) for i in (0, 20, 40)])
def show(name, clips):
    got = read_clips(load_reader(), clips)
    row = " ".join(f"{n} {(got[n].reshape(games,5)==truth[n])[truth[n]>=0].mean():.2f}" for n in ("character","accessory","variant","side","distance"))
    d = list(describe(np.asarray(clips).reshape(games, 5, *clips.shape[1:]), true, levels)) if clips.shape[1] > 1 else []
    print(name, row, *d, flush=True)
V0 = (0.6, 6, 14, 30, 55); VT = (0.6, 3, 8.5, 17, 32)
sheets = []
def run(name, *a, **k):
    x = make(*a, **k); show(name, x)
    f = x.reshape(games, 5, *x.shape[1:])
    n = x.shape[1]
    sheets.append(np.concatenate([np.concatenate([np.concatenate(list(f[g, :, j]), 1) for j in ((0, 8, 15) if n > 1 else (0,0,0))], 1) for g in range(4)], 0)); Image.fromarray(sheets[-1]).save(f"two-{name}.png")
    return x
tv = true.reshape(60, *true.shape[2:])
show("truth", tv)
pics = run("pic2.5", dits["pic"], reps, VT, None, 2.5, 1)
image = np.concatenate([np.asarray(encode_frames(shot, jnp.asarray(pics[i:i+20, 0]))) for i in (0, 20, 40)])
two = reps.copy(); two[:, -image.shape[1]:] = image
np.save("two-reps.npy", two)
print("rep mse to truth: pred", np.square(reps - treps).mean(), "two", np.square(two - treps).mean())
run("true-joint-1", dits["joint"], treps, VT, None, 1, true.shape[2] // 4 if False else c.latent_frames)
run("two-joint-1", dits["joint"], two, VT, None, 1, c.latent_frames)
run("true-clip-1.5", dits["clip"], treps, VT, None, 1.5, c.latent_frames)
run("two-clip-1.5", dits["clip"], two, VT, None, 1.5, c.latent_frames)
run("two-clip-1.5m", dits["clip"], two, (0.6, 4, 8.5, 20, 42), 0.6, 1.5, c.latent_frames)
run("pred-clip-1.5m", dits["clip"], reps, (0.6, 4, 8.5, 20, 42), 0.6, 1.5, c.latent_frames)
run("pred-clip-2", dits["clip"], reps, V0, None, 2.0, c.latent_frames)
