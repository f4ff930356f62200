"""A benchmark: games as data, in a versioned JSON format (paper, section 4.1).

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
from typing import Annotated, Any, Literal

import pydantic

from animegamer_jax.errors import UserError
from animegamer_jax.game.instructions import compose_instruction
from animegamer_jax.protocol import PAPER
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import user_errors
from animegamer_jax.storage.serialization import from_json, parse_json, shown
from animegamer_jax.storage.untrusted import read_file
from animegamer_jax.vlm.fields import WHOLE

Part = Literal["character", "adverb", "motion", "time", "place"]
PARTS: tuple[Part, ...] = ("character", "adverb", "motion", "time", "place")
"""Parts of an instruction, in the order of the released form."""

SHIPPED = ("toy", "paper")
"""Names of the shipped benchmarks."""

_FOLDER = Path(__file__).parents[2] / "assets" / "benchmarks"
SCHEMA_FILE = _FOLDER / "benchmark.schema.json"

_AGAIN = "correct it, or write it again with `animegamer evaluate --make`"
_LONGEST_TEXT = 400


# Types of the fields, with what `from_json` checks


def _check_line(text: str) -> str:
    if not text.strip():
        raise ValueError("expected text")
    if not text.isprintable() or text != text.strip():
        raise ValueError("expected one line without spaces around it")
    if len(text) > _LONGEST_TEXT:
        raise ValueError(f"expected at most {_LONGEST_TEXT} characters")
    return text


def _check_given(value: Any) -> Any:
    if value is None:
        raise ValueError("expected a value, or no such field")
    return value


def _check_unique(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len({*values}) < len(values):
        raise ValueError("expected each value once")
    return values


def _check_rising(values: tuple[int, ...]) -> tuple[int, ...]:
    if sorted({*values}) != [*values]:
        raise ValueError("expected rising numbers, each once")
    return values


def _order_parts(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(part for part in PARTS if part in _check_unique(parts))


_After = pydantic.AfterValidator
# A default is not validated, so it sees None only where a file says null. Before the validation it
# would turn lists into Python's, which are no tuples.
_Not = _After(_check_given)
_Some = pydantic.Field(min_length=1)
Line = Annotated[str, _After(_check_line)]
"""One line of text, not empty, without spaces around it."""
MaybeLine = Annotated[Line | None, _Not]
Names = Annotated[tuple[Line, ...], _Some, _After(_check_unique)]
Seed = Annotated[int, pydantic.Field(ge=0, lt=2**32)]
Change = Annotated[int, pydantic.Field(ge=-5, le=5)]
Changes = Annotated[tuple[Change, ...], _Some, _After(_check_rising)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateValues:
    """Changes of each state that a benchmark's games can expect."""

    social: Changes = PAPER.social
    entertainment: Changes = PAPER.entertainment
    stamina: Changes = PAPER.stamina


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

    character: MaybeLine = None
    adverb: MaybeLine = None
    motion: MaybeLine = None
    time: MaybeLine = None
    place: MaybeLine = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detail:
    """One thing that a clip shows and no instruction says."""

    name: Line
    value: Line


@dataclasses.dataclass(frozen=True, kw_only=True)
class SceneTruth:
    """What a world needs, besides parts and level, to draw a turn's true clip.

    Attributes:
        motion: Kind of motion, by the world's name for it.
        partner: Character who is talked to; None: nobody.
        details: What no instruction says, by the world's names.
        seed: Seed of what is left to chance; None: nothing is.
    """

    motion: Line
    partner: MaybeLine = None
    details: tuple[Detail, ...] = ()
    seed: Annotated[Seed | None, _Not] = None


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

    instruction: Line
    parts: Parts
    omitted: Annotated[tuple[Part, ...], _After(_order_parts)] = ()
    motion_level: Annotated[int, pydantic.Field(ge=1, le=5)]
    social: int
    entertainment: int
    stamina: int
    caption: MaybeLine = None
    motion_text: MaybeLine = None
    scene: Annotated[SceneTruth | None, _Not] = None

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
        picture: The turn before the first, which the player gives as a picture; None: no picture.
        turns: The turns, in order.
    """

    id: Line
    seed: Seed
    characters: Names
    picture: Annotated[BenchmarkTurn | None, _Not] = None
    turns: Annotated[tuple[BenchmarkTurn, ...], _Some]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Games to play and to score.

    Attributes:
        format_version: Version of the file.
        name: Name of the benchmark.
        world: World of the characters: "toy", or a film's name.
        made_by: How the games were made.
        num_turns: Number of turns of every game.
        states: Changes that turns can expect.
        characters: Characters of all games.
        games: The games, in order.
    """

    format_version: Annotated[Literal[1], WHOLE] = 1
    name: Line
    world: Line
    made_by: Line
    num_turns: Annotated[int, pydantic.Field(ge=1)]
    states: StateValues
    characters: Names
    games: Annotated[tuple[BenchmarkGame, ...], _Some]


