"""One evaluation, from its options to the report: systems play, scorers score, judges judge."""

import dataclasses
import functools
import importlib
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np

from animegamer_jax import __version__
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.bundle.embedded import model_folder
from animegamer_jax.data.characters import Characters, read_characters
from animegamer_jax.devices import processor
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import (
    Benchmark,
    check_characters,
    read_benchmark,
)
from animegamer_jax.evaluate.judge.scores import agreement
from animegamer_jax.evaluate.metrics.registry import (
    GROUPS,
    METRICS,
    Group,
)
from animegamer_jax.evaluate.metrics.scorers import expected_of
from animegamer_jax.evaluate.metrics.suite import (
    FrameSize,
    Means,
    Scoring,
    ScoringClip,
    first_pictures,
    load_clip,
    make_scoring,
)
from animegamer_jax.evaluate.options import JudgeOptions, Options
from animegamer_jax.evaluate.play_games import (
    benchmark_digest,
    check_instructions,
    play_system,
    read_system,
)
from animegamer_jax.evaluate.reference_scores import tables_beside
from animegamer_jax.evaluate.report.ablations import TOY_ABLATIONS, read_ablations
from animegamer_jax.evaluate.report.build import write_report
from animegamer_jax.evaluate.results import Evaluation, SystemResult, Table, write_results
from animegamer_jax.game.player import Player, check_fit
from animegamer_jax.models.vae import VAE
from animegamer_jax.progress import print_status, show_progress
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import telling
from animegamer_jax.tokenizer import Tokenizer
from animegamer_jax.toy.scoring.benchmark import WORLD

MARK_FILE = "evaluation.json"
"""Beside `results.json`: whose games lie here, from the start on."""


class _Source:
    """A system as the command line names it: NAME=DIR, or DIR."""

    def __init__(self, word: str, *, played: bool):
        name, equals, path = word.partition("=")
        if not equals or "/" in name or Path(word).exists():
            name, path = "", word
        self.path, self.played = path, played
        self.name = name or (path if path == "toy" else Path(path).resolve().name)


def _sources(options: Options) -> tuple[_Source, ...]:
    """The systems, each with a name of its own.

    Raises:
        UserError: there is none.
    """
    models = options.model or (() if options.played else ("toy",))
    found = [_Source(word, played=False) for word in models]
    found += [_Source(word, played=True) for word in options.played]
    for index, source in enumerate(found):
        taken = {other.name for other in found[:index]}
        if source.name in taken:
            source.name = next(
                name for n in range(2, 99) if (name := f"{source.name}-{n}") not in taken
            )
    return tuple(found)


def _groups(words: Sequence[str]) -> tuple[Group, ...]:
    """Groups of metrics by their names or by those of metrics.

    Raises:
        UserError: there is no such metric.
    """
    known: dict[str, Group] = {group: group for group in GROUPS}
    known |= {name.casefold(): metric.group for name, metric in METRICS.items()}
    for word in words:
        if word.casefold() not in known:
            raise UserError(
                f"--metrics {word}: unknown metric: expected some of {', '.join(GROUPS)}, or of "
                f"{', '.join(METRICS)}"
            )
    asked = {known[word.casefold()] for word in words}
    return tuple(group for group in GROUPS if group in asked)


