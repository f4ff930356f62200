"""A page that shows what is in a shots folder or a game dataset: `animegamer data show`.

One self-contained HTML file: clips with their first frame and flow curve, levels, states and texts;
histograms; what was dropped, with a picture for each reason.
"""

import base64
import dataclasses
import io
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from etils import epath
from jaxtyping import UInt8
from PIL import Image

from animegamer_jax.data.datasets import INFO_FILE, GameDataset, Record, open_games
from animegamer_jax.data.films.annotation.labels import Label, read_labels, read_unannotated
from animegamer_jax.data.films.clips.store import SHOTS_FILE, ClipRow, ShotsFolder, open_shots
from animegamer_jax.data.films.games.card import (
    DroppedClip,
    first_dropped,
    read_card,
    read_examples,
)
from animegamer_jax.errors import UserError
from animegamer_jax.media.motion import clip_motion, motion_level
from animegamer_jax.media.video import decode_mp4, encode_mp4, enlarge
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import absolute, is_bucket, user_errors

_TEMPLATE = Path(__file__).parents[2] / "assets" / "pages" / "show.html.jinja"
_MAX_BARS = 16
_MAX_COUNTED = 5_000  # turns of a game dataset, each read with its clip
_ANNOTATED = ("subject", "motion", "environment", "time")  # and, which are numbers,
_ANNOTATED_NUMBERS = ("motion_level", "social", "entertainment", "stamina")
_WORDS = ("character", "motion", "place", "time", "film")
_NUMBERS = ("motion_level", "social", "entertainment", "stamina", "is_open", "num_turns")

