"""pics.py BUNDLE GAMES STEPS OUT.png: first frames alone, drawn from predictions on true histories; read by the reader."""
import sys; sys.path.insert(0, "/work/main/scripts/toy"); sys.path.insert(0,"/work/train/code26")
import numpy as np, jax, jax.numpy as jnp
from PIL import Image
from sight import represent, with_shots
from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.game.player import Player
from animegamer_jax.models.latents import from_decoder
from animegamer_jax.models.vae import to_uint8
from animegamer_jax.toy.evaluation import WORLD
from animegamer_jax.toy.scoring.attributes import VALUES, labels
from animegamer_jax.toy.scoring.benchmark import toy_games
from animegamer_jax.toy.scoring.reader import load_reader, read_clips
keep_compiled_programs()
b, games, steps, out = Bundle.open(sys.argv[1]), int(sys.argv[2]), [int(x) for x in sys.argv[3].split(",")], sys.argv[4]
bench = WORLD.make_benchmark("test", num_games=games, num_turns=5, seed=1000)
shots = represent(b, bench, exchanged=False).shots
true = shots.reshape(-1, *shots.shape[2:])
player = Player.from_bundle(b, steps=1, history="predicted")
reps = []; lev = []
seeds = [g.seed for g in bench.games]
window = player.start(games)
for t in range(5):
    before = with_shots(window, shots, t)
    window, o = player.play_turn(before, [g.turns[t].instruction for g in bench.games], seeds=seeds, turn=t + 1)
    reps.append(o.representation.astype(np.float32))
pred = np.stack(reps, 1).reshape(true.shape)
print("rep mse", np.square(pred - true).mean(), "by turn", np.square(pred - true).reshape(games, 5, -1).mean((0, 2)).round(4))
dit, vae = b.load("dit"), b.load("vae"); c = dit.config
levels = np.array([[t.motion_level for t in g.turns] for g in bench.games]).ravel()
values = np.asarray(b.protocol.motion_values, np.float32)[levels - 1]

mean = jnp.asarray(b.load("encoder").unconditional(), jnp.float32)
@jax.jit
def draw(dit, vae, ctx, motion, key, table, s, w):
    shape = (len(ctx), 1, c.latent_height, c.latent_width, c.latent_channels)
    def f(x, t, g):
        del g
        t = jnp.broadcast_to(t, x.shape[:1])
        v = dit(x, timestep=t, motion=motion, context=ctx)
        u = jax.lax.cond(s != 1, lambda: dit(x, timestep=t, motion=motion, context=jnp.broadcast_to(mean, ctx.shape)), lambda: v)
        return v + jnp.where(t[0] >= w, s - 1, 0.0) * (v - u)
    noise = lambda i: jax.random.normal(jax.random.fold_in(key, i), shape)
    x = diffusion.sample(f, diffusion.start_sampler(noise(jnp.int32(5000))), table, noise=noise).x
    return to_uint8(vae.decode(from_decoder(x, vae.config)))
scenes = [[t.scene for t in g] for g in toy_games(bench)]
truth = {n: np.stack([labels(g, n) for g in scenes]) for n in VALUES}
reader = load_reader()
sheet = []
for what, ctx, n, s, w in (("pred", pred, 6, 2.5, 0.), ("true", true, 6, 2.5, 0.)):
    if 1:
        table = diffusion.make_sampler_table(diffusion.schedule_of(b.protocol), n)
        fr = np.concatenate([np.asarray(draw(dit, vae, jnp.asarray(ctx[i:i+50]), jnp.asarray(values[i:i+50]), jax.random.key(i), table, s, w)) for i in range(0, len(ctx), 50)])
        got = read_clips(reader, fr)
        row = []
        for name in ("character", "place", "time", "accessory", "variant", "side", "distance"):
            r = (got[name].reshape(games, 5) == truth[name]); ok = truth[name] >= 0
            d = WORLD.details(bench).get(name)
            if d is not None: ok = ok & (d.first >= 0) & (d.first < np.arange(5))
            row.append(f"{name} {r[ok].mean():.3f}")
        f0 = got["character"].reshape(games, 5)[:, 0] == truth["character"][:, 0]; row.append(f"first-turn character {f0.mean():.3f}")
        mot = np.array([[sc.motion for sc in g] for g in scenes]); r = got["character"].reshape(games, 5) == truth["character"]
        a = got["accessory"].reshape(games, 5) == truth["accessory"]; d = WORLD.details(bench)["accessory"]; ok = (truth["accessory"] >= 0) & (d.first >= 0) & (d.first < np.arange(5))
        print({m: (int((mot == m).sum()), round(float(r[mot == m].mean()), 2), round(float(a[(mot == m) & ok].mean()), 2)) for m in np.unique(mot)}, flush=True)
        print(what, n, s, w, "steps:", ", ".join(row), flush=True)
        sheet.append(fr[:40, 0].reshape(8, 5, *fr.shape[2:]))
rows = [np.concatenate([np.concatenate(list(s[g]), 1) for s in sheet], 0) for g in range(6)]
Image.fromarray(np.concatenate(rows, 0)).save(out)
