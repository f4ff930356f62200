"""Runs an evaluation, from its options to the report: play, score, ask judges, write."""

import dataclasses
import functools
import importlib
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np

from animegamer_jax import __version__
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.configs import clip_size
from animegamer_jax.data.characters import Characters, read_characters
from animegamer_jax.devices import processor
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark, check_characters, read_benchmark
from animegamer_jax.evaluate.judge.scores import agreement
from animegamer_jax.evaluate.metrics.registry import GROUPS, METRICS, Group
from animegamer_jax.evaluate.metrics.scorers import TruthScorer, expected_of
from animegamer_jax.evaluate.metrics.suite import (
    MetricResources,
    MetricSuite,
    ScoringClip,
    first_pictures,
    load_clip,
    make_suite,
)
from animegamer_jax.evaluate.options import JudgeOptions, Options
from animegamer_jax.evaluate.play_games import (
    PlayedGames,
    benchmark_digest,
    play_system,
    read_system,
)
from animegamer_jax.evaluate.reference_scores import reference_scores
from animegamer_jax.evaluate.report.ablations import read_ablations, shipped_ablations
from animegamer_jax.evaluate.report.build import write_report
from animegamer_jax.evaluate.report.summary import summarize
from animegamer_jax.evaluate.results import Evaluation, SystemResult, write_results
from animegamer_jax.evaluate.sources import Source, check_model, choose_sources, notes_on_names
from animegamer_jax.evaluate.worlds import FrameSize
from animegamer_jax.game.player import Player
from animegamer_jax.models.vae import VAE
from animegamer_jax.progress import print_line, print_status, show_progress
from animegamer_jax.storage.files import write_json
from animegamer_jax.storage.paths import user_errors
from animegamer_jax.storage.serialization import read_json, to_json

MARK_FILE = "evaluation.json"
"""File that names the benchmark of the folder's games, from the start on."""


def _groups(words: Sequence[str]) -> tuple[Group, ...]:
    """Returns the groups of metrics by their own names or those of metrics.

    Raises:
        UserError: There is no such metric.
    """
    known: dict[str, Group] = {group: group for group in GROUPS}
    known |= {name.casefold(): metric.group for name, metric in METRICS.items()}
    for word in words:
        if word.casefold() not in known:
            raise UserError(
                f"--metrics {word}: unknown metric: expected some of {', '.join(GROUPS)}, or of "
                f"{', '.join(METRICS)}"
            )
    chosen = {known[word.casefold()] for word in words}
    return tuple(group for group in GROUPS if group in chosen)


