"""cal5.py BUNDLE STEPS:v1,..,v5 ...: motion and looks of clips with a picture first, from predictions on predicted histories."""
import sys; sys.path.insert(0,"BRANCH/scripts/toy")
import numpy as np
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
    st, v = a.split(":"); v = tuple(float(x) for x in v.split(","))
    clips = sample_shots(bundle, representations=reps, levels=levels, seeds=range(seed, seed+games), steps=int(st), motion_values=v, predicted=True)
    got = read_clips(load_reader(), clips.reshape(-1, *clips.shape[2:]))["character"].reshape(games, 5)
    print(st, v, f"character {(got == truth).mean():.3f}", *describe(clips, true, levels), flush=True)
    f = np.concatenate([clips[:6, :, 0], clips[:6, :, 8]], 1)
    Image.fromarray(np.concatenate([np.concatenate(list(f[g]), 1) for g in range(6)], 0)).save(f"{sys.argv[2]}-{n}.png")
