"""Playing held-out games of the toy world, and what the clips and states are worth.

Scores are the paper's (section 4.2) and, because the toy world's truth is known, more: character,
place and time as read off the clips. On open turns, whose instruction leaves things out, these
are context accuracy: only a model that sees its history can be right. Beside every score stand
the ceilings (true clips judged the same way) and the base rates (answers without looking).
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics import formulas
from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder, in_batches
from animegamer_jax.evaluate.metrics.formulas import (
    STATE_SLOTS,
    Estimate,
    estimate,
)
from animegamer_jax.evaluate.metrics.registry import CONTEXT
from animegamer_jax.game.player import Player
from animegamer_jax.media.motion import (
    FLICKER,
    NOISE,
    measure_levels,
)
from animegamer_jax.models.clip import CLIP
from animegamer_jax.models.encoder import ShotEncoder
from animegamer_jax.models.t5 import T5Encoder
from animegamer_jax.models.vae import VAE
from animegamer_jax.tokenizer import Tokenizer
from animegamer_jax.toy.scoring.classifiers import (
    Attribute,
    ChosenReaders,
    Reader,
    ReaderCheck,
    Readings,
)
from animegamer_jax.toy.scoring.truth import (
    GameClips,
    Games,
    Truth,
    other_take,
    reconstruct,
)

Values = dict[str, Float32[np.ndarray, "g t"]]
Table = dict[str, Estimate]

ALL_THREE = CONTEXT


# Playing


class PlayedGames(NamedTuple):
    """Games as a model played them from their instructions.

    `states` are motion level, social, entertainment and stamina; `seconds` those of a batch's
    turn, shared among its games.
    """

    frames: GameClips
    states: Int[np.ndarray, "g t 4"]
    representations: Float32[np.ndarray, "g t n r"]
    seconds: Float[np.ndarray, "g t"]


def play_games(
    player: Player,
    games: Games,
    *,
    seeds: Sequence[int],
    batch_size: int = 10,
    on_turn: Callable[[int, int], None] | None = None,
) -> PlayedGames:
    """Plays games of equal length side by side, from their instructions only.

    Args:
        player: with its window and steps.
        games: the instructions of each, and truth that is not looked at.
        seeds: one a game.
        batch_size: games that are played together. The last batch is filled up with games that
            are there already, so that nothing is compiled twice.
        on_turn: called with the turns played and their number.

    Raises:
        UserError: no games, games of unequal length, another number of seeds, or an instruction
            that the model cannot read.
        NonFiniteError: a network's answer is not finite.
    """
    num_turns = {len(game) for game in games}
    if len(num_turns) != 1 or len(seeds) != len(games):
        raise UserError(
            f"games to score: expected one or more of one length, and a seed each, found "
            f"{len(games)} games of {sorted(num_turns)} turns and {len(seeds)} seeds"
        )
    total = len(games) * num_turns.pop()
    batch_size = min(batch_size, len(games))
    played = []
    for start in range(0, len(games), batch_size):
        here = np.arange(start, min(start + batch_size, len(games)))
        chosen = np.resize(here, batch_size).tolist()
        done = start * (total // len(games))
        turns = []
        for turn in _play_batch(player, [games[i] for i in chosen], [seeds[i] for i in chosen]):
            turns.append(turn)
            done += len(here)
            if on_turn:
                on_turn(done, total)
        columns = (np.stack(column, axis=1) for column in zip(*turns, strict=True))
        played.append([column[: len(here)] for column in columns])
    return PlayedGames(*(np.concatenate(parts) for parts in zip(*played, strict=True)))


def _play_batch(player: Player, games: Games, seeds: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """The fields of `PlayedGames` of one turn after the other."""
    window = player.start(len(games))
    for number, turns in enumerate(zip(*games, strict=True), start=1):
        began = time.perf_counter()
        instructions = [turn.instruction for turn in turns]
        window, output = player.play_turn(window, instructions, seeds=seeds, turn=number)
        seconds = np.full(len(games), (time.perf_counter() - began) / len(games))
        representation = output.representation.astype(np.float32)
        yield output.frames, output.states.astype(np.int32), representation, seconds


# Judging


class Judge:
    """Reads and measures clips.

    Args:
        reader: of character, place and time.
        embedder: for CLIP-I and CLIP-T; None leaves them out.
    """

    def __init__(self, reader: Reader, embedder: ClipEmbedder | None):
        self.reader, self.embedder = reader, embedder

    def values(self, clips: GameClips, truth: Truth) -> Values:
        """Every score of the clips that does not depend on states, one value a game and turn.

        PSNR is against the true clip; ACC-F and MAE-F against the level that the game's turn has,
        once more with what the training's data take for noise.
        """
        shape = clips.shape[:2]
        flat = clips.reshape(-1, *clips.shape[2:])
        values: Values = {}
        for name, noise in (("", FLICKER), (DATA_NOISE, NOISE)):
            levels = measure_levels(flat, noise=noise).reshape(shape)
            values[f"ACC-F{name}"] = formulas.motion_accuracy(levels, truth.levels)
            values[f"MAE-F{name}"] = formulas.motion_error(levels, truth.levels)
        values |= attribute_values(self.reader(flat), truth)
        return values | self.similarities(clips, truth)

    def similarities(self, clips: GameClips, truth: Truth) -> Values:
        """CLIP-I and CLIP-T where there is a CLIP, and PSNR, against the truth of each turn."""
        shape, flat = clips.shape[:2], clips.reshape(-1, *clips.shape[2:])
        values: Values = {}
        if self.embedder is not None:
            captions = [turn.caption for game in truth.games for turn in game]
            frames = self.embedder.frames(flat)
            true_frames = self.embedder.frames(truth.clips.reshape(flat.shape))
            texts = self.embedder.texts(captions)
            for name, found in (
                ("CLIP-I", formulas.clip_image_similarity(frames, true_frames)),
                ("CLIP-T", formulas.clip_text_similarity(frames, texts)),
            ):
                values[name] = np.asarray(found).reshape(shape)
        values["PSNR"] = psnr_by_game(clips, truth.clips)
        return values


def psnr_by_game(clips: GameClips, truth: GameClips) -> Float32[np.ndarray, "g t"]:
    """PSNR of every turn's clip, a game at a time: float32 takes its room."""
    pairs = zip(clips, truth, strict=True)
    return np.stack([np.asarray(formulas.psnr(found, true)) for found, true in pairs])


