"""fit9.py: pictures only. fit7.py REPS ARGS...: as fit3.py; clips of 8 turns, SHARE of them of redrawn first frames (redrawn-SPLIT.npy of dumpshown.py)."""
import sys; import numpy as np, jax, jax.numpy as jnp, grain
from animegamer_jax.train.stages import adapt
from animegamer_jax.train.stages.decoder import ClipStage, drawn_loss
from animegamer_jax.data import samples, windows
from animegamer_jax.data.datasets import open_features
REPS = sys.argv[1]; CLIPS = int(__import__("os").environ.get("CLIPS", 8))
A = adapt.AdaptStage
from animegamer_jax import diffusion
from animegamer_jax.models.latents import from_decoder, sample, to_decoder
from animegamer_jax.train.stages.decoder import spread_timesteps
AUG = float(__import__("os").environ.get("AUG", 0.1))
def held_loss(dit, moments, key, vc, context, motion, shift):
    k1, k2, k3, k4, k5 = jax.random.split(key, 5)
    raw = sample(moments, key=k1)
    clean = to_decoder(raw, vc)
    t = spread_timesteps(k3, len(clean), shift=shift)
    y, _ = diffusion.add_noise(diffusion.Schedule(), clean, jax.random.normal(k2, clean.shape), t)
    z = raw[:, :1]
    z = z + AUG * jnp.std(z) * jax.random.uniform(k4, (len(z), 1, 1, 1, 1)) * jax.random.normal(k5, z.shape)
    def put(y, z): return to_decoder(from_decoder(y, vc).at[:, :1].set(z), vc)
    x = put(y, z)
    s, n = diffusion.levels_at(diffusion.Schedule(), t)
    v = dit(x, timestep=t.astype(jnp.float32), motion=motion, context=context)
    d = put(s * x - n * v.astype(jnp.float32), raw[:, :1])
    return jnp.mean(jnp.square((d - clean) / n), axis=(1, 2, 3, 4))
def read_samples(self, path, *, split):
    features = open_features(path); reps = np.load(f"{REPS}-{split}.npy"); drawn = np.load(f"redrawn-{split}.npy")
    turns = features.turns(split).remembering(1 << 29); latents = features.latents(split).remembering(3 << 30)
    assert len(turns) == len(reps)
    def read(n):
        r = turns[n]; m = n if n < len(drawn) else (n * 7 + 3) % len(drawn); c = turns[m]
        clip = (reps[m].astype(np.float32), np.asarray(c["image_features"], np.float32), drawn[m].astype(np.float32), samples.read_moments(latents, m, c), np.asarray(c["motion_value"], np.float32))
        return windows.AdaptSample((reps[n].astype(np.float32), *clip), samples.read_moments(latents, n, r), np.asarray(r["motion_value"], np.float32))
    return grain.MapDataset.range(len(turns)).map(read)
A.read_samples = read_samples
def spec(self):
    e = self.config.encoder
    image = jax.ShapeDtypeStruct((e.num_image_tokens, e.image_size), "float32")
    rep = jax.ShapeDtypeStruct((44, 256), "float32"); rest = windows.adapt_spec(self.config, self.protocol)[1:]
    return windows.AdaptSample((rep, rep, image, image, *rest), *rest)
A.sample_spec = spec
A.load = lambda self, bundle, *, mesh: ClipStage.load(self, bundle, mesh=mesh)
def loss(self, networks, batch, key):
    k1, k2, k3, k4 = jax.random.split(key, 4)
    enc, dit = networks["encoder"], networks["dit"]
    predicted, shot, features, redrawn, moments, value = batch.game
    empty = enc.unconditional().astype(jnp.float32)[None]
    dropped = jax.random.bernoulli(k1, self.recipe.context_dropout, predicted.shape[:1])
    ctx = jnp.where(dropped[:, None, None], empty, predicted)
    motion = self.motion(batch)
    pics = drawn_loss(dit, batch.moments[:, : dit.config.patch_frames], k2, vae_config=self.vae_config, context=ctx, motion=motion, draws=int(__import__('os').environ.get('PDRAWS', 2)), timestep_shift=self.timestep_shift).mean()
    return pics, {"pictures": pics}
A.loss = loss
A.evaluate = lambda self, networks, batch, key: adapt.ClipStage.evaluate.__wrapped__(self, networks, batch, key) if False else __import__("animegamer_jax.train.stages.base", fromlist=["Evaluation"]).Evaluation({}, {})
A.sample_flops = lambda self, networks: 1e9
from animegamer_jax import cli
sys.argv = ["animegamer", "train", "adapt", *sys.argv[2:]]
sys.exit(cli.main())
