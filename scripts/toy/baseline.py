"""Plays the text-only baseline on held-out games of the toy world.

    animegamer train foundations --part dit --data out/toy/features --model out/toy/vae/model \
        --out out/toy/text-to-video --batch-size 16 --steps 14000
    python scripts/toy/baseline.py out/toy/text-to-video --out out/toy/baseline
    animegamer evaluate --model out/toy/picture/model --played baseline=out/toy/baseline \
        --out out/evaluation

The paper's strongest baseline (GC) writes a caption of each turn with a language model and gives it
to a fine-tuned text-to-video CogVideoX. Here the captions and states are the toy world's own, so
they are right in all that words can say: character, motion, level, place and time. The transformer
is the one of the foundations. It sees T5's features of the caption, and no picture. Its 14,000
steps of 16 clips are as much computation as the model's transformer has in all stages: 224,000
clips, where the model's are 12,000 with captions, 3,200 in the warm-up, pictures that cost as much
as 47,000, 128,000 in the joint stage, and in the adaptation 19,000 and pictures that cost as much
as 22,000. ACC-S and ACC-L are 1 by construction, since the captions' states are given.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jaxtyping import Float32
from run_script import run_script

from animegamer_jax.bundle.arrays import load_arrays, open_folder
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.configs import NetworkConfig
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark, BenchmarkGame, read_benchmark
from animegamer_jax.evaluate.metrics.clip_embedder import in_batches
from animegamer_jax.game.saved.turns import NewTurn
from animegamer_jax.game.saved_game import Game
from animegamer_jax.models.linear import Linear
from animegamer_jax.models.t5 import T5Encoder
from animegamer_jax.progress import print_status, show_progress
from animegamer_jax.storage.paths import refuse_existing
from animegamer_jax.tokenizer import Tokenizer
from animegamer_jax.toy.scoring.decoder_samples import sample_shots

_BATCH = 20  # games, and turns that are computed side by side


def load_context(run: Path, *, t5_size: int, hidden_size: int) -> Linear:
    """Loads the layer that maps T5's features to the transformer's context.

    It is in the run's checkpoints only, since no other stage needs it.

    Raises:
        UserError: The run has no checkpoint.
    """
    steps = [int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdigit()]
    if not steps:
        raise UserError(f"{run}: expected checkpoints of foundations --part dit, found none")
    names, config = ("features", "embed"), NetworkConfig()
    layer = Linear(t5_size, hidden_size, names=names, config=config, rngs=nnx.Rngs(0))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = {"kernel": layer.kernel, "bias": layer.bias}
    wanted = {
        f"ema.context.{name}": jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=here)
        for name, param in params.items()
        if param is not None
    }
    with open_folder(epath.Path(run / "checkpoints" / str(max(steps)) / "state")) as saved:
        found = load_arrays(saved, wanted)
    for name, array in found.items():
        params[name.rpartition(".")[2]].set_value(array)
    return layer


class CaptionReader:
    """Turns captions into the transformer's context.

    Raises:
        UserError: The run has no checkpoint.
    """

    def __init__(self, run: Path, bundle: Bundle):
        dit = bundle.config.dit
        assert dit is not None
        self._t5, self._length = bundle.load("t5"), dit.num_context_tokens
        size = self._t5.config.d_model
        self._layer = load_context(run, t5_size=size, hidden_size=dit.hidden_size)
        self._tokenizer = Tokenizer.load(bundle.tokenizer_dir, num_queries=self._length)

    def __call__(self, captions: Sequence[str]) -> Float32[np.ndarray, "n k d"]:
        """Returns the context of each caption."""
        tokens = np.stack([self._tokenizer.padded(text, self._length) for text in captions])
        return in_batches(
            lambda rows: _encode(self._t5, self._layer, jnp.asarray(tokens[rows])),
            np.arange(len(tokens)),
            _BATCH,
        )


@jax.jit
def _encode(t5: T5Encoder, layer: Linear, tokens: jax.Array) -> jax.Array:
    return layer(t5(tokens)).astype(jnp.float32)


def main(
    run: Path, /, *, out: Path, benchmark: str = "toy", steps: int | None = None, games: int = 100
) -> None:
    """Play the baseline and save its games as `animegamer play` does.

    Args:
        run: Folder of the run of `animegamer train foundations --part dit`.
        out: Folder for the games.
        benchmark: Benchmark to play, as for `animegamer evaluate`.
        steps: Number of denoising steps. Default: the protocol's.
        games: Number of games, the benchmark's first.
    """
    if steps is not None and steps < 1:
        raise UserError(f"--steps: expected 1 or more, found {steps}")
    refuse_existing(epath.Path(out), overwrite=False)
    bundle, asked = Bundle.open(run / "model"), read_benchmark(benchmark)
    if asked.world != "toy" or not 0 < games <= len(asked.games):
        raise UserError(
            f"--benchmark {benchmark}, --games {games}: expected a benchmark of the toy world, "
            f"and 1 to {len(asked.games)} of its games"
        )
    steps = steps or bundle.protocol.denoising_steps
    _play(run, bundle, asked, out=out, steps=steps, games=games)


def _play(
    run: Path, bundle: Bundle, asked: Benchmark, *, out: Path, steps: int, games: int
) -> None:
    read = CaptionReader(run, bundle)

    def make(batch: Sequence[BenchmarkGame]) -> tuple[np.ndarray, np.ndarray]:
        contexts = read([str(turn.caption) for game in batch for turn in game.turns])
        contexts = contexts.reshape(len(batch), asked.num_turns, *contexts.shape[1:])
        clips = sample_shots(
            bundle,
            representations=contexts,
            levels=np.array([[turn.motion_level for turn in game.turns] for game in batch]),
            seeds=[game.seed for game in batch],
            steps=steps,
            motion_values=(0.0,) * 5,  # the motion layer was not trained
            unconditional=np.zeros_like(contexts[0, 0]),  # as captions were dropped
            batch_size=_BATCH,
        )
        return contexts, clips

    make(asked.games[:1])  # compiles, which is not timed
    with show_progress() as progress:
        for start in range(0, games, _BATCH):
            batch = asked.games[start : min(start + _BATCH, games)]
            began = time.perf_counter()
            contexts, clips = make(batch)
            seconds = (time.perf_counter() - began) / (len(batch) * asked.num_turns)
            for game, shots, shown in zip(batch, contexts, clips, strict=True):
                saved = Game.create(
                    out / game.id,
                    model="text-only baseline",
                    seed=game.seed,
                    window=1,
                    steps=steps,
                    protocol=bundle.protocol.name,
                    history_kind="predicted",
                )
                for turn, shot, clip in zip(game.turns, shots, shown, strict=True):
                    states = turn.motion_level, turn.social, turn.entertainment, turn.stamina
                    saved.add(
                        NewTurn(
                            states=np.array(states, np.int32),
                            motion_value=0.0,
                            representation=shot,
                            frames=clip,
                            seconds={"total": seconds},
                        ),
                        turn.instruction,
                    )
            progress("games", start + len(batch), games)
    print_status(f"{out}: {games} games of {asked.num_turns} turns")


if __name__ == "__main__":
    keep_compiled_programs()
    run_script(main, name="baseline.py")
