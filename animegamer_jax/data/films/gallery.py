"""A page that shows what is in a shots folder or a game dataset: `animegamer data show`.

An HTML file, and next to it a folder with its clips and pictures, which the browser loads when they
are looked at. The page's own script filters, sorts and searches the clips; bars of the histograms
link to them. Nothing else is loaded: the page's Content-Security-Policy allows that script only.
"""

import base64
import dataclasses
import hashlib
import io
import itertools
import os
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from etils import epath
from jaxtyping import UInt8
from PIL import Image

from animegamer_jax.data.datasets import INFO_FILE, GameDataset, Record, RecordSource, open_games
from animegamer_jax.data.films.annotation.labels import (
    Label,
    Unannotated,
    read_labels,
    read_unannotated,
)
from animegamer_jax.data.films.clips.store import (
    SHOTS_FILE,
    ClipRow,
    FilmReport,
    ShotsFolder,
    open_shots,
)
from animegamer_jax.data.films.games.card import (
    DroppedClip,
    first_dropped,
    read_card,
    read_examples,
)
from animegamer_jax.errors import UserError, check_at_least
from animegamer_jax.media.motion import clip_motion, film_flow, motion_level
from animegamer_jax.media.video import decode_mp4, encode_mp4, enlarge
from animegamer_jax.progress import Progress, no_progress, track
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import absolute, is_bucket, user_errors

_PAGES = Path(__file__).parents[2] / "assets" / "pages"
_MAX_BARS = 16
_MAX_COUNTED = 5_000  # turns of a game dataset, each read with its clip
_POSTER_ROWS = 240
_OF_EACH = 4  # clips of each level, character and reason that are shown at least
_ANNOTATED = ("subject", "motion", "environment", "time")  # and, which are numbers,
_ANNOTATED_NUMBERS = ("motion_level", "social", "entertainment", "stamina")
_WORDS = ("character", "motion", "place", "time", "film")
_NUMBERS = ("motion_level", "social", "entertainment", "stamina", "is_open", "num_turns")
_FACETS = {"subject": "character", "motion_level": "level"}  # whose names in the page differ
_SELECTED = ("level", "character", "dropped")  # facets with a list to choose from
NO_REASON = "none"  # what is chosen for clips that were not dropped


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Counts by name; `facet` is the property of clips that it counts, None if clips lack it."""

    title: str
    counts: Mapping[str, int]
    facet: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """The content of the page.

    Attributes:
        title: Name of the folder.
        note: One line about all of it.
        histograms: In the order of drawing.
        skipped: Name of each film or clip that could not be used, and the reason.
        examples: One dropped clip for each reason: `reason`, `count`, `where`, `picture` (a URL).
        clips: The shown clips: `video` (a URL; None if dropped) and `poster` (a URL), `facts` by
            name, `tags` by facet, `flow` of each pair of frames, `motion` in pixels per frame, and
            `row`, the name of its film or game.
        some: How many clips there are, in words.
        row: What a row of clips is: a film or a game.
        seconds: Length of a clip.
    """

    title: str
    note: str
    histograms: Sequence[Histogram]
    skipped: Sequence[tuple[str, str]]
    examples: Sequence[Mapping[str, Any]]
    clips: Sequence[Mapping[str, Any]]
    some: str
    row: str
    seconds: float

    @property
    def linked(self) -> set[tuple[str, str]]:
        """Facets and values that some of the shown clips have."""
        return {pair for clip in self.clips for pair in clip["tags"].items()}

    @property
    def facets(self) -> dict[str, list[str]]:
        """The values to choose from, for each facet with a list."""
        found = {name: sorted(v for f, v in self.linked if f == name) for name in _SELECTED}
        found["dropped"] += [NO_REASON] * bool(found["dropped"])
        return found


@dataclasses.dataclass(frozen=True)
class PageFiles:
    """The folder of a page's clips and pictures, next to the page."""

    folder: epath.Path

    def add(self, name: str, content: bytes) -> str:
        """Writes a file; returns its URL, relative to the page.

        Raises:
            UserError: It cannot be written.
        """
        path = self.folder / name
        with user_errors(path, "cannot be written", hint="choose another file by --out"):
            if is_bucket(path):
                path.write_bytes(content)
            else:
                write_whole(Path(path), content)
        return urllib.parse.quote(f"{self.folder.name}/{name}")

    def picture(self, name: str, frame: UInt8[np.ndarray, "h w 3"]) -> str:
        """Writes a frame as a JPEG of at most 240 rows; returns its URL."""
        image, content = Image.fromarray(frame), io.BytesIO()
        image.thumbnail((4 * _POSTER_ROWS, _POSTER_ROWS))
        image.save(content, "JPEG", quality=80)
        return self.add(name, content.getvalue())


