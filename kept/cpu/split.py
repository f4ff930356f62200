import sys; sys.path.insert(0, "RUN/code20/scripts/toy")
import numpy as np, jax
from sight import represent, with_shots
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.game.player import Player
from animegamer_jax.toy.evaluation import WORLD
keep_compiled_programs()
games = 50
for path in sys.argv[1:]:
    b = Bundle.open(path)
    bench = WORLD.make_benchmark("test", num_games=games, num_turns=5, seed=1000)
    shots = represent(b, bench, exchanged=False).shots
    player = Player.from_bundle(b, steps=1, history="predicted")
    reps = []; seeds = [g.seed for g in bench.games]; window = player.start(games)
    for t in range(5):
        before = with_shots(window, shots, t)
        window, o = player.play_turn(before, [g.turns[t].instruction for g in bench.games], seeds=seeds, turn=t + 1)
        reps.append(o.representation.astype(np.float32))
    err = np.square(np.stack(reps, 1) - shots)[:, :, 8:].mean(-1).reshape(games, 5, 6, 6)
    d = WORLD.details(bench); k = {n: (d[n].first >= 0) & (d[n].first < np.arange(5)) for n in ("accessory", "variant", "side", "distance")}
    var = shots[:, :, 8:].reshape(-1, 36, 256).var(0).mean(-1).reshape(6, 6)
    allk = k["accessory"] & k["variant"] & k["side"]
    view = k["variant"] & k["side"] & ~k["accessory"]
    none = ~k["side"]
    print(path, "image variance", var.mean().round(4)); print((var).round(2))
    for n, m in (("all known", allk), ("accessory unknown", view), ("view unknown", none)):
        print(n, m.sum(), "unexplained", (err[m].mean() / var.mean()).round(3)); print((err[m].mean(0) / var).round(2))