DATA_NOISE = " as in data"
"""Names the scores of motion above `NOISE`, as the training's clips were measured."""


def attribute_values(readings: Readings, truth: Truth) -> Values:
    """1 where the attribute read is the true one, for each and for all three together."""
    values = {}
    for name, right in truth.labels.items():
        values[name] = (readings[name].reshape(right.shape) == right).astype(np.float32)
    return values | {ALL_THREE: np.prod(list(values.values()), axis=0)}


def state_values(
    states: Int[np.ndarray, "g t 3"], levels: Int[np.ndarray, "g t"], truth: Truth
) -> Values:
    """ACC-S and MAE-S over all slots and of each, and the same of the level that was told."""
    right = formulas.state_accuracy(states, truth.states)
    error = formulas.state_error(states, truth.states)
    values = {"ACC-S": right.mean(-1), "MAE-S": error.mean(-1)}
    for index, slot in enumerate(STATE_SLOTS):
        values |= {f"ACC-S {slot}": right[..., index], f"MAE-S {slot}": error[..., index]}
    return values | {
        "ACC-L": formulas.motion_accuracy(levels, truth.levels),
        "MAE-L": formulas.motion_error(levels, truth.levels),
    }


def summarise(values: Values, where: Bool[np.ndarray, "g t"] | None = None) -> Table:
    """Means and intervals of all values, or of those chosen."""
    found = {name: estimate(value, where=where) for name, value in values.items()}
    return {name: score for name, score in found.items() if score is not None}


