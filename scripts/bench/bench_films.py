r"""Measures the steps from films to training data, on films of the toy world.

Give a command to `python scripts/bench/bench_films.py`:

    memory --minutes 30   memory for cutting a long film, and its motion levels
    cutting               core time for a film of 1080 rows
    flow                  optical flow at several working heights and presets
    workers               two worker processes compared with one, and that the files are the same
    reading               reading features of full size
    rows                  cost of a game dataset without its clips

Each makes its data in a temporary folder. The numbers are of one run; other work on the machine
changes them.
"""

import contextlib
import functools
import hashlib
import itertools
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from tyro.extras import SubcommandApp

from animegamer_jax.configs import make_full
from animegamer_jax.data.datasets import DatasetInfo, FeatureInfo, Part, Record, open_features
from animegamer_jax.data.films.clips.store import ClipRow, FilmReport, FilmSettings, open_shots
from animegamer_jax.data.loader import make_iterator
from animegamer_jax.data.shards import write_dataset
from animegamer_jax.media.motion import dis_flow, film_flow, motion_level, motion_value
from animegamer_jax.protocol import PAPER
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.drawing.style import CrossFade, Cut, FadeThroughBlack, FilmStyle
from animegamer_jax.toy.films import Film, make_film, write_film
from animegamer_jax.toy.scene import CHARACTERS, LEVELS, MOTION_EDGES, MOTIONS, PLACES, TIMES, Scene

app = SubcommandApp()
_STYLE = FilmStyle(fps=24, hold=3, pans=0.2, flashes=0.1)
_TRANSITIONS = (Cut(), Cut(), Cut(), CrossFade(12), FadeThroughBlack(12))
_SHOT_SECONDS = 4.0  # mean


# Reports a process's own peak memory; `getrusage` of children starts at their parent's.
_COMMAND = """
import pathlib, sys
from animegamer_jax.cli import main
status = main(sys.argv[2:])
pathlib.Path(sys.argv[1]).write_text(pathlib.Path("/proc/self/status").read_text())
raise SystemExit(status)
"""


class Run(NamedTuple):
    """Cost of a run: wall-clock seconds, core seconds, the command's peak memory in MB."""

    seconds: float
    core_seconds: float
    peak: float


def cut(films: Path, out: Path, *options: str) -> Run:
    """Runs `animegamer data films` in a process of its own (Linux)."""
    with tempfile.TemporaryDirectory() as temporary:
        status = Path(temporary) / "status"
        command = [sys.executable, "-c", _COMMAND, str(status), "data", "films", str(films)]
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*command, "--out", str(out), *options], check=True)
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        reported = dict(line.split(":", 1) for line in status.read_text().splitlines())
    core = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(seconds, core, int(reported["VmHWM"].split()[0]) / 1024)


def _write(
    path: Path, seed: int, *, minutes: float, size: tuple[int, int], style: FilmStyle = _STYLE
) -> Film:
    shots = max(1, round(60 * minutes / _SHOT_SECONDS))
    film = make_film(
        seed,
        num_shots=shots,
        height=size[0],
        width=size[1],
        transitions=_TRANSITIONS,
        style=style,
    )
    write_film(path, film)
    return film


def _cut_one(seed: int, **film: Any) -> tuple[Run, Film, FilmReport, list[ClipRow]]:
    """Writes a film (`_write`) and cuts it; returns the cost, the truth, and what was found."""
    with tempfile.TemporaryDirectory() as temporary:
        films, out = Path(temporary) / "films", Path(temporary) / "shots"
        films.mkdir()
        truth = _write(films / "film.mp4", seed, **film)
        run, folder = cut(films, out), open_shots(out)
        (name,) = folder.films()
        return run, truth, folder.report(name), list(folder.rows(name))


def _level_hits(rows: list[ClipRow], film: Film) -> tuple[int, int]:
    """Returns how many kept clips have the true level, and of how many the truth is known.

    A clip belongs to the shot at its middle. The truth is unknown if the camera moves.
    """
    hits = known = 0
    for row in rows:
        middle = (row.start + row.end) / 2 * film.style.fps
        shot = next(shot for shot in film.shots if middle < shot.end)
        if row.dropped is None and shot.pan is None:
            known += 1
            hits += motion_level(row.motion_value, edges=MOTION_EDGES) == shot.scene.level
    return hits, known


@app.command
def memory(*, minutes: float = 30.0, size: tuple[int, int] = (192, 288), seed: int = 51) -> None:
    """Cut one long film; print the peak memory of the process, and how many levels are right.

    Args:
        minutes: Length of the film in minutes.
        size: Rows and columns of the film; clips have the default size.
        seed: Seed of the film.
    """
    run, truth, report, kept = _cut_one(seed, minutes=minutes, size=size)
    hits, known = _level_hits(kept, truth)
    print(
        f"{report.seconds / 60:.1f} minutes of {size[0]} x {size[1]}: {report.kept} clips in "
        f"{run.seconds:.0f} s, peak {run.peak:.0f} MB; motion levels {hits} of {known}"
    )