class EvaluationRun:
    """One evaluation.

    Args:
        options: What is played and how it is scored.
        judge: The models that judge it.

    Raises:
        UserError: An option is wrong.
    """

    def __init__(self, options: Options, judge: JudgeOptions):
        self._options, self._judge = options, judge
        numbers = {name: (getattr(options, name),) for name in ("steps", "batch_size", "games")}
        numbers["classifier_clips"] = (options.files.classifier_clips,)
        for name, values in (numbers | {"window": options.window}).items():
            for value in values:
                if value is not None and value < 1:
                    option = name.replace("_", "-")
                    raise UserError(f"--{option}: expected 1 or more, found {value}")
        self._groups = _groups(options.metrics)
        self._sources = choose_sources(options)
        self._suites: dict[str, MetricSuite] = {}
        if options.ablations is not None:
            read_ablations(options.ablations)
        if judge.judge:  # fails now if a package is missing
            importlib.import_module("animegamer_jax.evaluate.judge.judge")

    def run(self) -> None:
        """Plays, scores and writes everything; continues an interrupted evaluation.

        Raises:
            UserError: The benchmark, a model or the folder is wrong.
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
                check_model(source, benchmark)
        resources = self._resources()
        if resources.characters is not None:
            known = resources.characters.names
            check_characters(benchmark, known, model=str(options.characters))
        digest = benchmark_digest(benchmark)
        _claim(options.out, benchmark.name, digest)
        began = time.perf_counter()
        systems = tuple(
            (self._read if source.played else self._play)(source, benchmark, resources)
            for source in self._sources
        )
        judge_scores, agreements, note = self._ask_judges(benchmark, systems, resources.characters)
        games = benchmark.games
        evaluation = Evaluation(
            benchmark=benchmark.name,
            benchmark_digest=digest,
            world=benchmark.world,
            made_by=benchmark.made_by,
            games=tuple(game.id for game in games),
            instructions=tuple(tuple(turn.instruction for turn in g.turns) for g in games),
            is_open=np.array([[turn.is_open for turn in g.turns] for g in games]),
            motions=tuple(
                tuple("" if turn.scene is None else turn.scene.motion for turn in g.turns)
                for g in games
            ),
            expected=np.stack([expected_of(game.turns) for game in games]),
            systems=systems,
            judge_scores=judge_scores,
            agreements=agreements,
            judge_note=note,
            run_config=_run_config(benchmark, seconds=time.perf_counter() - began),
        )
        write_results(options.out, evaluation)
        ablations = options.ablations or shipped_ablations(benchmark.world)
        pages = write_report(options.out, evaluation, ablations=ablations)
        for line in summarize(evaluation.systems):
            print_line(line)
        print_line(
            f"{', '.join(map(str, pages))}: written after {time.perf_counter() - began:.0f} s"
        )

    def _resources(self) -> MetricResources:
        options = self._options
        clip = None
        if "clip" in self._groups:
            try:
                clip = self._clip()
            except UserError as error:
                clip = str(error)
        return MetricResources(
            groups=self._groups,
            clip=clip,
            characters=None if options.characters is None else read_characters(options.characters),
            files=options.files,
        )

    def _clip(self) -> ScoringClip | None:
        """Returns that of --clip, or of the first model with one, preferably with a text tower."""
        options = self._options
        if options.clip is not None:
            return load_clip(options.clip, tokenizer=options.clip_tokenizer)
        paths = dict.fromkeys(source.path for source in self._sources if not source.played)
        found = [
            load_clip(path, tokenizer=options.clip_tokenizer)
            for path in paths
            if Bundle.open(path).has("clip")
        ]
        return next((clip for clip in found if clip.embedder.has_text), found[0] if found else None)

    def _play(
        self, source: Source, benchmark: Benchmark, resources: MetricResources
    ) -> SystemResult:
        options = self._options
        bundle = Bundle.open(source.path)
        player = Player.from_bundle(
            bundle,
            window=source.window,
            steps=options.steps,
            dtype=options.dtype,
            history=source.history,
            skip=options.skip,
            int8=options.int8,
        )
        vae = player.networks.vae
        if source.path not in self._suites:
            print_status(f"{source.name}: preparing the metrics")
            size = FrameSize(player.num_frames, player.height, player.width)
            self._suites[source.path] = make_suite(benchmark, resources, size, vae=vae)
        suite = self._suites[source.path]
        digest = bundle.digest()
        settings = {
            "protocol": player.protocol.name,
            "window": player.window,
            "steps": player.steps,
            "dtype": options.dtype or "the model's own",
            "guidance": player.protocol.guidance_scale,
        }
        if options.int8:
            settings["mllm weights"] = "int8"
        if player.skipped is not None:
            settings["skipped"] = f"{player.skipped.speedup:.2f} times fewer evaluations"
            settings["rows"] = " ".join(map(str, player.skipped.rows))
        if player.protocol.picture_first:
            settings["picture"] = "first, with the guidance"
            settings["guidance of motion"] = player.protocol.motion_guidance
        if source.history or player.protocol.history != "predicted":
            settings["history"] = player.protocol.history
        with show_progress() as progress:
            played = play_system(
                player,
                benchmark,
                suite,
                home=options.out / "games" / source.name,
                name=bundle.name,
                settings={"digest": digest, **settings},
                batch_size=options.batch_size,
                on_turn=functools.partial(progress, f"{source.name}: turns played"),
            )
        if played.num_cached:
            print_status(f"{source.name}: {played.num_cached} games were already played")
        return self._result(
            source,
            benchmark,
            played,
            suite,
            vae=vae,
            digest=digest,
            settings=settings | {"batch_size": options.batch_size} | _scored_with(resources, suite),
            notes=notes_on_names(benchmark, player.tokenizer),
        )

    def _read(
        self, source: Source, benchmark: Benchmark, resources: MetricResources
    ) -> SystemResult:
        with show_progress() as progress:
            played, suite = read_system(
                Path(source.path),
                benchmark,
                lambda size: make_suite(benchmark, resources, size),
                size=self._model_size(),
                on_turn=functools.partial(progress, f"{source.name}: turns scored"),
            )
        return self._result(
            source,
            benchmark,
            played,
            suite,
            vae=None,
            digest=None,
            settings={"played": "elsewhere", **_scored_with(resources, suite)},
            notes=(
                "Its clips were read from compressed files, enlarged ones at the models' "
                "size; others were scored as generated.",
            ),
        )

    def _model_size(self) -> tuple[int, int] | None:
        """Returns rows and columns of the models' clips; None if there are none, or several."""
        found = set[tuple[int, int]]()
        for source in self._sources:
            if not source.played:
                config = Bundle.open(source.path).config
                assert config.dit is not None
                assert config.vae is not None
                found.add(clip_size(config.dit, config.vae)[1:])
        return found.pop() if len(found) == 1 else None

    def _result(
        self,
        source: Source,
        benchmark: Benchmark,
        played: PlayedGames,
        suite: MetricSuite,
        *,
        vae: VAE | None,
        digest: str | None,
        settings: Mapping[str, Any],
        notes: tuple[str, ...],
    ) -> SystemResult:
        out = self._options.out
        print_status(f"{source.name}: computing reference scores")
        return SystemResult(
            name=source.name,
            model=source.path,
            digest=digest,
            settings=settings,
            values=played.values,
            set_scores=played.set_scores,
            folders=tuple(os.path.relpath(folder, out) for folder in played.folders),
            reference=reference_scores(benchmark, suite, vae=vae, cache=out / "reference"),
            skipped=suite.skipped,
            notes=notes,
        )

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
                    model=name, frames=asked.judge_frames, **vars(asked.server)
                )
                with show_progress() as progress:
                    scores = judge(
                        games,
                        settings,
                        cache=out / "judge",
                        seed=asked.judge[:number].count(name),
                        on_progress=functools.partial(progress, f"{name}: games judged"),
                        on_wait=print_status,
                    )
            except UserError as error:
                notes.append(f"{name}: {error}")
                continue
            print_line(str(scores))
            every.append(scores)
            if not scores.num_judged:
                notes.append(str(scores))
        agreements = {
            f"{_judge_name(a)} and {_judge_name(b)}": agreement(a, b)
            for i, a in enumerate(every)
            for b in every[i + 1 :]
        }
        return tuple(every), agreements, "; ".join(notes) or None