def summarise_open(values: Values, truth: Truth) -> Table:
    """Context accuracy: open turns only; `carried` counts what the instruction does not say."""
    table = summarise(values, truth.is_open)
    for name, named in truth.named.items():
        if found := estimate(values[name], where=truth.is_open & ~named):
            table[f"carried {name}"] = found
    return table


# Answers without looking


def constant_values(truth: Truth) -> Values:
    """What always answering the most frequent value of these games would score."""

    def most_frequent(x: np.ndarray) -> np.ndarray:
        kinds, counts = np.unique(x, return_counts=True)
        return np.full(x.shape, kinds[counts.argmax()])

    columns = np.moveaxis(truth.states, -1, 0)
    states = np.stack([most_frequent(column) for column in columns], -1)
    levels = most_frequent(truth.levels)
    readings: Readings = {
        name: most_frequent(label).ravel() for name, label in truth.labels.items()
    }
    return state_values(states, levels, truth) | attribute_values(readings, truth)


def other_game_values(truth: Truth, *, hear: bool) -> Values:
    """What the values of another game at the same turn would score, the mean over all others.

    With `hear`, attributes that the instruction says are right and only the rest is another
    game's: no model without memory that hears perfectly knows more than how often values occur.

    Raises:
        ValueError: there is one game only.
    """
    num_games = len(truth.games)
    if num_games < 2:
        raise ValueError("the values of another game need two games")
    sums: dict[str, Any] = {}
    for shift in range(1, num_games):
        readings: Readings = {
            name: np.where(truth.named[name] & hear, label, np.roll(label, shift, axis=0)).ravel()
            for name, label in truth.labels.items()
        }
        states = np.roll(truth.states, shift, axis=0)
        levels = np.roll(truth.levels, shift, axis=0)
        values = state_values(states, levels, truth) | attribute_values(readings, truth)
        for name, value in values.items():
            sums[name] = sums.get(name, 0) + value
    return {name: value / (num_games - 1) for name, value in sums.items()}


# Shot representations


def true_representations(
    truth: Truth,
    *,
    encoder: ShotEncoder,
    t5: T5Encoder,
    clip: CLIP,
    tokenizer: Tokenizer,
    shown: Int[np.ndarray, "g t"] | None = None,
) -> Float32[np.ndarray, "g t n r"]:
    """E_a of every turn: T5 features of its motion text, CLIP features of its first frame.

    With `shown`, of that frame instead.
    """
    length = encoder.config.num_text_tokens
    turns = [turn for game in truth.games for turn in game]
    tokens = np.stack([tokenizer.padded(turn.motion_text, length) for turn in turns])
    shown = np.zeros(truth.levels.shape, int) if shown is None else shown
    first = np.take_along_axis(truth.clips, shown[:, :, None, None, None, None], axis=2)
    first = first.reshape(len(turns), *truth.clips.shape[3:])

    networks = encoder, t5, clip
    found = in_batches(
        lambda rows: _encode_shots(*networks, jnp.asarray(tokens)[rows], jnp.asarray(first)[rows]),
        np.arange(len(turns)),
        16,
    )
    return found.reshape(*truth.clips.shape[:2], *found.shape[1:])


@jax.jit
def _encode_shots(
    encoder: ShotEncoder, t5: T5Encoder, clip: CLIP, tokens: jax.Array, frames: jax.Array
) -> jax.Array:
    image = clip.image_features(clip.preprocess(frames.astype(jnp.float32) / 127.5 - 1))
    return encoder(t5(tokens), image).astype(jnp.float32)


