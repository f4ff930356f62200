"""The data card of a games set: what is in it, what was left out and why, and how it was made.

`card.json` is for programs, `card.md` for readers; both lie beside `set.json`, with a picture of a
dropped clip of each kind.
"""

import collections
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from animegamer_jax.bundle.config import to_json
from animegamer_jax.data.characters import Characters
from animegamer_jax.data.datasets import Record
from animegamer_jax.data.films.annotation.labels import FilmAnnotation, Label, read_failure
from animegamer_jax.data.films.clips.store import FilmReport, ShotsFolder
from animegamer_jax.data.films.games.grouping import FilmGame
from animegamer_jax.errors import UserError

CARD_JSON, CARD_TEXT = "card.json", "card.md"
_LEVELS = (1, 2, 3, 4, 5)
_COUNTED = (
    "character", "motion_level", "social", "entertainment", "stamina", "motion", "place", "time",
)  # fmt: skip
_LISTED = 100  # of the values that are free texts
_SHOWN = 20
_CREDITS = "Credits: name here the films' makers and the licence that allows their use."


@dataclasses.dataclass(frozen=True)
class DroppedClip:
    """One of the clips that were dropped for a reason: where it was, a small JPEG of it."""

    film: str
    seconds: float
    picture: bytes


def first_dropped(folder: ShotsFolder, film: str, reason: str) -> DroppedClip:
    """The first clip of a film that was dropped for a reason for which there is one."""
    row = next(row for row in folder.rows(film) if row.dropped == reason)
    return DroppedClip(film, row.start, folder.read_picture(film, row.clip))


def films_set_aside(folder: ShotsFolder) -> list[dict[str, str]]:
    """What the card tells of each film that could not be cut, or not be annotated."""
    aside = [{"film": f.film, "name": f.name, "reason": f.reason} for f in folder.failed()]
    for film in folder.films():
        if (reason := read_failure(folder, film)) is not None:
            aside.append({"film": film, "name": folder.report(film).name, "reason": reason})
    return aside


@dataclasses.dataclass
class Tally:
    """Counts over films and games, filled film by film.

    Attributes:
        characters: the characters.
        aside: films that could not be used (`films_set_aside`).
        films: what the card tells of each film.
        games, turns: number of each, by split.
        lengths: number of games by their turns.
        values: for each field of `_COUNTED`, number of turns by value.
        agreement: turns by the model's motion level and the flow's.
        unused: kept clips that are no turn, by reason.
        examples: the first dropped clip, by reason.
    """

    characters: Characters
    aside: list[dict[str, str]] = dataclasses.field(default_factory=list)
    films: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    games: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    turns: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    lengths: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    values: dict[str, collections.Counter[Any]] = dataclasses.field(
        default_factory=lambda: {name: collections.Counter() for name in _COUNTED}
    )
    agreement: collections.Counter[tuple[int, int]] = dataclasses.field(
        default_factory=collections.Counter
    )
    unused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    examples: dict[str, DroppedClip] = dataclasses.field(default_factory=dict)

    def add_game(self, split: str, game: FilmGame, records: Sequence[Record]) -> None:
        """Counts one game and its turns."""
        self.games[split] += 1
        self.turns[split] += len(records)
        self.lengths[len(records)] += 1
        for shot, record in zip(game.shots, records, strict=True):
            for name, counts in self.values.items():
                counts[record[name]] += 1
            if shot.label.source == "model":
                self.agreement[shot.annotation.motion_level, record["motion_level"]] += 1

    def add_film(
        self,
        report: FilmReport,
        annotation: FilmAnnotation,
        labels: Mapping[int, Label],
        games: Sequence[FilmGame],
    ) -> None:
        """Counts one film, whose games were counted before."""
        turns = sum(len(game.shots) for game in games)
        known = sum(label.annotation.subject in self.characters.names for label in labels.values())
        unused = {
            "without a valid annotation": annotation.num_unannotated,
            "not annotated": report.kept - len(labels) - annotation.num_unannotated,
            "about none of the characters": len(labels) - known,
            "in too short a game": known - turns,
        }
        self.unused.update(unused)
        self.films.append(
            {
                "film": report.film,
                "name": report.name,
                "seconds": round(report.seconds, 3),
                "source": f"{report.height} x {report.width}, {report.fps:.3f} frames a second",
                "scenes": report.scenes,
                "scenes_too_short": report.short_scenes,
                "clips_kept": report.kept,
                "clips_dropped": dict(sorted(report.dropped.items())),
                "clips_unused": {name: number for name, number in unused.items() if number},
                "games": len(games),
                "turns": turns,
                "annotation": to_json(annotation),
            }
        )


