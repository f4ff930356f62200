"""Tiny shots folders for tests: the brightness of a clip identifies it."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from animegamer_jax.data.characters import Character, Characters
from animegamer_jax.data.films.annotation.labels import (
    Annotation,
    FilmAnnotation,
    Label,
    Unannotated,
    clips_digest,
    save_characters,
    write_labels,
)
from animegamer_jax.data.films.clips.store import (
    ClipRow,
    FilmReport,
    FilmSettings,
    ShotsFolder,
    open_shots,
)
from animegamer_jax.media.video import encode_mp4

SETTINGS = FilmSettings(height=16, width=24, num_frames=5)
SECONDS = 0.625  # of a clip
CHARACTERS = Characters(
    (
        Character(name="Mika", aliases=("Mika the cat",), images=("a" * 64,)),
        Character(name="Ren", aliases=(), images=("b" * 64,)),
    )
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Take:
    """One candidate clip: its time, and whether it is kept."""

    scene: int = 0
    start: float | None = None  # None: after the clip before
    dropped: str | None = None
    value: float = 2.0


def brightness(film: int, clip: int) -> int:
    return (10 + 60 * film + 6 * clip) % 256


def make_shots(
    path: Path,
    films: Sequence[Sequence[Take]],
    *,
    picture: bytes = b"a picture",
    clips: Sequence[bytes] = (),
) -> ShotsFolder:
    """A folder of films `film-0000000n`; `picture` is that of each dropped clip.

    The kept clips are `clips`, in turn, where there are some.
    """
    folder = open_shots(path, SETTINGS)
    for number, takes in enumerate(films):
        write_film(folder, number, takes, picture=picture, clips=clips)
    return folder


def film_name(number: int) -> str:
    return f"film-{number:08x}"


def write_film(
    folder: ShotsFolder,
    number: int,
    takes: Sequence[Take],
    *,
    picture: bytes = b"a picture",
    clips: Sequence[bytes] = (),
) -> None:
    film = film_name(number)
    dropped: dict[str, int] = {}
    with folder.writing(film) as writer:
        end = 0.0
        for clip, take in enumerate(takes):
            start = end if take.start is None else take.start
            end = start + SECONDS
            row = ClipRow(
                clip=clip,
                scene=take.scene,
                start=start,
                end=end,
                dropped=take.dropped,
                motion_value=take.value,
                flow=(take.value,) * 4,
                digest="",
            )
            if take.dropped:
                dropped[take.dropped] = dropped.get(take.dropped, 0) + 1
                writer.add(row, picture)
                continue
            if clips:
                writer.add(row, clips[clip % len(clips)])
                continue
            frames = np.full((5, 16, 24, 3), brightness(number, clip), np.uint8)
            frames[:, :4, :4] += np.uint8(20 * number)  # no film shows a clip of another one
            writer.add(row, encode_mp4(frames))
        writer.report = FilmReport(
            film=film,
            name=f"Film {number}.mp4",
            seconds=end,
            missing=0.0,
            fps=24.0,
            height=32,
            width=48,
            bars=(0, 0, 0, 0),
            cuts=(),
            scenes=len({take.scene for take in takes}),
            short_scenes=1,
            kept=len(takes) - sum(dropped.values()),
            dropped=dropped,
        )


def says_of(clip: int = 0, **changes: object) -> dict[str, object]:
    """A valid answer about a clip."""
    answer = {
        "subject": "Mika" if clip % 2 == 0 else "Ren",
        "motion": f"riding a bicycle {clip}",
        "adverb": "slowly",
        "motion_level": 1 + clip % 5,
        "environment": "harbour",
        "time": "day",
        "social": clip % 2,
        "entertainment": 1,
        "stamina": -1,
    }
    return answer | changes


def label(clip: int, *, source: str = "model", **changes: object) -> Label:
    return Label(clip, Annotation.model_validate(says_of(clip, **changes)), source)


def annotate(
    folder: ShotsFolder,
    number: int,
    labels: Sequence[Label],
    *,
    characters: Characters = CHARACTERS,
    aside: Sequence[int] = (),
) -> None:
    """Writes annotations as the command does."""
    save_characters(folder, characters)
    film = film_name(number)
    num_manual = sum(one.source == "manual" for one in labels)
    report = FilmAnnotation(
        film=film,
        characters=characters.digest,
        clips=clips_digest(folder.rows(film)),
        model="a test" if num_manual < len(labels) else None,
        num_model=len(labels) - num_manual,
        num_manual=num_manual,
        num_unannotated=len(aside),
    )
    unannotated = [Unannotated(clip=clip, reason="a test", answer=None) for clip in aside]
    write_labels(folder, report, labels, unannotated=unannotated)


def write_characters(folder: Path) -> Path:
    """Two characters with a picture each."""
    for name, colour in (("mika", (200, 30, 30)), ("ren", (30, 30, 200))):
        Image.new("RGB", (40, 60), colour).save(folder / f"{name}.png")
    (folder / "characters.toml").write_text(
        '[[character]]\nname = "Mika"\naliases = ["Mika the cat"]\nimages = ["mika.png"]\n'
        '[[character]]\nname = "Ren"\nimages = ["ren.png"]\n'
    )
    return folder / "characters.toml"


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def annotations_of(folder: ShotsFolder, film: str) -> list[dict[str, object]]:
    return lines_of(Path(folder.folder(film)) / "annotations.jsonl")


def damage_clip(folder: ShotsFolder, film: str) -> None:
    """Spoils the first clip of a film."""
    archive = folder.folder(film) / "clips.zip"
    content = bytearray(archive.read_bytes())
    place = content.index(b"mdat") + 20
    content[place : place + 4] = b"\0\1\2\3"
    archive.write_bytes(content)