class Run:
    """One evaluation.

    Args:
        options: what is played and how it is scored.
        judge: who else scores it.

    Raises:
        UserError: a wrong option.
    """

    def __init__(self, options: Options, judge: JudgeOptions):
        self._options, self._judge = options, judge
        for name in ("steps", "batch_size", "games", "reader_clips"):
            value = getattr(options, name)
            if value is not None and value < 1:
                option = name.replace("_", "-")
                raise UserError(f"--{option}: expected 1 or more, found {value}")
        self._groups = _groups(options.metrics)
        self._sources = _sources(options)
        if options.ablations is not None:
            read_ablations(options.ablations)
        if judge.judge:
            importlib.import_module(
                "animegamer_jax.evaluate.judge.judge"
            )  # tells what is not installed

    def run(self) -> None:
        """Plays, scores and writes; a folder that holds a part of it already goes on.

        Raises:
            UserError: a wrong benchmark, model or folder.
        """
        options = self._options
        benchmark = read_benchmark(options.benchmark)
        if options.games is not None:
            if options.games > len(benchmark.games):
                raise UserError(
                    f"--games {options.games}: expected at most {len(benchmark.games)}, as many as "
                    f"benchmark {benchmark.name} has"
                )
            games = benchmark.games[: options.games]
            benchmark = dataclasses.replace(benchmark, games=games)
        for source in self._sources:
            if not source.played:
                _check_world(source, benchmark)
        means = self._means()
        if means.characters is not None:
            check_characters(benchmark, means.characters.names, model=str(options.characters))
        digest = benchmark_digest(benchmark)
        _claim(options.out, benchmark.name, digest)
        began = time.perf_counter()
        systems = tuple(
            self._read(source, benchmark, means)
            if source.played
            else self._play(source, benchmark, means)
            for source in self._sources
        )
        judge_scores, agreements, note = self._ask_judges(benchmark, systems, means.characters)
        evaluation = Evaluation(
            benchmark=benchmark.name,
            benchmark_digest=digest,
            world=benchmark.world,
            made_by=benchmark.made_by,
            games=tuple(game.id for game in benchmark.games),
            instructions=tuple(
                tuple(turn.instruction for turn in game.turns) for game in benchmark.games
            ),
            is_open=np.array([[turn.is_open for turn in g.turns] for g in benchmark.games]),
            expected=np.stack([expected_of(game.turns) for game in benchmark.games]),
            systems=systems,
            judge_scores=judge_scores,
            agreements=agreements,
            judge_note=note,
            about=self._about(benchmark, seconds=time.perf_counter() - began),
        )
        write_results(options.out, evaluation)
        pages = write_report(options.out, evaluation, ablations=self._ablations(benchmark))
        for line in _summary(evaluation.systems):
            print(line)
        print(f"{', '.join(map(str, pages))}: written after {time.perf_counter() - began:.0f} s")

    def _means(self) -> Means:
        options = self._options
        characters = None if options.characters is None else read_characters(options.characters)
        clip = None
        if {"clip", "truth"} & {*self._groups}:
            try:
                clip = self._clip()
            except UserError as error:
                clip = str(error)
        return Means(
            groups=self._groups,
            clip=clip,
            lpips=options.lpips,
            dreamsim=options.dreamsim,
            fvd=options.fvd,
            jedi=options.jedi,
            real_clips=options.real_clips,
            characters=characters,
            reader_clips=options.reader_clips,
        )

    def _clip(self) -> ScoringClip | None:
        """Of --clip, or of the first model that has one, best one that reads captions."""
        options = self._options
        if options.clip is not None:
            return load_clip(options.clip, tokenizer=options.clip_tokenizer)
        found = [
            load_clip(source.path, tokenizer=options.clip_tokenizer)
            for source in self._sources
            if not source.played and Bundle.open(model_folder(source.path)).has("clip")
        ]
        return next((clip for clip in found if clip.texts), found[0] if found else None)

    def _play(self, source: _Source, benchmark: Benchmark, means: Means) -> SystemResult:
        options = self._options
        bundle = Bundle.open(model_folder(source.path))
        player = Player.from_bundle(
            bundle, window=options.window, steps=options.steps, dtype=options.dtype
        )
        size = FrameSize(player.num_frames, player.height, player.width)
        print_status(f"{source.name}: making the scorers")
        scoring = make_scoring(benchmark, means, size, vae=player.networks.vae)
        digest = bundle.digest()
        settings = {
            "protocol": player.protocol.name,
            "window": player.window,
            "steps": player.steps,
            "dtype": options.dtype or "the model's own",
            "guidance": player.protocol.guidance_scale,
        }
        with show_progress() as progress:
            played = play_system(
                player,
                benchmark,
                scoring,
                home=_home(options.out, source),
                name=bundle.name,
                settings={"digest": digest, **settings},
                batch_size=options.batch_size,
                on_turn=functools.partial(progress, f"{source.name}: turns played"),
            )
        if played.kept:
            print_status(f"{source.name}: {played.kept} games were there")
        return SystemResult(
            name=source.name,
            model=source.path,
            digest=digest,
            settings=settings | {"batch_size": options.batch_size} | _scored_with(means, scoring),
            values=played.values,
            set_scores=played.set_scores,
            folders=tuple(_beneath(options.out, folder) for folder in played.folders),
            beside=self._beside(source, benchmark, scoring, vae=player.networks.vae),
            left_out=scoring.left_out,
            notes=_notes(benchmark, player.tokenizer),
        )

    def _read(self, source: _Source, benchmark: Benchmark, means: Means) -> SystemResult:
        def make(size: FrameSize) -> Scoring:
            return make_scoring(benchmark, means, size)

        with show_progress() as progress:
            on_turn = functools.partial(progress, f"{source.name}: turns scored")
            played, scoring = read_system(Path(source.path), benchmark, make, on_turn=on_turn)
        return SystemResult(
            name=source.name,
            model=source.path,
            digest=None,
            settings={"played": "elsewhere", **_scored_with(means, scoring)},
            values=played.values,
            set_scores=played.set_scores,
            folders=tuple(_beneath(self._options.out, folder) for folder in played.folders),
            beside=self._beside(source, benchmark, scoring, vae=None),
            left_out=scoring.left_out,
            notes=("Its clips were read from compressed files; others were scored as generated.",),
        )

    def _beside(
        self, source: _Source, benchmark: Benchmark, scoring: Scoring, *, vae: VAE | None
    ) -> Mapping[str, Table]:
        print_status(f"{source.name}: scoring true and other clips")
        return tables_beside(benchmark, scoring, vae=vae, keep=_home(self._options.out, source))

    def _ask_judges(
        self, benchmark: Benchmark, systems: Sequence[SystemResult], characters: Characters | None
    ) -> tuple[tuple[Any, ...], Mapping[str, Any], str | None]:
        """Returns the judges' scores, agreements by "A and B", and why a judge gave no scores."""
        asked = self._judge
        if not asked.judge:
            return (), {}, None
        from animegamer_jax.evaluate.judge.judge import judge
        from animegamer_jax.evaluate.judge.prompt import JudgedGame, JudgeSettings

        out = self._options.out
        pictures = {} if characters is None else first_pictures(characters)
        games = [
            JudgedGame.saved(
                game.id,
                {system.name: out / system.folders[row] for system in systems},
                characters={n: pictures[n] for n in game.characters if n in pictures},
            )
            for row, game in enumerate(benchmark.games)
        ]
        every, notes = [], []
        for number, name in enumerate(asked.judge):
            try:
                settings = JudgeSettings(
                    model=name,
                    endpoint=asked.endpoint,
                    key_variable=asked.key_variable,
                    parallel=asked.parallel,
                    frames=asked.judge_frames,
                    prompt_price=asked.prompt_price,
                    completion_price=asked.completion_price,
                )
                with show_progress() as progress:
                    scores = judge(
                        games,
                        settings,
                        cache=out / "judge",
                        seed=asked.judge[:number].count(name),
                        on_progress=lambda done, total, usage, name=name, progress=progress: (
                            progress(f"{name}: games judged", done, total)
                        ),
                        on_wait=print_status,
                    )
            except UserError as error:
                notes.append(f"{name}: {error}")
                continue
            print(scores)
            every.append(scores)
            if not scores.num_judged:
                notes.append(str(scores))
        agreements = {
            f"{_judge_name(a)} and {_judge_name(b)}": agreement(a, b)
            for i, a in enumerate(every)
            for b in every[i + 1 :]
        }
        return tuple(every), agreements, "; ".join(notes) or None

    def _ablations(self, benchmark: Benchmark) -> Path | None:
        """Those that were asked for; of the toy world those that come with the code."""
        if self._options.ablations is not None:
            return self._options.ablations
        return TOY_ABLATIONS if benchmark.world == WORLD and TOY_ABLATIONS.exists() else None

    def _about(self, benchmark: Benchmark, *, seconds: float) -> dict[str, Any]:

        seeds = [game.seed for game in benchmark.games]
        return {
            "date": time.strftime("%Y-%m-%d"),
            "command": shlex.join(["animegamer", *sys.argv[1:]]),
            "seconds": round(seconds, 1),
            "seeds": [min(seeds), max(seeds)],
            "animegamer_jax": __version__,
            "jax": jax.__version__,
            "flax": flax.__version__,
            "python": platform.python_version(),
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "processor": processor(),
            "cores": os.cpu_count(),
        }


