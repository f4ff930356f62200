import sys; sys.path.insert(0, "RUN/code20")
import numpy as np
from animegamer_jax.toy.evaluation import WORLD
from animegamer_jax.toy.scoring.attributes import VALUES, labels
from animegamer_jax.toy.scoring.benchmark import toy_games
games=120
bench = WORLD.make_benchmark("test", num_games=games, num_turns=5, seed=1000)
scenes = [[t.scene for t in g] for g in toy_games(bench)]
truth = {n: np.stack([labels(g, n) for g in scenes]) for n in VALUES}
det = WORLD.details(bench)
known = (det["side"].first >= 0) & (det["side"].first < np.arange(5))
view = (truth["side"] * 2 + truth["distance"]).ravel()
y = truth["character"].ravel(); g = np.repeat(np.arange(games), 5)
for path in sys.argv[1:]:
    z = np.load(path)
    for what in ("shots", "reps"):
        x = z[what][:, :, 8:].reshape(games * 5, -1); x = x - x.mean(0)
        kk = x @ x.T
        for nm, k in (("linear", kk), ("by view", kk * (1.0 * (view[:, None] == view[None]) + 0.2))):
            res = {}
            for lam in (1, 10, 100):
                hit = np.zeros(games * 5, bool)
                for fold in range(6):
                    te = (g % 6 == fold); tr = ~te & (y >= 0)
                    cl = np.unique(y[tr]); oh = (y[tr][:, None] == cl) - 1 / len(cl)
                    w = np.linalg.solve(k[tr][:, tr] + lam * np.eye(tr.sum()), oh)
                    hit[te] = cl[(k[te][:, tr] @ w).argmax(1)] == y[te]
                ok = y >= 0; kn = known.ravel()
                res[lam] = (hit[ok & kn].mean().round(3), hit[ok & ~kn].mean().round(3))
            print(path[-25:], what, nm, "(view known, unknown):", res)
