"""A benchmark: games as data, in a versioned JSON format (PAPER section 4.1).

The paper's benchmark has 20 characters and games of ten turns, 2,000 turns in all, and was not
released; this format is not the paper's. A file has what a player says, what each turn should show
and what it does to the character. `paper`, `llm_writer` and a drawn world (`evaluate.worlds`) make
such files; `docs/benchmark.md` describes the format field by field, and `benchmark.schema.json` in
the folder of the shipped files is its JSON Schema.

Reading is strict, because a file that is half understood would give wrong scores.
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
    "FORMAT_VERSION",
    "PARTS",
    "SCHEMA_FILE",
    "SHIPPED",
    "Benchmark",
    "BenchmarkGame",
    "BenchmarkTurn",
    "Part",
    "Parts",
    "SceneTruth",
    "StateValues",
    "benchmark_path",
    "check_characters",
    "compose",
    "format_benchmark",
    "parse_benchmark",
    "read_benchmark",
    "write_benchmark",
]  # fmt: skip

FORMAT_VERSION = 1
"""Version of the files that are written and read."""

Part = Literal["character", "adverb", "motion", "time", "place"]
PARTS: tuple[Part, ...] = ("character", "adverb", "motion", "time", "place")
"""Parts of an instruction, in the order of the released form."""

SHIPPED = ("toy", "paper")
"""Names of the shipped benchmarks."""

_FOLDER = Path(__file__).parents[2] / "assets" / "benchmarks"
SCHEMA_FILE = _FOLDER / "benchmark.schema.json"

_SEEDS = 2**32
_AGAIN = "write it again with `animegamer evaluate --make`"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateValues:
    """Changes of each state that a benchmark's games can expect."""

    social: tuple[int, ...] = PAPER.social
    entertainment: tuple[int, ...] = PAPER.entertainment
    stamina: tuple[int, ...] = PAPER.stamina


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What a turn's shot should show; None: unknown.

    Attributes:
        character: Character who acts.
        adverb: Manner of the motion.
        motion: Motion, such as "flying on a broom".
        time: Time of day.
        place: Place.
    """

    character: str | None = None
    adverb: str | None = None
    motion: str | None = None
    time: str | None = None
    place: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SceneTruth:
    """What a world needs, besides parts and level, to draw a turn's true clip.

    Attributes:
        motion: Kind of motion, by the world's name for it.
        partner: Character who is talked to; None: nobody.
        seed: Seed of the view; None: the view that games show.
    """

    motion: str
    partner: str | None = None
    seed: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkTurn:
    """One turn: an instruction and what it should lead to.

    Attributes:
        instruction: What the player says.
        parts: What the shot should show, including what stays as in the turns before.
        omitted: Parts that the instruction leaves to the turns before, in the order of `PARTS`.
        motion_level: Expected motion level, 1 to 5.
        social, entertainment, stamina: Expected changes.
        caption: The shot in a sentence, for CLIP; None: composed of the parts.
        motion_text: The motion in full, for T5; None: composed of the parts.
        scene: What draws the true clip; None: the world cannot be drawn.
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
    scene: SceneTruth | None = None

    @property
    def is_open(self) -> bool:
        """Whether the instruction leaves something to the turns before."""
        return bool(self.omitted)

    @property
    def full_motion(self) -> str | None:
        """`motion_text`, or adverb and motion; None if neither is known."""
        p = self.parts
        return self.motion_text or (p.motion and " ".join(filter(None, (p.adverb, p.motion))))

    @property
    def full_caption(self) -> str:
        """`caption`, or a sentence of the known parts, or the instruction."""
        p = self.parts
        who = " ".join(filter(None, (p.character, self.full_motion)))
        where = " ".join(filter(None, (p.time, p.place)))
        return self.caption or ", ".join(filter(None, (who, where))) or self.instruction


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkGame:
    """One game.

    Attributes:
        id: Name, different from every other game's.
        seed: Seed of the noise in play.
        characters: Characters that can occur in it.
        turns: The turns, in order.
    """

    id: str
    seed: int
    characters: tuple[str, ...]
    turns: tuple[BenchmarkTurn, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Games to play and to score.

    Attributes:
        name: Name of the benchmark.
        world: World of the characters: "toy", or a film's name.
        made_by: How the games were made.
        num_turns: Number of turns of every game.
        states: Changes that turns can expect.
        characters: Characters of all games.
        games: The games, in order.
    """

    name: str
    world: str
    made_by: str
    num_turns: int
    states: StateValues
    characters: tuple[str, ...]
    games: tuple[BenchmarkGame, ...]


def compose(parts: Parts, *, omitted: Sequence[Part] = ()) -> str:
    """Composes an instruction in the released form, without the omitted and the unknown parts.

    For example `Character: Qiqi; Motion: quickly flying on broomstick; Background: day sky.` (PAPER
    figure 1); empty if no part is left.
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
    text = "; ".join(f"{label}: {words}" for label, words in said.items() if words)
    return f"{text}." if text else ""


def benchmark_path(name: str) -> Path:
    """Returns the file of a shipped benchmark (`SHIPPED`), or any other text as a path."""
    return _FOLDER / f"{name}.json" if name in SHIPPED else Path(name).expanduser()


def check_characters(benchmark: Benchmark, known: Iterable[str], *, model: str) -> None:
    """Checks that a model knows all characters of a benchmark.

    Args:
        benchmark: The benchmark; upper and lower case do not matter.
        known: Characters that the model knows.
        model: Name of the model, for the message.

    Raises:
        UserError: characters are missing; names them.
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
    """Returns the file's text: a line for all games, then a line per game."""
    head = {"format_version": FORMAT_VERSION, **_filled(benchmark)}
    games = ",\n".join(_dump(game) for game in head.pop("games"))
    return f'{_dump(head)[:-1]},"games":[\n{games}\n]}}\n'


def write_benchmark(path: str | Path, benchmark: Benchmark) -> None:
    """Writes a benchmark for `read_benchmark`.

    Raises:
        UserError: the benchmark is not valid, or the file cannot be written.
    """
    text = format_benchmark(benchmark)
    parse_benchmark(text, where=str(path))
    with telling(path, "cannot be written", mend="choose another place"):
        write_whole(Path(path), text.encode())


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _filled(value: Any) -> Any:
    """Converts dataclasses to objects without empty fields, and numbers the turns."""
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
        path: Path of the file, or the name of a shipped benchmark: "toy", "paper".

    Raises:
        UserError: the file is missing or not valid; names game, turn and field, what was expected
            and what was found.
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
    """Reads a benchmark's text; `where` names it in messages.

    Raises:
        UserError: it is not valid, as in `read_benchmark`.
    """
    try:
        content = load(text)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error}): {_AGAIN}") from None
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
    name = value.get("id") if isinstance(value, dict) else None
    if not (isinstance(name, str) and name.isprintable() and name):
        name = f"number {number}"
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
    """Reads all turns, each with the one before it; none may be missing."""
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
            other = f"turn {shown(row['turn'])}" if "turn" in row else "one without a number"
            raise UserError(f"{at}: missing: in its place (field turn), found {other}")
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


def _scene(value: Any, where: str) -> SceneTruth:
    found = fields(value, where, ("motion",), ("partner", "seed"))
    for name in ("motion", "partner"):
        if name in found:
            found[name] = text_line(found[name], f"{where}: {name}")
    if "seed" in found:
        found["seed"] = whole(found["seed"], f"{where}: seed", low=0, below=_SEEDS)
    return SceneTruth(**found)


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
