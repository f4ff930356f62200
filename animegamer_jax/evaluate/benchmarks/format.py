"""A benchmark: games as data, in a versioned JSON format (PAPER section 4.1).

The paper's benchmark has 20 characters and games of ten turns, 2,000 turns in all, and was not
released; the format here is our own. A file tells what a player says, what each turn is to show and
what it does to its character. `benchmark_toy`, `benchmark_grammar` and `benchmark_ask` make such
files; `docs/benchmark.md` tells the format field by field, and `benchmark.schema.json` beside the
shipped files is its JSON Schema.

Reading is strict: a file that is half understood would give scores of something else.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.strictjson import (
    fields,
    load,
    one_of,
    refuse_doubles,
    shown,
    some,
    text_line,
    texts,
    whole,
)
from animegamer_jax.protocol import PAPER, STRENGTHS
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import telling

__all__ = [
    "FORMAT_VERSION", "PARTS", "SCHEMA_FILE", "SHIPPED", "Benchmark", "BenchmarkGame",
    "BenchmarkTurn", "Part", "Parts", "StateValues", "ToyTruth", "benchmark_path",
    "check_characters", "compose", "format_benchmark", "parse_benchmark", "read_benchmark",
    "write_benchmark",
]  # fmt: skip

FORMAT_VERSION = 1
"""Of the files that are written and read."""

Part = Literal["character", "adverb", "motion", "time", "place"]
PARTS: tuple[Part, ...] = ("character", "adverb", "motion", "time", "place")
"""What a shot is told by, in the order of the released form."""

SHIPPED = ("toy", "paper")
"""Names of the benchmarks that come with the code."""

_FOLDER = Path(__file__).parents[2] / "assets" / "benchmarks"
SCHEMA_FILE = _FOLDER / "benchmark.schema.json"

_SEEDS = 2**32
_AGAIN = "make it anew with `animegamer evaluate --make`"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateValues:
    """The changes that a benchmark's games can make, of each state; a protocol's or fewer."""

    social: tuple[int, ...] = PAPER.social
    entertainment: tuple[int, ...] = PAPER.entertainment
    stamina: tuple[int, ...] = PAPER.stamina


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What a turn's shot is to show, part by part; None: not known.

    Attributes:
        character: who acts.
        adverb: the manner of the motion.
        motion: what is done, such as "flying on a broom".
        time: of the day.
        place: where it is.
    """

    character: str | None = None
    adverb: str | None = None
    motion: str | None = None
    time: str | None = None
    place: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyTruth:
    """What a turn of the toy world needs beside its parts and level to be drawn again.

    Attributes:
        motion: one of the toy world's.
        partner: who is talked to; None: nobody.
        seed: of the view; None: the one view that games show.
    """

    motion: str
    partner: str | None = None
    seed: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkTurn:
    """One turn: what is said, and what is expected of it.

    Attributes:
        instruction: what the player says.
        parts: what the shot is to show, with what carries on from the turns before.
        omitted: parts that the instruction leaves to the turns before, in the order of `PARTS`.
        motion_level: expected, 1 to 5.
        social, entertainment, stamina: expected changes.
        caption: the shot in a sentence, for CLIP; None: made of the parts.
        motion_text: the motion in full, for T5; None: made of the parts.
        scene: of the toy world's games, else None.
    """

    instruction: str
    parts: Parts
    omitted: tuple[Part, ...] = ()
    motion_level: int
    social: int
    entertainment: int
    stamina: int
    caption: str | None = None
    motion_text: str | None = None
    scene: ToyTruth | None = None

    @property
    def is_open(self) -> bool:
        """Whether something is left to the turns before."""
        return bool(self.omitted)

    @property
    def full_motion(self) -> str | None:
        """`motion_text`, or adverb and motion; None where neither is known."""
        p = self.parts
        return self.motion_text or (p.motion and " ".join(filter(None, (p.adverb, p.motion))))

    @property
    def full_caption(self) -> str:
        """`caption`, or a sentence of the known parts; where none are known, the instruction."""
        p = self.parts
        who = " ".join(filter(None, (p.character, self.full_motion)))
        where = " ".join(filter(None, (p.time, p.place)))
        return self.caption or ", ".join(filter(None, (who, where))) or self.instruction


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkGame:
    """One game.

    Attributes:
        id: unlike every other game's.
        seed: of the noise in play.
        characters: who can be told of, all of the benchmark's.
        turns: in order.
    """

    id: str
    seed: int
    characters: tuple[str, ...]
    turns: tuple[BenchmarkTurn, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Games to play and to score.

    Attributes:
        name: of the benchmark.
        world: whose characters these are: "toy", or a film's name.
        made_by: how the games were made.
        num_turns: of every game.
        states: changes that turns can expect.
        characters: of all games.
        games: in order.
    """

    name: str
    world: str
    made_by: str
    num_turns: int
    states: StateValues
    characters: tuple[str, ...]
    games: tuple[BenchmarkGame, ...]


def compose(parts: Parts, *, omitted: Sequence[Part] = ()) -> str:
    """An instruction in the released form, without the omitted and the unknown parts.

    `Character: Qiqi; Motion: quickly flying on broomstick; Background: day sky.` (PAPER figure 1);
    empty where nothing is told.
    """
    groups: dict[str, tuple[Part, ...]] = {
        "Character": ("character",),
        "Motion": ("adverb", "motion"),
        "Background": ("time", "place"),
    }
    said = {
        label: " ".join(getattr(parts, n) for n in names if getattr(parts, n) and n not in omitted)
        for label, names in groups.items()
    }
    told = "; ".join(f"{label}: {text}" for label, text in said.items() if text)
    return f"{told}." if told else ""


def benchmark_path(name: str) -> Path:
    """A shipped benchmark's file by its name (`SHIPPED`); any other text is a path."""
    return _FOLDER / f"{name}.json" if name in SHIPPED else Path(name).expanduser()


def check_characters(benchmark: Benchmark, known: Iterable[str], *, model: str) -> None:
    """Makes sure that a model's world has all characters of a benchmark.

    Args:
        benchmark: whose characters are looked for, in any case.
        known: that the model's world has.
        model: its name, for the message.

    Raises:
        UserError: names those that it lacks.
    """
    has = {name.casefold() for name in known}
    if lacking := [name for name in benchmark.characters if name.casefold() not in has]:
        listed = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if lacking[5:] else "")
        raise UserError(
            f"benchmark {benchmark.name}: characters that {model} does not know: {listed}: use a "
            "benchmark of its world, or make one of its characters with --make"
        )


