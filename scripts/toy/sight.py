"""Tests whether a model looks at its past shots, on held-out games of the toy world.

    python scripts/toy/sight.py MODEL [--games 100] [--turns 5]

Every turn is played three times: with the true first frames of the turns before as past shots, with
those of the same game with other details (*exchanged*), and with zeros in their place. A decoder
with a memory gets the first frames of the same shots as the language model. Instructions and states
are the same, so only the pictures tell the details apart. What the clips show is read by the
world's network. A detail that an earlier turn showed is *kept* if it is read as there. In the
exchange it *goes with the pictures* if it is read as the pictures show it, and *with the words* if
as in the game that the words are of. Without past shots a model can be right as often as *another
game's* details are the same. The table is Markdown.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int, UInt8
from run_script import run_script

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.configs import clip_size
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark
from animegamer_jax.evaluate.metrics.formulas import estimate
from animegamer_jax.evaluate.worlds import FrameSize
from animegamer_jax.game.pictures import encode_frame
from animegamer_jax.game.player import Player
from animegamer_jax.game.rollout import Window
from animegamer_jax.progress import show_progress
from animegamer_jax.toy.evaluation import WORLD, other_details
from animegamer_jax.toy.scoring.attributes import DETAILS, labels
from animegamer_jax.toy.scoring.benchmark import toy_games
from animegamer_jax.toy.scoring.classifier import load_classifier, read_clips
from animegamer_jax.toy.scoring.decoder_samples import true_representations

Shots = Float32[np.ndarray, "g t n r"]
Values = Mapping[str, Int[np.ndarray, "g t"]]


class Readings(NamedTuple):
    """What the clips of every turn show, by attribute, for each kind of past shots."""

    true: Values
    exchanged: Values
    absent: Values


class Past(NamedTuple):
    """What a model sees of all turns: shots, and first latents if its decoder has a memory."""

    shots: Shots
    first_latents: Float32[np.ndarray, "g t h w c"] | None

    def of(self, games: slice) -> "Past":
        """Returns those of some games."""
        first = self.first_latents
        return Past(self.shots[games], None if first is None else first[games])


class Shown(NamedTuple):
    """The past shots, and the values of the details in them."""

    past: Past
    values: Values


def represent(bundle: Bundle, benchmark: Benchmark, *, exchanged: bool) -> Shown:
    """Returns the shots of a benchmark's turns as its scenes or, exchanged, other details show."""
    games = toy_games(benchmark)
    dit, vae = bundle.config.first_dit, bundle.config.vae
    assert dit is not None
    assert vae is not None
    size = FrameSize(*clip_size(dit, vae))._replace(num_frames=1)
    draw = WORLD.other_views if exchanged else WORLD.true_clips
    frames = draw(benchmark, size)[:, :, 0]
    texts = [turn.motion_text for game in games for turn in game]
    flat = frames.reshape(-1, *frames.shape[2:])
    shots = true_representations(bundle, texts, flat)
    first = None
    if dit.first_shape:
        first = encode_frames(bundle, flat).reshape(*frames.shape[:2], *dit.first_shape)
    scenes = [[turn.scene for turn in game] for game in games]
    if exchanged:
        scenes = [[other_details(scene) for scene in game] for game in scenes]
    values = {name: np.stack([labels(game, name) for game in scenes]) for name in DETAILS}
    return Shown(Past(shots.reshape(*frames.shape[:2], *shots.shape[1:]), first), values)


def encode_frames(
    bundle: Bundle, frames: UInt8[np.ndarray, "n y x 3"]
) -> Float32[np.ndarray, "n h w c"]:
    """Returns the first latents of pictures, by the VAE."""
    vae = bundle.load("vae")
    return np.stack([np.asarray(encode_frame(vae, jnp.asarray(frame[None]))) for frame in frames])


