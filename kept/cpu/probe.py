"""probe.py GAMES BUNDLE...: linear probes of predicted representations (true histories), and of true ones."""
import sys; sys.path.insert(0, "RUN/code20/scripts/toy")
import numpy as np, jax
from sight import represent, with_shots
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.game.player import Player
from animegamer_jax.toy.evaluation import WORLD
from animegamer_jax.toy.scoring.attributes import VALUES, labels
from animegamer_jax.toy.scoring.benchmark import toy_games
keep_compiled_programs()
games = int(sys.argv[1])
bench = WORLD.make_benchmark("test", num_games=games, num_turns=5, seed=1000)
scenes = [[t.scene for t in g] for g in toy_games(bench)]
truth = {n: np.stack([labels(g, n) for g in scenes]) for n in VALUES}
det = WORLD.details(bench)
shots = None
LINEAR = True
def probe(what, reps):
    half = games * 3 // 4
    x = reps.reshape(games * 5, -1); x = x - x[: half * 5].mean(0)
    kk = x @ x.T; sq = np.diag(kk); dist = sq[:, None] + sq[None] - 2 * kk
    full = kk if LINEAR else np.exp(-dist / np.median(dist) * 2)
    k = full[: half * 5, : half * 5]
    out = []
    for name in ("character", "place", "time", "accessory", "variant", "side", "distance"):
        y = truth[name]; ok = y >= 0
        d = det.get(name)
        known = ok.copy()
        if d is not None: known &= (d.first >= 0) & (d.first < np.arange(5))
        if name == "character": talk = np.array([[s.partner is not None for s in g] for g in scenes])
        tr = ok[:half].ravel(); yy = y[:half].ravel()[tr]
        classes = np.unique(yy); onehot = (yy[:, None] == classes).astype(np.float32) - 1 / len(classes)
        best = 0
        for lam in ((0.3, 3, 30, 300) if LINEAR else (0.001, 0.01, 0.1)):
            w = np.linalg.solve(k[tr][:, tr] + lam * np.eye(tr.sum()), onehot)
            s = full[half * 5 :, : half * 5][:, tr] @ w
            r = (classes[s.argmax(1)].reshape(-1, 5) == y[half:])
            best = max(best, r[known[half:]].mean())
        out.append(f"{name} {best:.3f}")
    print(what, ", ".join(out), flush=True)
for path in sys.argv[2:]:
    b = Bundle.open(path)
    if shots is None:
        shots = represent(b, bench, exchanged=False).shots
    player = Player.from_bundle(b, steps=1, history="predicted")
    reps = []; seeds = [g.seed for g in bench.games]; window = player.start(games)
    for t in range(5):
        before = with_shots(window, shots, t)
        window, o = player.play_turn(before, [g.turns[t].instruction for g in bench.games], seeds=seeds, turn=t + 1)
        reps.append(o.representation.astype(np.float32))
    reps = np.stack(reps, 1)
    e = np.square(reps - shots)
    print(path, "mse", e.mean(), "image", e[:, :, 8:].mean(), "text", e[:, :, :8].mean())
    np.savez("RUN/probe_%s.npz" % path.replace("/", "_"), reps=reps, shots=shots)
    for LINEAR in (True, False): probe("  true", shots); probe("  pred", reps)
