"""The data card of a game dataset: what is in it, what was dropped and why, how it was made.

`card.json` is for programs, `card.md` for readers; both are next to `set.json`, with a picture of a
dropped clip for each reason.
"""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from animegamer_jax.data.films.annotation.labels import read_failure, read_labels, read_report
from animegamer_jax.data.films.clips.store import ShotsFolder
from animegamer_jax.data.films.games.grouping import FilmGame, game_records
from animegamer_jax.data.films.games.plan import GamesPlan
from animegamer_jax.errors import UserError
from animegamer_jax.progress import Progress, no_progress, track
from animegamer_jax.storage.serialization import read_json, to_json

CARD_JSON, CARD_TEXT = "card.json", "card.md"
_TEMPLATE = Path(__file__).parents[3] / "assets" / "pages" / "card.md.jinja"
_LEVELS = (1, 2, 3, 4, 5)
_COUNTED = (
    "character", "motion_level", "social", "entertainment", "stamina", "motion", "place", "time",
)  # fmt: skip
_LISTED = 100  # of the values that are free text, in card.json
_SHOWN = 20  # of the values, in card.md


@dataclasses.dataclass(frozen=True)
class DroppedClip:
    """A dropped clip: its film, where it starts there, and a small JPEG."""

    film: str
    seconds: float
    picture: bytes


def first_dropped(folder: ShotsFolder, film: str, reason: str) -> DroppedClip:
    """Returns the first clip of a film that was dropped for a reason for which there is one."""
    row = next(row for row in folder.rows(film) if row.dropped == reason)
    return DroppedClip(film, row.start, folder.read_picture(film, row.clip))