def with_past(window: Window, past: Past, turn: int) -> Window:
    """Returns the window before turn `turn`, from 0, with these shots of the turns before."""

    def put(buffer: jax.Array, of_all_turns: np.ndarray) -> jax.Array:
        count = min(turn, buffer.shape[1])
        if not count:
            return buffer
        found = jnp.asarray(of_all_turns[:, turn - count : turn], buffer.dtype)
        return buffer.at[:, -count:].set(found)

    window = window._replace(representations=put(window.representations, past.shots))
    if past.first_latents is None:
        return window
    assert window.first_latents is not None
    return window._replace(first_latents=put(window.first_latents, past.first_latents))


def play(
    player: Player, benchmark: Benchmark, kinds: tuple[Past, Past, Past], *, batch_size: int
) -> Readings:
    """Plays all games with each kind of past shots, some side by side, and reads every clip."""
    classifier = load_classifier()
    games, turns = benchmark.games, benchmark.num_turns
    found = [
        {name: np.zeros((len(games), turns), int) for name in DETAILS} for _ in Readings._fields
    ]
    with show_progress() as progress:
        for start in range(0, len(games), batch_size):
            batch = slice(start, start + batch_size)
            played = games[batch]
            window, seeds = player.start(len(played)), [game.seed for game in played]
            for turn in range(turns):
                asked = [game.turns[turn].instruction for game in played]
                after = window
                for number, past in enumerate(kinds):
                    before = with_past(window, past.of(batch), turn)
                    result, output = player.play_turn(before, asked, seeds=seeds, turn=turn + 1)
                    after = after if number else result
                    for name, values in read_clips(classifier, output.frames).items():
                        if name in DETAILS:
                            found[number][name][batch, turn] = values
                window = after
                progress("turns", start * turns + (turn + 1) * len(played), len(games) * turns)
    return Readings(*found)


def lines(readings: Readings, benchmark: Benchmark, *, own: Values, other: Values) -> Iterator[str]:
    """Returns the table: a row per attribute, with intervals over games.

    Args:
        readings: What was read.
        benchmark: The games.
        own: The value of each detail in the game's scenes.
        other: The same where the details are exchanged.
    """
    truth = WORLD.details(benchmark)
    yield (
        "| detail | kept | without past shots | another game's | "
        "exchanged: with the pictures | with the words |"
    )
    yield "|---|---|---|---|---|---|"
    for name in DETAILS:
        again = (truth[name].first >= 0) & (truth[name].first < np.arange(benchmark.num_turns))
        cells = (
            _cell(readings.true[name] == own[name], again),
            _cell(readings.absent[name] == own[name], again),
            _cell(np.roll(own[name], 1, axis=0) == own[name], again),
            _cell(readings.exchanged[name] == other[name], again),
            _cell(readings.exchanged[name] == own[name], again),
        )
        yield f"| {name} | " + " | ".join(cells) + " |"


def _cell(right: np.ndarray, where: np.ndarray) -> str:
    found = estimate(right.astype(np.float32), where=where)
    return "none" if found is None else f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"


def main(
    model: str = "toy", /, *, games: int = 100, turns: int = 5, seed: int = 0, batch_size: int = 10
) -> None:
    """Print a table with a row per untold detail.

    Args:
        model: Model folder, or `toy` for the embedded model.
        games: Number of held-out games.
        turns: Number of turns of each game.
        seed: Number of the first game.
        batch_size: Number of games played side by side.
    """
    if games < 2 or turns < 2 or batch_size < 1:
        raise UserError("expected at least 2 games, 2 turns and batches of 1 game")
    bundle = Bundle.open(model)
    benchmark = WORLD.make_benchmark("test", num_games=games, num_turns=turns, seed=seed)
    own, other = (represent(bundle, benchmark, exchanged=kind) for kind in (False, True))
    player = Player.from_bundle(bundle)
    absent: Past = jax.tree.map(np.zeros_like, own.past)
    readings = play(player, benchmark, (own.past, other.past, absent), batch_size=batch_size)
    print("\n".join(lines(readings, benchmark, own=own.values, other=other.values)))


if __name__ == "__main__":
    keep_compiled_programs()
    run_script(main, name="sight.py")
