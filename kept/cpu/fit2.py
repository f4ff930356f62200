"""fit.py REPS ARGS...: `animegamer train adapt` on stored predictions (REPS-train.npy, REPS-test.npy)."""
import sys; import numpy as np, jax, jax.numpy as jnp, grain
from animegamer_jax.train.stages import adapt
from animegamer_jax.train.stages.decoder import ClipStage
from animegamer_jax.data import samples
from animegamer_jax.data.datasets import open_features
REPS = sys.argv[1]
A = adapt.AdaptStage
def read_samples(self, path, *, split):
    features = open_features(path); reps = np.load(f"{REPS}-{split}.npy")
    turns = features.turns(split).remembering(1 << 29); latents = features.latents(split).remembering(3 << 30)
    assert len(turns) == len(reps)
    def read(n):
        r = turns[n]
        return samples.AdaptSample(reps[n].astype(np.float32), samples._moments(latents, n, r), np.asarray(r["motion_value"], np.float32))
    return grain.MapDataset.range(len(turns)).map(read)
A.read_samples = read_samples
A.sample_spec = lambda self: samples.AdaptSample(jax.ShapeDtypeStruct((44, 256), "float32"), *samples.adapt_spec(self.config, self.protocol)[1:])
A.represent = lambda self, networks, batch, key=None: jnp.asarray(batch.game)
A.load = lambda self, bundle, *, mesh: ClipStage.load(self, bundle, mesh=mesh)
def context(self, networks, batch, key):
    empty = networks["encoder"].unconditional().astype(jnp.float32)[None]
    predicted = jnp.asarray(batch.game)
    dropped = jax.random.bernoulli(key, self.recipe.context_dropout, predicted.shape[:1])
    return jax.lax.stop_gradient(jnp.where(dropped[:, None, None], empty, predicted))
A.context = context
A.sample_flops = lambda self, networks: 1e9
from animegamer_jax import cli
sys.argv = ["animegamer", "train", "adapt", *sys.argv[2:]]
sys.exit(cli.main())