def _claim(out: Path, name: str, digest: str) -> None:
    """Makes the folder an evaluation of this benchmark's.

    Raises:
        UserError: it is another's, or holds other things.
    """
    mark = out / MARK_FILE
    try:
        found = json.loads(mark.read_text())["benchmark_digest"]
    except FileNotFoundError:
        found = None
        if out.is_dir() and any(out.iterdir()):
            raise UserError(
                f"--out {out}: expected a new folder or one of an evaluation, found other things "
                "in it: choose another folder"
            ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{mark}: cannot be read ({error}): choose another folder") from None
    if found not in (None, digest):
        raise UserError(
            f"--out {out}: expected games of benchmark {name}, found those of another one, or of "
            "another number of games: choose another folder"
        )

    with telling(out, "cannot be written", mend="choose another folder"):
        out.mkdir(parents=True, exist_ok=True)
        content = {"benchmark": name, "benchmark_digest": digest}
        write_whole(mark, (json.dumps(content) + "\n").encode())


def _check_world(source: _Source, benchmark: Benchmark) -> None:
    """Makes sure, before anything is played, that a model can read what the benchmark says.

    Raises:
        UserError: there is no such model, it cannot play, a character's name is not among the
            words that it knows, or an instruction is too long.
    """
    bundle = Bundle.open(model_folder(source.path))
    check_fit(bundle.config)
    mllm: Any = bundle.config.mllm
    tokenizer = Tokenizer.load(
        bundle.tokenizer_dir, vocab_size=mllm.mistral.vocab_size, num_queries=mllm.num_queries
    )
    known = [name for name in benchmark.characters if not tokenizer.unknown_words(name)]
    check_characters(benchmark, known, model=f"model {source.name}")
    length = bundle.protocol.caption_length
    check_instructions(benchmark, lambda text: tokenizer.caption(text, length))


def _notes(benchmark: Benchmark, tokenizer: Tokenizer) -> tuple[str, ...]:
    if tokenizer.unknown_words("qzxv"):  # a closed vocabulary: names were checked
        return ()
    return (
        "The model can read any name and tells none that it knows: whether its world has the "
        f"characters of the benchmark ({', '.join(benchmark.characters[:5])}…) was not checked.",
    )


def _home(out: Path, source: _Source) -> Path:
    return out / "games" / source.name


def _beneath(out: Path, folder: Path) -> str:
    """A path in `results.json`: beneath the report's folder where it can be said so."""
    return os.path.relpath(folder, out)


def _scored_with(means: Means, scoring: Scoring) -> dict[str, Any]:
    """Which networks scored, for `settings`: values of two are of two scales."""
    clip = means.scoring_clip
    found = {} if clip is None else {"clip": clip.digest, "clip_of": clip.source}
    scorers = (*scoring.scorers, *scoring.set_scorers)
    named = {"lpips": "lpips", "dreamsim": "dreamsim", "fvd": "features", "jedi": "features"}
    return found | {s.group: s.made[named[s.group]] for s in scorers if s.group in named}


def _judge_name(scores: Any) -> str:
    return f"{scores.model}, seed {scores.seed}"


def _summary(systems: Sequence[SystemResult]) -> Iterator[str]:
    """The table on the terminal: a line a metric, a column a system."""
    width = max(12, *(len(system.name) + 2 for system in systems))
    yield " " * 12 + "".join(f"{system.name:>{width}}" for system in systems) + f"{'paper':>12}"
    for name, metric in METRICS.items():
        found = [_mean(system, name) for system in systems]
        if all(one is None for one in found):
            continue
        cells = (" " * width if one is None else f"{one:>{width}.3f}" for one in found)
        paper = f"{metric.paper:>12.3f}" if metric.paper is not None else ""
        yield (f"{name:<12}" + "".join(cells) + paper).rstrip()
    for system in systems:
        for group, reason in system.left_out.items():
            yield f"{system.name}: {group} left out: {reason}"


def _mean(system: SystemResult, metric: str) -> float | None:
    if metric in system.set_scores:
        return system.set_scores[metric]
    found = system.estimate(metric)
    return None if found is None else found.mean