def _histogram(
    title: str, counts: Mapping[Any, int], *, facet: str | None = None, by_name: bool = False
) -> Histogram:
    """Orders the counts by frequency, or by name; joins the rare ones."""
    pairs = sorted(counts.items(), key=lambda pair: pair[0] if by_name else (-pair[1], pair[0]))
    shown = {str(name): count for name, count in pairs[:_MAX_BARS]}
    if rest := sum(count for _, count in pairs[_MAX_BARS:]):
        shown[f"{len(pairs) - _MAX_BARS} others"] = rest
    return Histogram(title, shown, facet)


def _spread(total: int, count: int) -> list[int]:
    """Returns `count` numbers below `total`, evenly spread; all if there are fewer."""
    return sorted(set(np.linspace(0, total - 1, min(count, total)).round().astype(int).tolist()))


def _chosen(tags: Sequence[Mapping[str, str]], count: int) -> list[int]:
    """Returns numbers of clips to show: evenly spread, and some of each level, character, reason.

    Args:
        tags: Values by facet, of each clip.
        count: Number of clips that are evenly spread.
    """
    if not count:
        return []
    found = set(_spread(len(tags), count))
    groups: dict[tuple[str, str], list[int]] = {}
    for number, own in enumerate(tags):
        for facet in _SELECTED:
            if facet in own:
                groups.setdefault((facet, own[facet]), []).append(number)
    for numbers in groups.values():
        found |= {numbers[k] for k in _spread(len(numbers), _OF_EACH)}
    return sorted(found)


