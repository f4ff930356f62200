"""A page that shows what is in a shots folder or a games set: `animegamer data show`.

One HTML file without anything beside it: clips with their first frame and flow curve, levels,
states and texts; histograms; what was dropped, and a picture of each kind of it.
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

from animegamer_jax.data.datasets import (
    INFO_FILE,
    GamesSet,
    Record,
    open_games,
)
from animegamer_jax.data.films.clips.store import (
    SHOTS_FILE,
    ClipRow,
    ShotsFolder,
    open_shots,
)
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
from animegamer_jax.storage.paths import (
    absolute,
    is_bucket,
    telling,
)

_TEMPLATE = Path(__file__).parents[2] / "assets" / "pages" / "show.html.jinja"
_MOST_BARS = 16
_MOST_COUNTED = 5_000  # turns of a games set, each read with its clip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Histogram:
    """Counts by name, in the order of drawing."""

    title: str
    counts: Mapping[str, int]

    @property
    def most(self) -> int:
        return max(self.counts.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A dropped clip: `picture` as a data URL, where it was, how many were dropped so."""

    reason: str
    count: int
    where: str
    picture: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShownClip:
    """One clip: `video` and `poster` as data URLs, facts by name.

    `curve` has the flow of each pair of frames as points of an SVG line, 100 wide and 30 high;
    `curve_top` is its highest value in pixels a frame.
    """

    video: str
    poster: str
    curve: str
    curve_top: float
    facts: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """All that the template shows."""

    title: str
    note: str
    histograms: Sequence[Histogram]
    aside: Sequence[tuple[str, str]]
    examples: Sequence[Example]
    clips: Sequence[ShownClip]
    num_clips: int


def _data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _histogram(title: str, counts: Mapping[Any, int], *, by_name: bool = False) -> Histogram | None:
    """The most frequent first, or in the names' order; rare ones together. None: nothing there."""
    pairs = sorted(counts.items(), key=lambda pair: pair[0] if by_name else (-pair[1], pair[0]))
    shown = {str(name): count for name, count in pairs[:_MOST_BARS]}
    if rest := sum(count for _, count in pairs[_MOST_BARS:]):
        shown[f"{len(pairs) - _MOST_BARS} others"] = rest
    return Histogram(title=title, counts=shown) if shown else None


def _curve(flow: Sequence[float]) -> tuple[str, float]:
    top = max(flow, default=0.0)
    across = np.linspace(0, 100, len(flow)) if len(flow) > 1 else np.zeros(len(flow))
    up = 29 - 28 * np.asarray(flow) / (top or 1.0)
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, up, strict=True)), top


def _clip(
    frames: UInt8[np.ndarray, "f h w 3"],
    flow: Sequence[float],
    *,
    fps: int,
    mp4: bytes | None,
    facts: Mapping[str, str],
) -> ShownClip:
    """`mp4`: the clip as browsers play it; None: it is encoded for them."""
    poster = io.BytesIO()
    Image.fromarray(frames[0]).save(poster, "JPEG", quality=85)
    curve, top = _curve(flow)
    return ShownClip(
        video=_data_url("video/mp4", mp4 or encode_mp4(enlarge(frames), fps=fps)),
        poster=_data_url("image/jpeg", poster.getvalue()),
        curve=curve,
        curve_top=top,
        facts=facts,
    )


def _spread(total: int, count: int) -> list[int]:
    """`count` numbers below `total`, evenly spread; all of them where there are fewer."""
    return sorted(set(np.linspace(0, total - 1, min(count, total)).round().astype(int).tolist()))


# Shots folders


def show_shots(folder: ShotsFolder, *, clips: int) -> Page:
    """The page of a shots folder, annotated or not.

    Raises:
        UserError: a film's files are damaged.
    """
    reports = [folder.report(film) for film in folder.films()]
    rows = {report.film: folder.rows(report.film) for report in reports}
    labels = {film: {row["clip"]: row for row in folder.annotations(film)} for film in rows}
    kept = [(film, row) for film in rows for row in rows[film] if row.dropped is None]
    dropped = Counter(row.dropped for found in rows.values() for row in found if row.dropped)
    short = sum(report.short_scenes for report in reports)
    examples = {
        reason: first_dropped(folder, next(r.film for r in reports if reason in r.dropped), reason)
        for reason in dropped
    }
    told = [label for found in labels.values() for label in found.values()]
    histograms = [
        _histogram("clips of each film", Counter(film for film, _ in kept)),
        _histogram("dropped", {**dropped, **({"scene too short": short} if short else {})}),
        _histogram(
            "motion level by flow (the paper's edges)",
            Counter(motion_level(row.motion_value) for _, row in kept),
            by_name=True,
        ),
        *(
            _histogram(name, Counter(label[name] for label in told if name in label), by_name=order)
            for name, order in _ANNOTATED.items()
        ),
    ]
    aside = [(film.name, film.reason) for film in folder.failed()]
    aside += [
        (f"{film}, clip {row['clip']}", str(row.get("reason")))
        for film in rows
        for row in folder.unannotated(film)
    ]
    seconds = sum(report.seconds for report in reports)
    return Page(
        title=folder.path.name,
        note=f"Shots of {len(reports)} films, {seconds / 60:.1f} minutes; {len(kept):,} clips kept,"
        f" {dropped.total():,} dropped, {len(told):,} annotated; {len(folder.failed())} films set "
        "aside",
        histograms=[histogram for histogram in histograms if histogram],
        aside=aside,
        examples=list(_examples(examples, dropped)),
        clips=[_shot(folder, *kept[number], labels) for number in _spread(len(kept), clips)],
        num_clips=len(kept),
    )