def make_card(
    plan: GamesPlan, *, made: Mapping[str, Any], on_progress: Progress = no_progress
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns the card's content and its files by name.

    Args:
        plan: The films and their games.
        made: How the dataset was made: the settings of `films` and `games`, and other values.
        on_progress: Called with what is counted, the number done and the total.
    """
    films: list[dict[str, Any]] = []
    splits: dict[str, Counter[str]] = {}
    lengths, unused = Counter[int](), Counter[str]()
    values: dict[str, Counter[Any]] = {name: Counter() for name in _COUNTED}
    levels = Counter[tuple[int, int]]()  # the model's, the flow's
    examples: dict[str, DroppedClip] = {}
    for film in track(plan.films, on_progress, "films on the card", total=len(plan.films)):
        games = plan.games(film)
        for game in games:
            length = len(game.shots)
            splits.setdefault(plan.split(game), Counter()).update(games=1, turns=length)
            lengths[length] += 1
            records = game_records(game, edges=plan.edges)
            for shot, record in zip(game.shots, records, strict=True):
                for name, counts in values.items():
                    counts[record[name]] += 1
                if shot.label.source == "model":
                    levels[shot.annotation.motion_level, record["motion_level"]] += 1
        entry = _film_entry(plan, film, games)
        films.append(entry)
        unused.update(entry["clips_unused"])
        for reason in set(entry["clips_dropped"]) - set(examples):
            examples[reason] = first_dropped(plan.folder, film, reason)
    dropped = sum((Counter(film["clips_dropped"]) for film in films), Counter[str]())
    skipped = _skipped(plan.folder)

    def total(name: str) -> Any:
        return sum(film[name] for film in films)

    content = {
        "totals": {
            "films": len(films),
            "films_skipped": len(skipped),
            "film_seconds": round(total("seconds"), 3),
            "clips_kept": total("clips_kept"),
            "clips_dropped": dict(sorted(dropped.items())),
            "clips_unused": dict(unused),
            "scenes": total("scenes"),
            "scenes_too_short": total("scenes_too_short"),
            "games": total("games"),
            "turns": total("turns"),
            "turn_seconds": round(total("turns") * plan.folder.settings.clip_seconds, 3),
        },
        "splits": {split: dict(splits[split]) for split in sorted(splits)},
        "turns_of_a_game": {str(length): lengths[length] for length in sorted(lengths)},
        "values": {name: _histogram(counts) for name, counts in values.items()},
        "level_agreement": _agreement(levels),
        "examples_of_dropped": {
            reason: {
                "film": clip.film,
                "seconds": round(clip.seconds, 3),
                "picture": _picture_name(reason),
            }
            for reason, clip in sorted(examples.items())
        },
        "made": to_json(made),
        "films": films,
        "films_skipped": skipped,
    }
    files = {
        CARD_JSON: (json.dumps(content, indent=1) + "\n").encode(),
        CARD_TEXT: _text(content).encode(),
        **{_picture_name(reason): clip.picture for reason, clip in examples.items()},
    }
    return content, files


def _film_entry(plan: GamesPlan, film: str, games: Sequence[FilmGame]) -> dict[str, Any]:
    cut, annotation = plan.folder.report(film), read_report(plan.folder, film)
    assert annotation is not None  # else it would have no games
    labels = read_labels(plan.folder, film)
    turns = sum(len(game.shots) for game in games)
    known = sum(label.annotation.subject in plan.characters.names for label in labels.values())
    unused = {
        "without a valid annotation": annotation.num_unannotated,
        "not annotated": cut.kept - len(labels) - annotation.num_unannotated,
        "about none of the characters": len(labels) - known,
        "in too short a game": known - turns,
    }
    return {
        "film": film,
        "name": cut.name,
        "seconds": round(cut.seconds, 3),
        "source": f"{cut.height} x {cut.width}, {cut.fps:.3f} frames per second",
        "scenes": cut.scenes,
        "scenes_too_short": cut.short_scenes,
        "clips_kept": cut.kept,
        "clips_dropped": dict(sorted(cut.dropped.items())),
        "clips_unused": {reason: number for reason, number in unused.items() if number},
        "games": len(games),
        "turns": turns,
        "annotation": to_json(annotation),
    }


def _skipped(folder: ShotsFolder) -> list[dict[str, str]]:
    """Returns the films that could not be cut or not be annotated, with the reasons."""
    skipped = [to_json(film) for film in folder.skipped_films()]
    for film in folder.films():
        if (reason := read_failure(folder, film)) is not None:
            skipped.append({"film": film, "name": folder.report(film).name, "reason": reason})
    return skipped


def read_card(path: epath.Path) -> dict[str, Any] | None:
    """Returns the content of `card.json` in a dataset's folder; None if there is none.

    Raises:
        UserError: It is damaged.
    """
    if not (path / CARD_JSON).exists():
        return None
    hint = "make the dataset again"
    card = read_json(path / CARD_JSON, dict[str, Any], hint=hint)
    if not {"totals", "examples_of_dropped"} <= set(card):
        raise UserError(f"{path / CARD_JSON}: not a dataset's card: {hint}")
    return card


def read_examples(path: epath.Path, card: Mapping[str, Any]) -> dict[str, DroppedClip]:
    """Returns the dropped clips that the card shows, by reason."""
    return {
        reason: DroppedClip(
            kept["film"], kept["seconds"], (path / Path(kept["picture"]).name).read_bytes()
        )
        for reason, kept in card["examples_of_dropped"].items()
    }


def _picture_name(reason: str) -> str:
    return f"dropped-{reason}.jpg"


def _histogram(counts: Counter[Any]) -> dict[str, Any]:
    """Returns the counts of numbers in order; of texts the most frequent ones, by frequency."""
    texts = any(isinstance(value, str) for value in counts)
    order = sorted(counts, key=lambda value: (-counts[value], value) if texts else value)
    shown = {str(value): counts[value] for value in order[:_LISTED]}
    return {"distinct": len(counts), "counts": shown}


def _agreement(pairs: Mapping[tuple[int, int], int]) -> dict[str, Any] | None:
    """Compares the model's motion levels with the flow's; None if no model was asked."""
    total = sum(pairs.values())
    if not total:
        return None
    gaps = Counter[int]()
    for (predicted, measured), number in pairs.items():
        gaps[abs(predicted - measured)] += number
    return {
        "turns": total,
        "equal": round(gaps[0] / total, 4),
        "within_one": round((gaps[0] + gaps[1]) / total, 4),
        "mean_difference": round(sum(gap * n for gap, n in gaps.items()) / total, 4),
        "by_model_then_flow": [[pairs.get((a, b), 0) for b in _LEVELS] for a in _LEVELS],
    }


def _text(card: Mapping[str, Any]) -> str:
    """Returns `card.md`."""
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["cell"] = _cell
    return environment.from_string(_TEMPLATE.read_text()).render(card, shown=_SHOWN)


def _cell(value: object) -> str:
    """Escapes a value for a table: names of films may contain any character."""
    text = " ".join("".join(s if s.isprintable() else " " for s in str(value)).split())
    return re.sub(r"([\\`*_{}\[\]<>|#!~])", r"\\\1", text)