# Writing


def format_benchmark(benchmark: Benchmark) -> str:
    """The file's text: a line of what holds for all games, then a game a line."""
    head = {"format_version": FORMAT_VERSION, **_filled(benchmark)}
    games = ",\n".join(_dump(game) for game in head.pop("games"))
    return f'{_dump(head)[:-1]},"games":[\n{games}\n]}}\n'


def write_benchmark(path: str | Path, benchmark: Benchmark) -> None:
    """Writes a file that `read_benchmark` reads back equal.

    Raises:
        UserError: the benchmark is none that the reader takes, or the disk refuses.
    """
    text = format_benchmark(benchmark)
    parse_benchmark(text, where=str(path))
    with telling(path, "cannot be written", mend="choose another place"):
        write_whole(Path(path), text.encode())


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _filled(value: Any) -> Any:
    """Dataclasses as objects without what is None or empty; turns are numbered."""
    if dataclasses.is_dataclass(value):
        pairs = {f.name: _filled(getattr(value, f.name)) for f in dataclasses.fields(value)}
        kept = {k: v for k, v in pairs.items() if v is not None and (k != "omitted" or v)}
        if isinstance(value, BenchmarkGame):
            kept["turns"] = [{"turn": n, **turn} for n, turn in enumerate(kept["turns"], start=1)]
        return kept
    if isinstance(value, tuple):
        return [_filled(item) for item in value]
    return value


# Reading


def read_benchmark(path: str | Path) -> Benchmark:
    """Reads a benchmark.

    Args:
        path: of the file, or the name of a shipped one: "toy", "paper".

    Raises:
        UserError: in one line: file, game, turn and field, what was expected and what was found.
    """
    file = benchmark_path(str(path))
    with telling(file, "cannot be read", mend=f"give a file, or one of {', '.join(SHIPPED)}"):
        content = file.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: expected UTF-8 text, found byte 0x{content[error.start]:02x} at offset "
            f"{error.start}: save it as UTF-8"
        ) from None
    return parse_benchmark(text, where=str(file))


def parse_benchmark(text: str, *, where: str) -> Benchmark:
    """Reads a benchmark's text; `where` is its name in messages.

    Raises:
        UserError: as `read_benchmark`.
    """
    try:
        content = load(text)
    except ValueError as error:
        raise UserError(f"{where}: no JSON ({error}): {_AGAIN}") from None
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected a JSON object, found {shown(content)}: {_AGAIN}")
    version = content.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        found = shown(version) if "format_version" in content else "none"
        raise UserError(
            f"{where}: format_version: expected {FORMAT_VERSION}, found {found}: {_AGAIN}"
        )
    found = fields(content, where, ("format_version", *_names(Benchmark)))
    del found["format_version"]
    found |= {
        name: text_line(found[name], f"{where}: {name}") for name in ("name", "world", "made_by")
    }
    found["num_turns"] = whole(found["num_turns"], f"{where}: num_turns", low=1)
    found["states"] = states = _state_values(found["states"], f"{where}: states")
    found["characters"] = cast_of = texts(found["characters"], f"{where}: characters")
    games = some(found["games"], f"{where}: games")
    found["games"] = tuple(
        _game(game, f"{where}: game", n, characters=cast_of, states=states, turns=content)
        for n, game in enumerate(games, start=1)
    )
    refuse_doubles([game.id for game in found["games"]], f"{where}: game", "id")
    return Benchmark(**found)