_ANNOTATED = {
    "subject": False,
    "motion": False,
    "environment": False,
    "time": False,
    "motion_level": True,
    "social": True,
    "entertainment": True,
    "stamina": True,
}


def _examples(clips: Mapping[str, DroppedClip], counts: Mapping[str, int]) -> Iterator[Example]:
    """The reasons that dropped most first."""
    for reason in sorted(clips, key=lambda reason: -counts[reason]):
        clip = clips[reason]
        where = f"{clip.film}, {clip.seconds:.1f} s"
        url = _data_url("image/jpeg", clip.picture)
        yield Example(reason=reason, count=counts[reason], where=where, picture=url)


def _shot(
    folder: ShotsFolder, film: str, row: ClipRow, labels: Mapping[str, Mapping[int, Any]]
) -> ShownClip:
    mp4 = folder.read_clip(film, row.clip)
    label = labels[film].get(row.clip, {})
    facts = {
        "clip": f"{film}, {row.clip}",
        "seconds": f"{row.start:.2f} to {row.end:.2f}, scene {row.scene}",
        "flow": f"{row.motion_value:.2f} pixels, level {motion_level(row.motion_value)}",
        **{name: str(label[name]) for name in ("adverb", *_ANNOTATED) if name in label},
    }
    frames = decode_mp4(mp4, name=f"{film}, clip {row.clip}", num_frames=1)
    return _clip(frames, row.flow, fps=folder.settings.fps, mp4=mp4, facts=facts)


# Games sets


def show_games(games: GamesSet, *, clips: int) -> Page:
    """The page of a games set; of a large one the histograms are of some of the turns, as it says.

    Raises:
        UserError: a file is damaged.
    """
    info = games.info
    sources = {split: games.turns(split) for split in info.splits}
    places = [(split, number) for split, count in info.splits.items() for number in range(count)]
    counted = [places[number] for number in _spread(len(places), _MOST_COUNTED)]
    counts = _count(sources[split][number] for split, number in counted)
    some = f"; counts but the splits' are of {len(counted):,} turns, evenly spread"
    histograms = [
        Histogram(title="turns of each split", counts=info.splits),
        *(
            _histogram(name, counts[name], by_name=name in _NUMBERS)
            for name in (*_NUMBERS, *_WORDS)
        ),
    ]
    card = read_card(games.path)
    examples: list[Example] = []
    if card is not None:  # a set that was made from films
        dropped, unused = card["totals"]["clips_dropped"], card["totals"]["clips_unused"]
        histograms += [_histogram("clips dropped", dropped), _histogram("clips unused", unused)]
        examples += _examples(read_examples(games.path, card), dropped)
    shown = [places[number] for number in _spread(len(places), clips)]
    return Page(
        title=games.path.name,
        note=f"Games of {info.num_frames} frames of {info.height} x {info.width} at {info.fps} a "
        f"second, by `{info.made_by}`; motion levels end at "
        f"{', '.join(f'{edge:g}' for edge in info.motion_edges)} pixels a frame"
        + (some if len(counted) < len(places) else ""),
        histograms=[histogram for histogram in histograms if histogram],
        aside=(),
        examples=examples,
        clips=[_turn(sources[split][number], split, games) for split, number in shown],
        num_clips=len(places),
    )


_NUMBERS = ("motion_level", "social", "entertainment", "stamina", "is_open", "num_turns")
_WORDS = ("character", "motion", "place", "time", "film")


def _count(turns: Iterator[Record]) -> dict[str, Counter[Any]]:
    counts: dict[str, Counter[Any]] = {name: Counter() for name in (*_NUMBERS, *_WORDS)}
    for turn in turns:
        for name, counter in counts.items():
            counter[turn[name] if name in _WORDS else int(turn[name])] += 1
    return counts


def _turn(turn: Record, split: str, games: GamesSet) -> ShownClip:
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
    """The HTML of a shots folder or a games set.

    Args:
        path: the folder.
        clips: number of clips to show, evenly spread.

    Raises:
        UserError: it is neither, or a file is damaged.
    """
    if clips < 0:
        raise UserError(f"clips {clips}: expected 0 or more")
    path = absolute(path)
    with telling(path, "cannot be read", mend="check the path"):
        is_shots, is_games = ((path / name).exists() for name in (SHOTS_FILE, INFO_FILE))
    if is_shots:
        page = show_shots(open_shots(path), clips=clips)
    elif is_games:
        page = show_games(open_games(path), clips=clips)
    else:
        raise UserError(
            f"{os.fspath(path)}: expected a shots folder ({SHOTS_FILE}) or a games set "
            f"({INFO_FILE}), found neither"
        )
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_TEMPLATE.read_text()).render(page=page)


def default_page(path: epath.PathLike) -> epath.Path:
    """Where the page of a folder is written: beside it; of one in a bucket, in this folder."""
    path = absolute(path)
    return (absolute(".") if is_bucket(path) else path.parent) / f"{path.name}.html"


def write_page(path: epath.PathLike, out: epath.PathLike, *, clips: int = 48) -> None:
    """Writes the page of a shots folder or a games set (`make_page`), here or into a bucket.

    Raises:
        UserError: as `make_page`, or the page cannot be written.
    """
    out, page = absolute(out), make_page(path, clips=clips).encode()
    with telling(out, "cannot be written", mend="choose another file by --out"):
        if is_bucket(out):
            out.write_bytes(page)
        else:
            write_whole(Path(out), page)