def representation_scores(
    predicted: Float32[np.ndarray, "g t n r"],
    true: Float32[np.ndarray, "g t n r"],
    *,
    num_text_tokens: int,
) -> dict[str, dict[str, float]]:
    """Mean squared error and explained variance of the text part, the image part and the whole."""
    n = predicted.shape[2]
    parts = {"text": slice(num_text_tokens), "image": slice(num_text_tokens, n), "all": slice(n)}
    scores = {}
    for name, tokens in parts.items():
        p, t = (x[:, :, tokens].reshape(-1, *x[:, :, tokens].shape[2:]) for x in (predicted, true))
        error = float(formulas.squared_error(p, t).mean())
        scores[name] = {"MSE": error, "explained variance": formulas.explained_variance(p, t)}
    return scores


# The report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """Everything about a model's games; each table holds means and intervals by name.

    Attributes:
        all_turns: of the model's clips and states; `open_turns` of the open ones only.
        by_turn, by_motion, by_level: the same by number of the turn, by true motion and level.
        ceilings: true clips judged the same way.
        base_rates, open_base_rates: answers without looking.
        representation: predicted s_a against E_a of the truth, if the model has T5 and CLIP.
        seconds_a_turn: playing, the mean without first turns, which may compile.
        checks: every reader on true clips; `chosen` names those that judged.
    """

    num_games: int
    num_turns: int
    all_turns: Table
    open_turns: Table
    by_turn: dict[str, Table]
    by_motion: dict[str, Table]
    by_level: dict[str, Table]
    ceilings: dict[str, Table]
    base_rates: dict[str, Table]
    open_base_rates: dict[str, Table]
    representation: dict[str, dict[str, float]] | None
    seconds_a_turn: float
    checks: tuple[ReaderCheck, ...]
    chosen: Mapping[Attribute, ReaderCheck]


def score(
    truth: Truth,
    played: PlayedGames,
    *,
    reader: ChosenReaders,
    embedder: ClipEmbedder | None = None,
    vae: VAE | None = None,
    representations: Float32[np.ndarray, "g t n r"] | None = None,
    num_text_tokens: int = 0,
) -> Scores:
    """Judges played games.

    Args:
        truth: of the same games.
        played: what the model made of them.
        reader: checked readers.
        embedder: for CLIP-I and CLIP-T.
        vae: for the ceiling that its own losses set.
        representations: the true ones.
        num_text_tokens: of them.
    """
    judge = Judge(reader, embedder)
    values = judge.values(played.frames, truth)
    values |= state_values(played.states[..., 1:], played.states[..., 0], truth)
    ceilings = {"true clips": truth.clips, "another take": other_take(truth)}
    if vae is not None:
        flat = truth.clips.reshape(-1, *truth.clips.shape[2:])
        ceilings["through the VAE"] = reconstruct(vae, flat).reshape(truth.clips.shape)
    rates = {"most frequent": constant_values(truth)}
    if len(truth.games) > 1:
        others = np.roll(truth.clips, 1, axis=0)
        rates["another game"] = judge.similarities(others, truth) | other_game_values(
            truth, hear=False
        )
        rates["no memory"] = other_game_values(truth, hear=True)
    motions = np.array([[turn.scene.motion for turn in game] for game in truth.games])
    numbers = np.broadcast_to(np.arange(1, motions.shape[1] + 1), motions.shape)

    def by(groups: np.ndarray) -> dict[str, Table]:
        return {str(kind): summarise(values, groups == kind) for kind in np.unique(groups)}

    compared = None
    if representations is not None and motions.size > 1:
        compared = representation_scores(
            played.representations, representations, num_text_tokens=num_text_tokens
        )
    return Scores(
        num_games=motions.shape[0],
        num_turns=motions.shape[1],
        all_turns=summarise(values),
        open_turns=summarise_open(values, truth),
        by_turn=by(numbers),
        by_motion=by(motions),
        by_level=by(truth.levels),
        ceilings={name: summarise(judge.values(clips, truth)) for name, clips in ceilings.items()},
        base_rates={name: summarise(value) for name, value in rates.items()},
        open_base_rates={name: summarise_open(value, truth) for name, value in rates.items()},
        representation=compared,
        seconds_a_turn=formulas.seconds_a_turn(played.seconds),
        checks=reader.checks,
        chosen=reader.chosen,
    )