def _run_config(benchmark: Benchmark, *, seconds: float) -> dict[str, Any]:
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


@dataclasses.dataclass(frozen=True)
class _Mark:
    """Content of `MARK_FILE`."""

    benchmark: str
    benchmark_digest: str


def _claim(out: Path, name: str, digest: str) -> None:
    """Creates the folder, or checks that it belongs to this benchmark.

    Raises:
        UserError: It belongs to another benchmark, or holds other files.
    """
    mark = out / MARK_FILE
    hint = "choose another folder"
    with user_errors(mark, "cannot be read", hint=hint):
        is_there = mark.exists()
    if is_there:
        found = read_json(mark, _Mark, hint=hint).benchmark_digest
        if found != digest:
            raise UserError(
                f"--out {out}: expected games of benchmark {name}, found those of another one, or "
                "of another number of games: choose another folder"
            )
    elif out.is_dir() and any(out.iterdir()):
        raise UserError(
            f"--out {out}: expected a new folder or an evaluation's, found other files in it: "
            "choose another folder"
        )
    write_json(mark, to_json(_Mark(name, digest)))


def _scored_with(resources: MetricResources, suite: MetricSuite) -> dict[str, Any]:
    """Returns the networks that scored, for `settings`: values of two are on two scales."""
    clip = resources.scoring_clip
    found: dict[str, Any] = {}
    if clip is not None:
        found = {"clip": clip.digest, "clip_of": clip.source}
    named = {"lpips": "lpips", "dreamsim": "dreamsim", "fvd": "features", "jedi": "features"}
    for scorer in (*suite.scorers, *suite.set_scorers):
        if scorer.group in named:
            found[scorer.group] = scorer.fingerprint[named[scorer.group]]
        if isinstance(scorer, TruthScorer):
            texts = scorer.classifier.description
            found |= {f"{name} classifier": text for name, text in texts.items()}
    return found


def _judge_name(scores: Any) -> str:
    return f"{scores.model}, seed {scores.seed}"