def _game(
    value: Any,
    where: str,
    number: int,
    *,
    characters: tuple[str, ...],
    states: StateValues,
    turns: dict[str, Any],
) -> BenchmarkGame:
    told = value.get("id") if isinstance(value, dict) else None
    name = told if isinstance(told, str) and told.isprintable() and told else f"number {number}"
    where = f"{where} {name[:60]}"
    found = fields(value, where, _names(BenchmarkGame))
    found["id"] = text_line(found["id"], f"{where}: id")
    found["seed"] = whole(found["seed"], f"{where}: seed", low=0, below=_SEEDS)
    found["characters"] = here = texts(found["characters"], f"{where}: characters")
    for character in here:
        one_of(character, characters, f"{where}: characters", "a character of the benchmark")
    found["turns"] = _turns(
        found["turns"], where, count=turns["num_turns"], characters=here, states=states
    )
    return BenchmarkGame(**found)


def _turns(
    value: Any, where: str, *, count: int, characters: tuple[str, ...], states: StateValues
) -> tuple[BenchmarkTurn, ...]:
    """All turns, of which none is missing; each is read with the one before."""
    rows = some(value, f"{where}: turns")
    found: list[BenchmarkTurn] = []
    for number in range(1, max(count, len(rows)) + 1):
        at = f"{where}: turn {number}"
        if number > count:
            raise UserError(f"{at}: expected {count} turns (num_turns), found {len(rows)}")
        if number > len(rows):
            raise UserError(f"{at}: missing: expected {count} turns, found {len(rows)}")
        row = rows[number - 1]
        if not isinstance(row, dict):
            raise UserError(f"{at}: expected an object, found {shown(row)}")
        if type(row.get("turn")) is not int or row["turn"] != number:
            told = f"turn {shown(row['turn'])}" if "turn" in row else "one without a number"
            raise UserError(f"{at}: missing: in its place (field turn), found {told}")
        before = found[-1] if found else None
        found.append(_turn(row, at, before=before, characters=characters, states=states))
    return tuple(found)


def _turn(
    row: dict[str, Any],
    where: str,
    *,
    before: BenchmarkTurn | None,
    characters: tuple[str, ...],
    states: StateValues,
) -> BenchmarkTurn:
    free = ("omitted", "caption", "motion_text", "scene")
    names = [name for name in _names(BenchmarkTurn) if name not in free]
    found = fields(row, where, ("turn", *names), free)
    del found["turn"]
    for name in ("instruction", "caption", "motion_text"):
        if name in found:
            found[name] = text_line(found[name], f"{where}: {name}")
    allowed = {"motion_level": PAPER.motion_levels, **dataclasses.asdict(states)}
    for name, values in allowed.items():
        found[name] = one_of(found[name], values, f"{where}: {name}")
    found["parts"] = parts = _parts(found["parts"], f"{where}: parts")
    if parts.character is not None:
        what = "a character of the game"
        one_of(parts.character, characters, f"{where}: parts: character", what)
    found["omitted"] = omitted = _omitted(found.get("omitted", []), f"{where}: omitted")
    if omitted and before is None:
        raise UserError(
            f"{where}: omitted: expected none in a first turn, which has no turn before, found "
            f"{', '.join(omitted)}"
        )
    for name in omitted:
        now, then = getattr(parts, name), getattr(before and before.parts, name)
        if now is not None and then is not None and now != then:
            raise UserError(
                f"{where}: parts: {name}: expected {then!a} as in the turn before, because the "
                f"instruction omits it, found {now!a}"
            )
    if "scene" in found:
        found["scene"] = _scene(found["scene"], f"{where}: scene")
    return BenchmarkTurn(**found)


def _parts(value: Any, where: str) -> Parts:
    found = fields(value, where, (), PARTS)
    return Parts(**{name: text_line(text, f"{where}: {name}") for name, text in found.items()})


def _omitted(value: Any, where: str) -> tuple[Part, ...]:
    rows = some(value, where, empty=True)
    for part in rows:
        one_of(part, PARTS, where)
    refuse_doubles(rows, where, "part")
    return tuple(part for part in PARTS if part in rows)


def _scene(value: Any, where: str) -> ToyTruth:
    found = fields(value, where, ("motion",), ("partner", "seed"))
    for name in ("motion", "partner"):
        if name in found:
            found[name] = text_line(found[name], f"{where}: {name}")
    if "seed" in found:
        found["seed"] = whole(found["seed"], f"{where}: seed", low=0, below=_SEEDS)
    return ToyTruth(**found)


def _state_values(value: Any, where: str) -> StateValues:
    found = fields(value, where, _names(StateValues))
    for name, values in found.items():
        at = f"{where}: {name}"
        for change in some(values, at):
            one_of(change, tuple(STRENGTHS), at)
        if sorted(set(values)) != values:
            raise UserError(f"{at}: expected rising numbers, each once, found {shown(values)}")
        found[name] = tuple(values)
    return StateValues(**found)


def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