_Histogram = tuple[str, Mapping[str, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """The content of the page.

    Attributes:
        title: Name of the folder.
        note: One line about all of it.
        histograms: Title and counts by name of each histogram, in the order of drawing.
        skipped: Name of each film or clip that could not be used, and the reason.
        examples: One dropped clip for each reason: `reason`, `count`, `where`, `picture` (a URL).
        clips: The shown clips: `video` and `poster` (URLs), `facts` by name, `curve` (points of
            the flow's line, 100 wide and 30 high) and `curve_top` (its maximum in pixels).
        num_clips: Number of all clips.
    """

    title: str
    note: str
    histograms: Sequence[_Histogram]
    skipped: Sequence[tuple[str, str]]
    examples: Sequence[Mapping[str, Any]]
    clips: Sequence[Mapping[str, Any]]
    num_clips: int


def _data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _histogram(title: str, counts: Mapping[Any, int], *, by_name: bool = False) -> _Histogram:
    """Orders the counts by frequency, or by name; joins the rare ones."""
    pairs = sorted(counts.items(), key=lambda pair: pair[0] if by_name else (-pair[1], pair[0]))
    shown = {str(name): count for name, count in pairs[:_MAX_BARS]}
    if rest := sum(count for _, count in pairs[_MAX_BARS:]):
        shown[f"{len(pairs) - _MAX_BARS} others"] = rest
    return title, shown


def _clip(
    frames: UInt8[np.ndarray, "f h w 3"],
    flow: Sequence[float],
    *,
    fps: int,
    mp4: bytes | None,
    facts: Mapping[str, str],
) -> dict[str, Any]:
    """Returns a clip to show; `mp4` is None if browsers cannot play it, to encode it for them."""
    poster = io.BytesIO()
    Image.fromarray(frames[0]).save(poster, "JPEG", quality=85)
    top = max(flow, default=0.0)
    across = np.linspace(0, 100, len(flow)) if len(flow) > 1 else np.zeros(len(flow))
    up = 29 - 28 * np.asarray(flow) / (top or 1.0)
    return {
        "video": _data_url("video/mp4", mp4 or encode_mp4(enlarge(frames), fps=fps)),
        "poster": _data_url("image/jpeg", poster.getvalue()),
        "curve": " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, up, strict=True)),
        "curve_top": top,
        "facts": facts,
    }


def _spread(total: int, count: int) -> list[int]:
    """Returns `count` numbers below `total`, evenly spread; all if there are fewer."""
    return sorted(set(np.linspace(0, total - 1, min(count, total)).round().astype(int).tolist()))


def _examples(
    clips: Mapping[str, DroppedClip], counts: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """Yields the dropped clips, the most frequent reasons first."""
    for reason in sorted(clips, key=lambda reason: -counts[reason]):
        clip = clips[reason]
        yield {
            "reason": reason,
            "count": counts[reason],
            "where": f"{clip.film}, {clip.seconds:.1f} s",
            "picture": _data_url("image/jpeg", clip.picture),
        }


# Shots folders


def show_shots(folder: ShotsFolder, *, clips: int) -> Page:
    """Returns the page of a shots folder, annotated or not."""
    reports = [folder.report(film) for film in folder.films()]
    rows = {report.film: folder.rows(report.film) for report in reports}
    labels = {film: read_labels(folder, film) for film in rows}
    every = [label.to_row() for found in labels.values() for label in found.values()]
    kept = [(film, row) for film in rows for row in rows[film] if row.dropped is None]
    dropped = Counter(row.dropped for found in rows.values() for row in found if row.dropped)
    short = sum(report.short_scenes for report in reports)
    examples = {
        reason: first_dropped(folder, next(r.film for r in reports if reason in r.dropped), reason)
        for reason in dropped
    }
    levels = Counter(motion_level(row.motion_value) for _, row in kept)
    histograms = [
        _histogram("clips of each film", Counter(film for film, _ in kept)),
        _histogram("dropped", {**dropped, **({"scene too short": short} if short else {})}),
        _histogram("motion level by flow (the paper's edges)", levels, by_name=True),
    ]
    for name in (*_ANNOTATED, *_ANNOTATED_NUMBERS):
        counts = Counter(label[name] for label in every)
        histograms.append(_histogram(name, counts, by_name=name in _ANNOTATED_NUMBERS))
    films = folder.skipped_films()
    skipped = [(film.name, film.reason) for film in films]
    skipped += [
        (f"{film}, clip {clip.clip}", clip.reason)
        for film in rows
        for clip in read_unannotated(folder, film)
    ]
    minutes = sum(report.seconds for report in reports) / 60
    return Page(
        title=folder.path.name,
        note=f"Shots of {len(reports)} films, {minutes:.1f} minutes; {len(kept):,} clips kept, "
        f"{dropped.total():,} dropped, {len(every):,} annotated; {len(films)} films skipped",
        histograms=histograms,
        skipped=skipped,
        examples=list(_examples(examples, dropped)),
        clips=[
            _shot(folder, film, row, labels[film].get(row.clip))
            for film, row in (kept[number] for number in _spread(len(kept), clips))
        ],
        num_clips=len(kept),
    )


def _shot(folder: ShotsFolder, film: str, row: ClipRow, label: Label | None) -> dict[str, Any]:
    mp4 = folder.read_clip(film, row.clip)
    said = label.to_row() if label else {}
    facts = {
        "clip": f"{film}, {row.clip}",
        "seconds": f"{row.start:.2f} to {row.end:.2f}, scene {row.scene}",
        "flow": f"{row.motion_value:.2f} pixels, level {motion_level(row.motion_value)}",
        **{name: str(said[name]) for name in ("adverb", *_ANNOTATED, *_ANNOTATED_NUMBERS) if said},
    }
    frames = decode_mp4(mp4, name=f"{film}, clip {row.clip}", num_frames=1)
    return _clip(frames, row.flow, fps=folder.settings.fps, mp4=mp4, facts=facts)


# Game datasets


def show_games(games: GameDataset, *, clips: int) -> Page:
    """Returns the page of a game dataset; the histograms of a large one count some of the turns."""
    info = games.info
    sources = {split: games.turns(split) for split in info.splits}
    places = [(split, number) for split, count in info.splits.items() for number in range(count)]
    counted = [places[number] for number in _spread(len(places), _MAX_COUNTED)]
    counts: dict[str, Counter[Any]] = {name: Counter() for name in (*_NUMBERS, *_WORDS)}
    for split, number in counted:
        turn = sources[split][number]
        for name, counter in counts.items():
            counter[turn[name] if name in _WORDS else int(turn[name])] += 1
    histograms: list[_Histogram] = [("turns of each split", info.splits)]
    histograms += [_histogram(name, counts[name], by_name=name in _NUMBERS) for name in counts]
    examples: list[dict[str, Any]] = []
    if (card := read_card(games.path)) is not None:  # a dataset that was made from films
        dropped, unused = card["totals"]["clips_dropped"], card["totals"]["clips_unused"]
        histograms += [_histogram("clips dropped", dropped), _histogram("clips unused", unused)]
        examples += _examples(read_examples(games.path, card), dropped)
    some = f"; counts except the splits' are of {len(counted):,} turns, evenly spread"
    edges = ", ".join(f"{edge:g}" for edge in info.motion_edges)
    return Page(
        title=games.path.name,
        note=f"Games of {info.num_frames} frames of {info.height} x {info.width} at {info.fps} "
        f"per second, by `{info.made_by}`; edges of the motion levels: {edges} pixels per frame"
        + some
        * (len(counted) < len(places)),
        histograms=histograms,
        skipped=(),
        examples=examples,
        clips=[
            _turn(sources[split][number], split, games)
            for split, number in (places[index] for index in _spread(len(places), clips))
        ],
        num_clips=len(places),
    )


def _turn(turn: Record, split: str, games: GameDataset) -> dict[str, Any]:
    frames = decode_mp4(turn["clip"], name=f"{games.path}, game {turn['game']}")
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
    return _clip(frames, clip_motion(frames).flow, fps=games.info.fps, mp4=None, facts=facts)


# The page


def make_page(path: epath.PathLike, *, clips: int = 48) -> str:
    """Returns the HTML page of a shots folder or a game dataset.

    Args:
        path: The folder.
        clips: Number of clips to show, evenly spread.

    Raises:
        UserError: It is neither, or a file is damaged.
    """
    if clips < 0:
        raise UserError(f"clips {clips}: expected 0 or more")
    path = absolute(path)
    with user_errors(path, "cannot be read", hint="check the path"):
        is_shots, is_games = ((path / name).exists() for name in (SHOTS_FILE, INFO_FILE))
    if is_shots:
        page = show_shots(open_shots(path), clips=clips)
    elif is_games:
        page = show_games(open_games(path), clips=clips)
    else:
        raise UserError(
            f"{os.fspath(path)}: expected a shots folder ({SHOTS_FILE}) or a game dataset "
            f"({INFO_FILE}), found neither"
        )
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_TEMPLATE.read_text()).render(page=page)


def default_page(path: epath.PathLike) -> epath.Path:
    """Returns the page's file: next to the folder, or in the current folder for a bucket's."""
    path = absolute(path)
    return (absolute(".") if is_bucket(path) else path.parent) / f"{path.name}.html"


def write_page(path: epath.PathLike, out: epath.PathLike, *, clips: int = 48) -> None:
    """Writes the page of a shots folder or a game dataset (`make_page`), also into a bucket.

    Raises:
        UserError: As `make_page`, or the page cannot be written.
    """
    out, page = absolute(out), make_page(path, clips=clips).encode()
    with user_errors(out, "cannot be written", hint="choose another file by --out"):
        if is_bucket(out):
            out.write_bytes(page)
        else:
            write_whole(Path(out), page)
