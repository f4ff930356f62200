"""cal8.py BUNDLE OUT MODE STEPS:v1..v5 ...: as cal5.py; MODE project: the picture's latent is put into each step's denoised clip."""
import sys; sys.path.insert(0,"BRANCH/scripts/toy")
MODE = sys.argv.pop(3)
import jax, jax.numpy as jnp, numpy as np
from animegamer_jax import diffusion
from animegamer_jax.game import rollout
from animegamer_jax.models.latents import from_decoder, to_decoder
from animegamer_jax.toy.scoring import decoder_samples as ds
HELD = [None, None]
real = diffusion.sample
def sample(predict_v, state, table, *, noise, each=()):
    if HELD[0] is None: return real(predict_v, state, table, noise=noise, each=each)
    z, vc = HELD
    def step(state, xs):
        row, own = xs
        v = predict_v(state.x, row.timestep, row.guidance, *own).astype(jnp.float32)
        d = row.signal * state.x - row.noise_level * v
        if MODE != "plain":
            x0 = from_decoder(d, vc); x0 = x0.at[:, :1].set(z)
            if MODE == "shift":  # move the whole clip by the difference, fading over frames
                pass
            d = to_decoder(x0, vc)
        x = row.on_x * state.x + row.on_denoised * d + row.on_previous * state.denoised + row.on_noise * noise(row.step)
        return diffusion.SamplerState(x, d, state.bad_step, None), None
    return jax.lax.scan(step, state, (jax.tree.map(jnp.asarray, table), each))[0]
diffusion.sample = sample
PICS = []
@jax.jit
def _sample(networks, state, plain, parts, keys):
    dit, unconditional = networks.dit, networks.unconditional
    start, pk = rollout.start_picture(dit, keys)
    s = rollout.denoise_clip(dit, unconditional, state, start, plain, pk)
    state, frame, _ = rollout.see_picture(networks.vae, networks.shot, state, s.x)
    HELD[:] = from_decoder(s.x, networks.vae.config), networks.vae.config
    start = rollout.start_clip(dit, keys, rows=None)
    out = rollout.denoise_parts(dit, None, state, start, parts, keys)
    HELD[:] = None, None
    return rollout.decode_clip(networks.vae, out.x)[0], frame
def both(*a):
    clips, frame = _sample(*a); PICS.append(np.asarray(frame)[:, 0]); return clips
ds._sample = both
from steps import *
from PIL import Image
from animegamer_jax.toy.scoring.attributes import VALUES, labels
from animegamer_jax.toy.scoring.benchmark import toy_games
from animegamer_jax.toy.scoring.reader import load_reader, read_clips
keep_compiled_programs()
bundle = Bundle.open(sys.argv[1]); games, seed = 12, 1000
benchmark = WORLD.make_benchmark("test", num_games=games, num_turns=5, seed=seed)
size = FrameSize(*clip_size(bundle.config.dit, bundle.config.vae))
true = WORLD.true_clips(benchmark, size)
levels = np.array([[t.motion_level for t in g.turns] for g in benchmark.games])
reps = np.load("RUN/cal-reps.npy")[:games]
truth = np.stack([labels([t.scene for t in g], "character") for g in toy_games(benchmark)])
for n, a in enumerate(sys.argv[3:]):
    PICS.clear()
    st, v = a.split(":"); v = tuple(float(x) for x in v.split(","))
    clips = sample_shots(bundle, representations=reps, levels=levels, seeds=range(seed, seed+games), steps=int(st), motion_values=v, predicted=True)
    got = read_clips(load_reader(), clips.reshape(-1, *clips.shape[2:]))["character"].reshape(games, 5)
    pics = np.concatenate(PICS)[:60].reshape(games, 5, *PICS[0].shape[1:])
    still = read_clips(load_reader(), np.repeat(pics.reshape(-1, 1, *pics.shape[2:]), clips.shape[2], 1))["character"].reshape(games, 5)
    print(MODE, st, v, f"character {(got == truth).mean():.3f} pictures {(still == truth).mean():.3f}", *describe(clips, true, levels), flush=True)
    f = np.concatenate([pics[:6], clips[:6, :, 0], clips[:6, :, 8]], 1)
    Image.fromarray(np.concatenate([np.concatenate(list(f[g]), 1) for g in range(6)], 0)).save(f"{sys.argv[2]}-{n}.png")