def compose(parts: Parts, *, omitted: Sequence[Part] = ()) -> str:
    """Composes an instruction in the released form, without the omitted and the unknown parts.

    For example `Character: Qiqi; Motion: quickly flying on broomstick; Background: day sky.` (PAPER
    figure 1); empty if no part is left.
    """
    words = {n: "" if n in omitted else getattr(parts, n) or "" for n in PARTS}
    return compose_instruction(**words)


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
        UserError: Characters are missing; names them.
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
    head = _filled(benchmark)
    games = ",\n".join(_dump(game) for game in head.pop("games"))
    return f'{_dump(head)[:-1]},"games":[\n{games}\n]}}\n'


def write_benchmark(path: str | Path, benchmark: Benchmark) -> None:
    """Writes a benchmark for `read_benchmark`.

    Raises:
        UserError: The benchmark is not valid, or the file cannot be written.
    """
    text = format_benchmark(benchmark)
    parse_benchmark(text, where=str(path))  # checks it
    with user_errors(path, "cannot be written", hint="choose another place"):
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
        UserError: The file is missing or not valid; names the field, what was expected and what was
            found.
    """
    file = benchmark_path(str(path))
    with user_errors(file, "cannot be read", hint=f"give a file, or one of {', '.join(SHIPPED)}"):
        content = read_file(file)
    return parse_benchmark(content, where=str(file))


def parse_benchmark(text: str | bytes, *, where: str) -> Benchmark:
    """Reads a benchmark's text; `where` names it in messages.

    Raises:
        UserError: It is not valid, as in `read_benchmark`.
    """
    content = parse_json(text, where, hint=_AGAIN)
    _take_numbers(content, where)
    found = from_json(Benchmark, content, where, hint=_AGAIN)
    _check_turns(found, where)
    return found


def _take_numbers(content: Any, where: str) -> None:
    """Removes the numbers of the turns, after checking that none is missing."""
    games = content.get("games") if isinstance(content, dict) else None
    for g, game in enumerate(games if isinstance(games, list) else []):
        turns = game.get("turns") if isinstance(game, dict) else None
        for t, turn in enumerate(turns if isinstance(turns, list) else []):
            number = turn.pop("turn", None) if isinstance(turn, dict) else t + 1
            if type(number) is not int or number != t + 1:
                raise UserError(
                    f"{where}: games[{g}].turns[{t}].turn: expected {t + 1}, found {shown(number)}"
                )


def _check_turns(found: Benchmark, where: str) -> None:
    """Checks what one field says about another.

    Raises:
        UserError: Two fields contradict each other.
    """

    def require(holds: bool, field: str, problem: str) -> None:
        if not holds:
            raise UserError(f"{where}: {field}: {problem}")

    ids = [game.id for game in found.games]
    require(len({*ids}) == len(ids), "games", "expected a different id for each")
    allowed = dataclasses.asdict(found.states)
    for g, game in enumerate(found.games):
        field, count = f"games[{g}]", len(game.turns)
        expected = f"expected num_turns, {found.num_turns}, found {count}"
        require(count == found.num_turns, f"{field}.turns", expected)
        others = {*game.characters} - {*found.characters}
        require(not others, f"{field}.characters", "expected characters of the benchmark")
        fields = [f"{field}.turns[{t}]" for t in range(count)]
        rows, before = list(zip(fields, game.turns, strict=True)), None
        if game.picture is not None:
            rows = [(f"{field}.picture", game.picture), *rows]
        for field, turn in rows:
            for name, values in allowed.items():
                value = getattr(turn, name)
                problem = f"expected one of {', '.join(map(str, values))}, found {value}"
                require(value in values, f"{field}.{name}", problem)
            who = turn.parts.character
            known = who is None or who in game.characters
            require(known, f"{field}.parts.character", f"expected one of the game, found {who!a}")
            problem = "expected none in a first turn, which has no turn before"
            require(before is not None or not turn.omitted, f"{field}.omitted", problem)
            for name in turn.omitted:
                now, then = getattr(turn.parts, name), getattr(before, name)
                require(
                    now is None or then is None or now == then,
                    f"{field}.parts.{name}",
                    f"expected {then!a} as in the turn before, because the instruction omits it, "
                    f"found {now!a}",
                )
            before = turn.parts
