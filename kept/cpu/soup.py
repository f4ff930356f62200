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
VT = (0.6, 3, 8.5, 17, 32)
from flax import nnx
def make(dit, ctx, v, low, s, frames, steps=6):
    val = np.asarray(v, np.float32)[levels - 1].ravel(); lo = val if low is None else np.full_like(val, low)
    return np.concatenate([np.asarray(draw(dit, jnp.asarray(ctx[i:i+20], jnp.float32), jnp.asarray(val[i:i+20]), jnp.asarray(lo[i:i+20]), jax.random.key(i), s, frames, steps, s != 1)) for i in (0, 20, 40)])
def show(name, clips):
    got = read_clips(load_reader(), clips)
    row = " ".join(f"{n} {(got[n].reshape(games,5)==truth[n])[truth[n]>=0].mean():.2f}" for n in ("character","accessory","variant","side","distance"))
    d = list(describe(np.asarray(clips).reshape(games, 5, *clips.shape[1:]), true, levels)) if clips.shape[1] > 1 else []
    print(name, row, *d, flush=True)
for a in (1.0, 0.75, 0.5, 0.25):
    g, p = nnx.split(dits["pic"]); _, j = nnx.split(dits["joint"])
    dit = nnx.merge(g, jax.tree.map(lambda x, y: a * x + (1 - a) * y, p, j))
    x = make(dit, reps, VT, None, 2.5, 1); show(f"pic {a}", x); Image.fromarray(np.concatenate([np.concatenate(list(x[g*5:g*5+5,0]),1) for g in range(6)],0)).save(f"soup-pic-{a}.png")
    x = make(dit, treps, VT, None, 1, c.latent_frames); show(f"true {a}", x); f=x.reshape(games,5,*x.shape[1:])
    Image.fromarray(np.concatenate([np.concatenate([np.concatenate(list(f[g, :, j]), 1) for j in (0, 8)], 1) for g in range(6)], 0)).save(f"soup-true-{a}.png")