def card_files(tally: Tally, *, made: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of the card.

    Args:
        tally: the counts.
        made: `films` and `games`, the settings of these steps, and what else decides.
    """
    content = _content(tally, made=made)
    text = "\n".join(_text(content)) + "\n"
    return {
        CARD_JSON: (json.dumps(content, indent=1) + "\n").encode(),
        CARD_TEXT: text.encode(errors="replace"),  # a file's name may hold anything
        **{_picture_name(reason): clip.picture for reason, clip in tally.examples.items()},
    }


def read_card(path: epath.Path) -> dict[str, Any] | None:
    """What `card.json` in a set's folder says; None: the set has no card.

    Raises:
        UserError: it is damaged.
    """
    if not (path / CARD_JSON).exists():
        return None
    damaged = UserError(f"{path / CARD_JSON}: damaged: make the set again")
    try:
        card = json.loads((path / CARD_JSON).read_text())
    except ValueError as error:
        raise damaged from error
    if not isinstance(card, dict) or not {"totals", "examples_of_dropped"} <= set(card):
        raise damaged
    return card


def read_examples(path: epath.Path, card: Mapping[str, Any]) -> dict[str, DroppedClip]:
    """The dropped clips that lie beside a card, by reason."""
    return {
        reason: DroppedClip(
            kept["film"], kept["seconds"], (path / Path(kept["picture"]).name).read_bytes()
        )
        for reason, kept in card["examples_of_dropped"].items()
    }


def _picture_name(reason: str) -> str:
    return f"dropped-{reason}.jpg"


def _content(tally: Tally, *, made: Mapping[str, Any]) -> dict[str, Any]:
    clips = to_json(made)["films"]
    turns = sum(tally.turns.values())
    dropped = collections.Counter[str]()
    for film in tally.films:
        dropped.update(film["clips_dropped"])
    return {
        "totals": {
            "films": len(tally.films),
            "films_set_aside": len(tally.aside),
            "film_seconds": round(sum(film["seconds"] for film in tally.films), 3),
            "clips_kept": sum(film["clips_kept"] for film in tally.films),
            "clips_dropped": dict(sorted(dropped.items())),
            "clips_unused": {name: count for name, count in tally.unused.items() if count},
            "scenes": sum(film["scenes"] for film in tally.films),
            "scenes_too_short": sum(film["scenes_too_short"] for film in tally.films),
            "games": sum(tally.games.values()),
            "turns": turns,
            "turn_seconds": round(turns * clips["num_frames"] / clips["fps"], 3),
        },
        "splits": {
            split: {"games": tally.games[split], "turns": tally.turns[split]}
            for split in sorted(tally.games)
        },
        "turns_of_a_game": {str(length): tally.lengths[length] for length in sorted(tally.lengths)},
        "values": {name: _histogram(counts) for name, counts in tally.values.items()},
        "level_agreement": _agreement(tally.agreement),
        "examples_of_dropped": {
            reason: {
                "film": clip.film,
                "seconds": round(clip.seconds, 3),
                "picture": _picture_name(reason),
            }
            for reason, clip in sorted(tally.examples.items())
        },
        "made": to_json(made),
        "films": tally.films,
        "films_set_aside": tally.aside,
    }


def _histogram(counts: collections.Counter[Any]) -> dict[str, Any]:
    """Numbers in their order; texts by frequency, the rarest of many left out."""
    texts = any(isinstance(value, str) for value in counts)
    order = sorted(counts, key=lambda value: (-counts[value], value) if texts else value)
    shown = {str(value): counts[value] for value in order[:_LISTED]}
    return {"distinct": len(counts), "counts": shown}


def _agreement(pairs: Mapping[tuple[int, int], int]) -> dict[str, Any] | None:
    """How the model's motion level compares with the flow's; None: no model was asked."""
    total = sum(pairs.values())
    if not total:
        return None
    gaps = collections.Counter[int]()
    for (said, measured), number in pairs.items():
        gaps[abs(said - measured)] += number
    return {
        "turns": total,
        "equal": round(gaps[0] / total, 4),
        "within_one": round((gaps[0] + gaps[1]) / total, 4),
        "mean_difference": round(sum(gap * n for gap, n in gaps.items()) / total, 4),
        "by_model_then_flow": [[pairs.get((a, b), 0) for b in _LEVELS] for a in _LEVELS],
    }


# For readers


def _text(card: Mapping[str, Any]) -> list[str]:
    total, made = card["totals"], card["made"]
    minutes, shown = total["film_seconds"] / 60, total["turn_seconds"] / 60
    lines = ["# Data card", "", _CREDITS, ""]
    lines += [
        f"{total['games']} games of {total['turns']} turns ({shown:.1f} minutes of clips) from "
        f"{total['films']} film{'s' * (total['films'] != 1)} ({minutes:.1f} minutes).",
        "",
    ]
    splits = [(name, row["games"], row["turns"]) for name, row in card["splits"].items()]
    lines += _table(("split", "games", "turns"), splits)
    lines += ["## Films", ""]
    lines += _table(
        ("film", "file", "minutes", "kept", "dropped", "games", "turns", "annotations"),
        [_film_cells(film) for film in card["films"]],
    )
    if card["films_set_aside"]:
        lines += ["## Films that could not be used", ""]
        aside = [(film["name"], film["reason"]) for film in card["films_set_aside"]]
        lines += _table(("file", "why"), aside)
    lines += ["## Clips that are not in the set", ""]
    left = [(name, number) for name, number in total["clips_dropped"].items()]
    left += total["clips_unused"].items()
    left += [("scenes too short for a clip", total["scenes_too_short"])]
    lines += _table(("why", "number"), left)
    lines += ["## Turns of a game", ""]
    lines += _table(("turns", "games"), card["turns_of_a_game"].items())
    for name, histogram in card["values"].items():
        lines += [f"## {name.replace('_', ' ').capitalize()}", ""]
        if (rest := histogram["distinct"] - _SHOWN) > 0:
            lines += [f"The {_SHOWN} most frequent; {rest} more.", ""]
        lines += _table((name, "turns"), list(histogram["counts"].items())[:_SHOWN])
    lines += _agreement_text(card["level_agreement"])
    lines += ["## How it was made", ""]
    rows = [(step, key, value) for step in ("films", "games") for key, value in made[step].items()]
    rows += [("games", key, made[key]) for key in made if key not in ("films", "games")]
    return [*lines, *_table(("step", "setting", "value"), rows)]


def _film_cells(film: Mapping[str, Any]) -> tuple[object, ...]:
    annotation = film["annotation"]
    by = [annotation["model"]] if annotation["num_model"] else []
    by += ["manual"] if annotation["num_manual"] else []
    return (
        film["film"],
        film["name"],
        f"{film['seconds'] / 60:.1f}",
        film["clips_kept"],
        sum(film["clips_dropped"].values()),
        film["games"],
        film["turns"],
        ", ".join(by) or "none",
    )


def _agreement_text(agreement: Mapping[str, Any] | None) -> list[str]:
    lines = ["## The model's motion level beside the optical flow's", ""]
    if agreement is None:
        return [*lines, "No model was asked.", ""]
    lines += [
        f"Equal in {agreement['equal']:.1%} of {agreement['turns']} turns, at most one apart in "
        f"{agreement['within_one']:.1%}; mean difference {agreement['mean_difference']:.2f}. The "
        "set's levels are the flow's.",
        "",
    ]
    rows = [
        (f"model {level}", *row)
        for level, row in zip(_LEVELS, agreement["by_model_then_flow"], strict=True)
    ]
    return lines + _table(("", *(f"flow {level}" for level in _LEVELS)), rows)


def _table(head: Sequence[str], rows: Any) -> list[str]:
    bars = [head, ["---"] * len(head), *([_cell(cell) for cell in row] for row in rows)]
    return [*(f"| {' | '.join(cells)} |" for cells in bars), ""]


def _cell(value: object) -> str:
    """A value as it may stand in a table: films' names can hold any sign."""
    text = " ".join("".join(s if s.isprintable() else " " for s in str(value)).split())
    return re.sub(r"([\\`*_{}\[\]<>|#!~])", r"\\\1", text)