@app.command
def cutting(*, seconds: float = 40.0, size: tuple[int, int] = (1080, 1920), seed: int = 52) -> None:
    """Cut one film of full size, and print the core time, start-up included.

    Args:
        seconds: Approximate length of the film in seconds.
        size: Rows and columns of the film; clips have the default size.
        seed: Seed of the film.
    """
    still = FilmStyle(fps=24, hold=3)  # drawings wide enough to pan over are huge
    run, _, report, _ = _cut_one(seed, minutes=seconds / 60, size=size, style=still)
    print(
        f"{report.seconds:.0f} s of {size[0]} x {size[1]}: {report.kept} clips, "
        f"{run.core_seconds:.0f} s of one core"
    )


_PRESETS = {
    "fast": cv2.DISOPTICAL_FLOW_PRESET_FAST,
    "medium": cv2.DISOPTICAL_FLOW_PRESET_MEDIUM,
}


@app.command
def flow(*, heights: tuple[int, ...] = (96, 144, 240, 480), pan: int = 60) -> None:
    """Compare settings of the optical flow: time, levels that are right, measured share of a pan.

    Args:
        heights: Working heights in rows.
        pan: Speed of the pan in pixels per frame at 480 x 720.
    """
    cv2.setNumThreads(1)
    drawn = [
        _drawn(m, level, seed) for seed, (m, level) in enumerate(itertools.product(MOTIONS, LEVELS))
    ]
    wide = np.random.default_rng(0).uniform(0, 255, (480, 720 + 4 * pan))
    smooth = cv2.normalize(cv2.GaussianBlur(wide, (0, 0), 6), None, 0, 255, cv2.NORM_MINMAX)
    views = [smooth[:, k * pan : k * pan + 720] for k in range(5)]
    panned = np.repeat(np.stack(views)[..., None], 3, axis=-1).astype(np.uint8)
    pairs = sum(len(frames) - 1 for _, frames in drawn)
    estimators = {name: functools.partial(dis_flow, preset=p) for name, p in _PRESETS.items()}
    estimators["where it explains"] = functools.partial(film_flow)
    for rows, (name, estimator) in itertools.product(heights, estimators.items()):
        estimate = functools.partial(estimator, rows=rows)
        began = time.process_time()
        values = [motion_value(frames, estimate=estimate) for _, frames in drawn]
        took = 1000 * (time.process_time() - began) / pairs
        hits = sum(
            motion_level(value, edges=MOTION_EDGES) == level
            for value, (level, _) in zip(values, drawn, strict=True)
        )
        seen = motion_value(panned, estimate=estimate) / pan
        print(
            f"{rows} rows, {name}: {took:.1f} ms a pair, levels {hits} of {len(drawn)}, a pan of "
            f"{pan} pixels measured as {seen:.2f} of it",
            flush=True,
        )


def _drawn(motion: str, level: int, seed: int) -> tuple[int, np.ndarray]:
    """Returns a clip's level, and the clip in full size."""
    rng = np.random.default_rng(seed)
    actor, partner = (str(name) for name in rng.choice(CHARACTERS, 2, replace=False))
    scene = Scene(
        character=actor,
        motion=motion,
        place=str(rng.choice(PLACES)),
        time=str(rng.choice(TIMES)),
        level=level,
        partner=partner if motion == "talk" else None,
        seed=seed,
    )
    return level, render(scene, height=480, width=720)


