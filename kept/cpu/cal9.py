"""cal9.py BUNDLE OUT STEPS:v1..v5 ...: clips of true first frames and true representations: is motion right where all is known?"""
import sys; sys.path.insert(0,"BRANCH/scripts/toy")
import jax, jax.numpy as jnp, numpy as np
from animegamer_jax import diffusion
from animegamer_jax.game import rollout
from animegamer_jax.models.latents import know_first, mode
from animegamer_jax.toy.scoring import decoder_samples as ds
from animegamer_jax.toy.scoring.decoder_samples import true_representations
from steps import *
from PIL import Image
from animegamer_jax.toy.scoring.attributes import labels
from animegamer_jax.toy.scoring.benchmark import toy_games
from animegamer_jax.toy.scoring.reader import load_reader, read_clips
keep_compiled_programs()
bundle = Bundle.open(sys.argv[1]); games, seed = 12, 1000
benchmark = WORLD.make_benchmark("test", num_games=games, num_turns=5, seed=seed)
size = FrameSize(*clip_size(bundle.config.dit, bundle.config.vae))
true = WORLD.true_clips(benchmark, size)
levels = np.array([[t.motion_level for t in g.turns] for g in benchmark.games])
tg = toy_games(benchmark)
truth = np.stack([labels([t.scene for t in g], "character") for g in tg])
flat = true.reshape(-1, *true.shape[2:])
reps = true_representations(bundle, [t.motion_text for g in tg for t in g], flat[:, 0])
vae, dit = bundle.load("vae"), bundle.load("dit")
enc = jax.jit(lambda vae, f: vae.encode(f.astype(jnp.float32) / 127.5 - 1))
first = np.concatenate([np.asarray(mode(enc(vae, flat[i:i+20, :1]))) for i in range(0, 60, 20)])
def _sample(networks, state, plain, parts, keys):
    raise SystemExit
@jax.jit
def run(dit, vae, state, parts, keys, first):
    known = know_first(first, vae.config, num_frames=dit.config.latent_frames)
    start = rollout.start_clip(dit, keys, rows=0, known=known)
    return rollout.decode_clip(vae, rollout.denoise_parts(dit, None, state, start, parts, keys).x)[0]
for n, a in enumerate(sys.argv[3:]):
    st, v = a.split(":"); v = np.asarray([float(x) for x in v.split(",")], np.float32)
    table = diffusion.make_sampler_table(diffusion.schedule_of(bundle.protocol), int(st))
    keys = jax.vmap(rollout.turn_keys, (None, 0), 1)(rollout.game_keys(list(range(seed, seed+games))), jnp.arange(1, 6)).reshape(-1)
    values = v[levels - 1].ravel(); clips = []
    for i in range(0, 60, 20):
        state = rollout.GameState(jnp.asarray(reps[i:i+20]), jnp.zeros((20, 4), jnp.int32), jnp.asarray(values[i:i+20]))
        clips.append(np.asarray(run(dit, vae, state, table.parts(), keys[i:i+20], first[i:i+20])))
    clips = np.concatenate(clips).reshape(games, 5, *true.shape[2:])
    got = read_clips(load_reader(), clips.reshape(-1, *clips.shape[2:]))["character"].reshape(games, 5)
    print(st, v, f"character {(got == truth).mean():.3f}", *describe(clips, true, levels), flush=True)
    f = np.concatenate([clips[:6, :, 0], clips[:6, :, 8]], 1)
    Image.fromarray(np.concatenate([np.concatenate(list(f[g]), 1) for g in range(6)], 0)).save(f"{sys.argv[2]}-{n}.png")