def _examples(
    files: PageFiles, clips: Mapping[str, DroppedClip], counts: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """Yields the dropped clips, the most frequent reasons first."""
    for number, reason in enumerate(sorted(clips, key=lambda reason: -counts[reason])):
        clip = clips[reason]
        yield {
            "reason": reason,
            "count": counts[reason],
            "where": f"{clip.film}, {clip.seconds:.1f} s",
            "picture": files.add(f"example-{number}.jpg", clip.picture),
        }


# Shots folders


def show_shots(
    folder: ShotsFolder, files: PageFiles, *, clips: int, on_progress: Progress = no_progress
) -> Page:
    """Returns the page of a shots folder, annotated or not."""
    reports: list[FilmReport] = []
    rows: dict[str, Sequence[ClipRow]] = {}
    labels: dict[str, Mapping[int, Label]] = {}
    aside: dict[str, Sequence[Unannotated]] = {}
    every_film = folder.films()
    for film in track(every_film, on_progress, "films read", total=len(every_film)):
        reports.append(folder.report(film))
        rows[film], labels[film] = folder.rows(film), read_labels(folder, film)
        aside[film] = read_unannotated(folder, film)
    every = [label.to_row() for found in labels.values() for label in found.values()]
    taken = [(film, row) for film in rows for row in rows[film]]
    kept = [(film, row) for film, row in taken if row.dropped is None]
    dropped = Counter(row.dropped for _, row in taken if row.dropped)
    short = sum(report.short_scenes for report in reports)
    examples = {
        reason: first_dropped(folder, next(r.film for r in reports if reason in r.dropped), reason)
        for reason in dropped
    }
    levels = Counter(motion_level(row.motion_value) for _, row in kept)
    reasons = {**dropped, **({"scene too short": short} if short else {})}
    histograms = [
        _histogram("clips of each film", Counter(film for film, _ in kept), facet="film"),
        _histogram("dropped", reasons, facet="dropped"),
        _histogram("motion level by flow (the paper's edges)", levels, facet="level", by_name=True),
    ]
    for name in (*_ANNOTATED, *_ANNOTATED_NUMBERS):
        counts = Counter(label[name] for label in every)
        facet = "annotated level" if name == "motion_level" else _FACETS.get(name, name)
        by_name = name in _ANNOTATED_NUMBERS
        histograms.append(_histogram(name, counts, facet=facet, by_name=by_name))
    films = folder.skipped_films()
    skipped = [(film.name, film.reason) for film in films]
    skipped += [
        (f"{film}, clip {clip.clip}", clip.reason) for film, some in aside.items() for clip in some
    ]
    minutes = sum(report.seconds for report in reports) / 60
    tags = [_shot_tags(film, row, labels[film].get(row.clip)) for film, row in taken]
    chosen = _chosen(tags, clips)
    shown = track(chosen, on_progress, "clips", total=len(chosen))
    return Page(
        title=folder.path.name,
        note=f"Shots of {len(reports)} films, {minutes:.1f} minutes; {len(kept):,} clips kept, "
        f"{dropped.total():,} dropped, {len(every):,} annotated; {len(films)} films skipped",
        histograms=histograms,
        skipped=skipped,
        examples=list(_examples(files, examples, dropped)),
        clips=[
            _shot(folder, files, *taken[number], labels[taken[number][0]], tags[number])
            for number in shown
        ],
        some=f"the folder has {len(kept):,} kept and {dropped.total():,} dropped",
        row="film",
        seconds=folder.settings.clip_seconds,
    )


def _shot_tags(film: str, row: ClipRow, label: Label | None) -> dict[str, str]:
    if row.dropped is not None:
        return {"film": film, "dropped": row.dropped}
    said = label.to_row() if label else {}
    found = {_FACETS.get(name, name): str(said[name]) for name in _ANNOTATED if said}
    found |= {name: str(said[name]) for name in _ANNOTATED_NUMBERS if said}
    if "motion_level" in found:
        found["annotated level"] = found.pop("motion_level")
    return {"film": film, "level": str(motion_level(row.motion_value)), **found}


def _shot(
    folder: ShotsFolder,
    files: PageFiles,
    film: str,
    row: ClipRow,
    labels: Mapping[int, Label],
    tags: Mapping[str, str],
) -> dict[str, Any]:
    name = f"{film}-{row.clip:05d}"
    facts = {
        "clip": f"{film}, {row.clip}",
        "seconds": f"{row.start:.2f} to {row.end:.2f}, scene {row.scene}",
        "flow": f"{row.motion_value:.2f} pixels, level {motion_level(row.motion_value)}",
    }
    common = {"tags": tags, "flow": row.flow, "motion": row.motion_value, "row": film}
    if row.dropped is not None:
        poster = files.add(f"{name}.jpg", folder.read_picture(film, row.clip))
        return {"video": None, "poster": poster, "facts": facts, **common}
    mp4, label = folder.read_clip(film, row.clip), labels.get(row.clip)
    said = label.to_row() if label else {}
    facts |= {n: str(said[n]) for n in ("adverb", *_ANNOTATED, *_ANNOTATED_NUMBERS) if said}
    frames = decode_mp4(mp4, name=f"{film}, clip {row.clip}", num_frames=1)
    poster = files.picture(f"{name}.jpg", frames[0])
    return {"video": files.add(f"{name}.mp4", mp4), "poster": poster, "facts": facts, **common}


# Game datasets


def show_games(
    games: GameDataset, files: PageFiles, *, clips: int, on_progress: Progress = no_progress
) -> Page:
    """Returns the page of a game dataset; the histograms of a large one count some of the turns."""
    info = games.info
    sources = {split: games.turns(split) for split in info.splits}
    places = [(split, number) for split, count in info.splits.items() for number in range(count)]
    counted = [places[number] for number in _spread(len(places), _MAX_COUNTED)]
    counts: dict[str, Counter[Any]] = {name: Counter() for name in (*_NUMBERS, *_WORDS)}
    tags: list[dict[str, str]] = []
    for split, number in track(counted, on_progress, "turns counted", total=len(counted)):
        turn = sources[split][number]
        tags.append(_turn_tags(turn, split))
        for name, counter in counts.items():
            counter[turn[name] if name in _WORDS else int(turn[name])] += 1
    histograms = [_histogram("turns of each split", info.splits, facet="split")]
    histograms += [
        _histogram(name, counts[name], facet=_FACETS.get(name, name), by_name=name in _NUMBERS)
        for name in counts
    ]
    examples: list[dict[str, Any]] = []
    if (card := read_card(games.path)) is not None:  # a dataset that was made from films
        dropped, unused = card["totals"]["clips_dropped"], card["totals"]["clips_unused"]
        histograms += [_histogram("clips dropped", dropped), _histogram("clips unused", unused)]
        examples += _examples(files, read_examples(games.path, card), dropped)
    some = f"; counts except the splits' are of {len(counted):,} turns, evenly spread"
    edges = ", ".join(f"{edge:g}" for edge in info.motion_edges)
    chosen = _whole_games(sources, (counted[number] for number in _chosen(tags, clips)), clips)
    shown = track(chosen, on_progress, "clips", total=len(chosen))
    return Page(
        title=games.path.name,
        note=f"Games of {info.num_frames} frames of {info.height} x {info.width} at {info.fps} "
        f"per second, by `{info.made_by}`; edges of the motion levels: {edges} pixels per frame"
        + some
        * (len(counted) < len(places)),
        histograms=histograms,
        skipped=(),
        examples=examples,
        clips=[_turn(sources[split][number], split, games, files) for split, number in shown],
        some=f"the dataset has {len(places):,} turns",
        row="game",
        seconds=info.num_frames / info.fps,
    )


def _whole_games(
    sources: Mapping[str, RecordSource], places: Iterable[tuple[str, int]], count: int
) -> list[tuple[str, int]]:
    """Returns the turns of the games to which some turns belong, about `count` of them, in order.

    A game's turns follow each other in its split.
    """
    firsts: dict[tuple[str, int], int] = {}  # the first turn of each game, and its number of turns
    for split, number in places:
        turn = sources[split][number]
        firsts.setdefault((split, max(0, number - int(turn["turn"]))), int(turn["num_turns"]))
    games = list(firsts.items())
    mean = max(1.0, sum(firsts.values()) / max(1, len(games)))
    wanted = _spread(len(games), max(1, round(count / mean))) if count and games else []
    found = [
        (split, number)
        for (split, first), turns in (games[k] for k in wanted)
        for number in range(first, min(first + turns, len(sources[split])))
    ]
    return [key for key, _ in itertools.groupby(found)]


def _turn_tags(turn: Record, split: str) -> dict[str, str]:
    found = {_FACETS.get(name, name): str(turn[name]) for name in _WORDS}
    found |= {_FACETS.get(name, name): str(int(turn[name])) for name in _NUMBERS}
    return {**found, "split": split}


def _turn(turn: Record, split: str, games: GameDataset, files: PageFiles) -> dict[str, Any]:
    frames = decode_mp4(turn["clip"], name=f"{games.path}, game {turn['game']}")
    name = f"{split}-{turn['game']:06d}-{turn['turn']}"
    facts = {
        "turn": f"{split}: game {turn['game']}, turn {turn['turn'] + 1} of {turn['num_turns']}",
        "instruction": turn["instruction"],
        "motion text": turn["motion_text"],
        "caption": turn["captions"][0],
        "flow": f"{turn['motion_value']:.2f} pixels, level {turn['motion_level']}",
        "states": ", ".join(
            f"{name} {turn[name]:+d}" for name in ("social", "entertainment", "stamina")
        ),
    }
    # Encoded again: browsers do not play lossless clips.
    mp4 = encode_mp4(enlarge(frames), fps=games.info.fps)
    return {
        "video": files.add(f"{name}.mp4", mp4),
        "poster": files.picture(f"{name}.jpg", frames[0]),
        "facts": facts,
        "tags": _turn_tags(turn, split),
        "flow": [round(value, 3) for value in clip_motion(frames, estimate=film_flow).flow],
        "motion": float(turn["motion_value"]),
        "row": f"{split}: game {turn['game']}",
    }


# The page


def make_page(
    path: epath.PathLike,
    files: PageFiles,
    *,
    clips: int = 96,
    on_progress: Progress = no_progress,
) -> str:
    """Returns the HTML page of a shots folder or a game dataset; writes its clips and pictures.

    Args:
        path: The folder.
        files: Where clips and pictures go.
        clips: Number of clips to show, evenly spread; a few more, so that there are some of each
            level, character and reason, or whole games.
        on_progress: Called with what is counted, the number done and the total.

    Raises:
        UserError: It is neither, or a file is damaged or cannot be written.
    """
    check_at_least("clips", clips, 0)
    path = absolute(path)
    with user_errors(path, "cannot be read", hint="check the path"):
        is_shots, is_games = ((path / name).exists() for name in (SHOTS_FILE, INFO_FILE))
    if is_shots:
        page = show_shots(open_shots(path), files, clips=clips, on_progress=on_progress)
    elif is_games:
        page = show_games(open_games(path), files, clips=clips, on_progress=on_progress)
    else:
        raise UserError(
            f"{os.fspath(path)}: expected a shots folder ({SHOTS_FILE}) or a game dataset "
            f"({INFO_FILE}), found neither"
        )
    style, script = ((_PAGES / f"show.{kind}").read_text() for kind in ("css", "js"))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string((_PAGES / "show.html.jinja").read_text()).render(
        page=page,
        style=style,
        script=script,
        style_hash=_source_hash(style),
        script_hash=_source_hash(script),
        script_data={"clips": page.clips, "some": page.some, "seconds": page.seconds},
    )


def _source_hash(text: str) -> str:
    """Returns the word by which a Content-Security-Policy allows a style or a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def default_page(path: epath.PathLike) -> epath.Path:
    """Returns the page's file: next to the folder, or in the current folder for a bucket's."""
    path = absolute(path)
    return (absolute(".") if is_bucket(path) else path.parent) / f"{path.name}.html"


def write_page(
    path: epath.PathLike,
    out: epath.PathLike,
    *,
    clips: int = 96,
    on_progress: Progress = no_progress,
) -> None:
    """Writes the page of a shots folder or a game dataset (`make_page`), also into a bucket.

    Its clips and pictures go into a folder next to it, `NAME_files` for NAME.html.

    Raises:
        UserError: As `make_page`, or the page cannot be written.
    """
    out = absolute(out)
    files = PageFiles(out.parent / f"{out.stem}_files")
    with user_errors(out, "cannot be written", hint="choose another file by --out"):
        if not is_bucket(out) and out.is_dir():
            raise IsADirectoryError(21, os.strerror(21))
        files.folder.mkdir(parents=False, exist_ok=True)
    page = make_page(path, files, clips=clips, on_progress=on_progress).encode()
    with user_errors(out, "cannot be written", hint="choose another file by --out"):
        if is_bucket(out):
            out.write_bytes(page)
        else:
            write_whole(Path(out), page)