def _digest(folder: Path) -> str:
    """Returns a digest of every file's name and content."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


@app.command
def workers(*, films: int = 4, minutes: float = 1.5, size: tuple[int, int] = (240, 360)) -> None:
    """Cut the same films with one and with two worker processes.

    Args:
        films: Number of films.
        minutes: Length of each film in minutes.
        size: Rows and columns of a film; clips have the default size.
    """
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "films"
        source.mkdir()
        for seed in range(films):
            _write(source / f"film {seed}.mp4", seed, minutes=minutes, size=size)
        taken, digests = [], []
        for count in (1, 2):
            out = Path(temporary) / f"shots-{count}"
            taken.append(cut(source, out, "--workers", str(count)).seconds)
            digests.append(_digest(out))
        print(
            f"{films} films of {minutes:g} minutes: one worker {taken[0]:.0f} s, two "
            f"{taken[1]:.0f} s, {taken[0] / taken[1]:.2f} times as fast; the files are "
            + ("the same" if digests[0] == digests[1] else "DIFFERENT")
        )


@app.command
def reading(*, records: int = 300, batch_size: int = 8, batches: int = 60) -> None:
    """Read features of full size as a training stage does.

    Args:
        records: Number of turns in the dataset.
        batch_size: Number of turns in a batch.
        batches: Number of batches to time, after some to warm up.
    """
    config = make_full()
    t5, clip, vae = config.t5, config.clip, config.vae
    assert t5 is not None
    assert clip is not None
    assert vae is not None
    info = DatasetInfo(
        kind="features",
        made_by="scripts/bench/bench_films.py",
        seed=0,
        num_frames=17,
        height=480,
        width=720,
        fps=8,
        protocol=PAPER,
        motion_edges=(0.75, 3.5, 12.5, 30.0),
        splits={},
        features=FeatureInfo(
            bundle="noise",
            games="noise",
            frame="first",
            text=(30, t5.d_model),
            image=(clip.num_patches, clip.vision_width),
            moments=(5, 60, 90, 2 * vae.latent_channels),
            t5=t5,
            clip=clip,
            vae=vae,
        ),
    )
    with tempfile.TemporaryDirectory() as temporary:
        _write_noise(Path(temporary) / "features", info, records)
        found = open_features(Path(temporary) / "features")
        turns, latents = found.turns("train"), found.latents("train")

        import grain

        def read(number: int) -> dict[str, np.ndarray]:
            record = turns[number]
            moments = latents[number]["moments"]
            return {k: record[k] for k in ("text_features", "image_features")} | {"m": moments}

        samples = grain.MapDataset.range(len(turns)).map(read)
        with contextlib.closing(make_iterator(samples, batch_size=batch_size, seed=0)) as stream:
            batch = next(stream)
            for _ in range(9):
                batch = next(stream)
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(batches):
                batch = next(stream)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        size = sum(array.nbytes for array in batch.values()) / batch_size / 1e6
        count = batches * batch_size
        print(
            f"{size:.2f} MB a record: {count / wall:.0f} records a second with two threads, "
            f"{count / cpu:.0f} a second of one core ({1000 * cpu / count:.1f} ms a record)"
        )


def _write_noise(path: Path, info: DatasetInfo, records: int) -> None:
    assert info.features is not None
    rng = np.random.default_rng(0)
    shapes = info.features.text, info.features.image, info.features.moments
    text, image, moments = (rng.normal(size=s).astype(np.float16) for s in shapes)
    words = dict.fromkeys(
        ("film", "instruction", "motion_text", "character", "motion", "place", "time"), "noise"
    )
    numbers = dict.fromkeys(("is_open", "social", "entertainment"), 0)
    numbers |= {"motion_level": 1, "stamina": 1}

    def turns() -> Iterator[dict[Part, Record]]:
        for number in range(records):
            place = {"game": number, "turn": 0, "num_turns": 1}
            reported = {**place, **words, **numbers, "motion_value": 1.0, "captions": ["noise"]}
            yield {
                "conditions": {**reported, "text_features": text, "image_features": image},
                "latents": {**place, "moments": moments},
            }

    write_dataset(path, info, splits={"train": turns})


@app.command
def rows(*, films: int = 5, clips: int = 2000) -> None:
    """Make a game dataset of empty clips: the cost of rows and annotations alone.

    Args:
        films: Number of films.
        clips: Number of clips of each film.
    """
    from animegamer_jax.data.characters import Character, Characters
    from animegamer_jax.data.films.annotation.labels import (
        Annotation,
        FilmAnnotation,
        Label,
        clips_digest,
        save_characters,
        write_labels,
    )
    from animegamer_jax.data.films.games.grouping import GamesSettings
    from animegamer_jax.data.films.games.plan import make_plan
    from animegamer_jax.data.films.games.writer import write_film_games

    said = {"motion": "riding a bicycle", "adverb": "slowly", "environment": "harbour"}
    said |= {"time": "day", "social": 0, "entertainment": 1, "stamina": -1, "motion_level": 3}
    annotation = Annotation.model_validate({"subject": "Mika", **said})
    characters = Characters((Character(name="Mika", aliases=(), images=("0" * 64,)),))
    with tempfile.TemporaryDirectory() as temporary:
        folder = open_shots(Path(temporary) / "shots", FilmSettings())
        save_characters(folder, characters)
        for number in range(films):
            film = f"film-{number:08x}"
            with folder.writing(film) as writer:
                for clip in range(clips):
                    start = 2.125 * clip + 9.0 * (clip // 8)
                    row = ClipRow(
                        clip=clip,
                        scene=clip // 4,
                        start=start,
                        end=start + 2.125,
                        dropped=None,
                        motion_value=3.14159,
                        flow=(3.14159,) * 16,
                        digest="",
                    )
                    writer.add(row, f"{film} {clip}".encode())
                writer.report = FilmReport(
                    film=film,
                    name=f"{film}.mp4",
                    seconds=3.0 * clips,
                    missing=0.0,
                    fps=24.0,
                    height=480,
                    width=720,
                    bars=(0, 0, 0, 0),
                    cuts=(),
                    scenes=clips // 4,
                    short_scenes=0,
                    kept=clips,
                    dropped={},
                )
            digest = clips_digest(folder.rows(film))
            report = FilmAnnotation(
                film=film, characters=characters.digest, clips=digest, num_manual=clips
            )
            labels = [Label(clip, annotation, "manual") for clip in range(clips)]
            write_labels(folder, report, labels, unannotated=())
        settings, taken = GamesSettings(), [time.process_time()]
        make_plan(folder, settings)
        taken.append(time.process_time())
        write_film_games(Path(temporary) / "games", folder, settings)
        taken.append(time.process_time())
        plan, whole = (1000 * seconds / (films * clips) for seconds in np.diff(taken))
        print(
            f"{films * clips} rows: {plan:.2f} ms of a core a row before anything is written, "
            f"{whole:.2f} with writing and the card"
        )


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    app.cli()
