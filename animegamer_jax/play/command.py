"""`animegamer play`: a file of instructions, or a prompt on the terminal, played turn by turn."""

import codecs
import contextlib
import itertools
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from animegamer_jax.configs import Dtype
from animegamer_jax.errors import UserError
from animegamer_jax.game.saved_game import (
    GAME_FILE,
    STORYBOARD_FILE,
    Game,
    Turn,
    check_no_game,
)

ASSETS = Path(__file__).parents[1] / "assets"
_LARGEST_SEED = 2**31 - 1

OnProgress = Callable[[str, int, int], None]


def play(
    *,
    model: str = "toy",
    instructions: Path | None = None,
    out: Path = Path("out/play"),
    window: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    dtype: Dtype | None = None,
    layout: Literal["latency"] | None = None,
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Play a game: a clip, the character's state and a line in game.json for each instruction.

    Args:
        model: A model folder made by `animegamer convert`, or `toy` for the embedded one.
        instructions: A UTF-8 file, one instruction a line; blank lines and lines that start with
            # are skipped. Without it: a prompt, or the lines of standard input.
        out: The folder for the clips, game.json and storyboard.png.
        window: Turns of context, this one included. Default: the model's own.
        steps: Denoising steps a turn, 1 to 1000. Default: the model's own.
        seed: The game's seed; the same seed gives the same game. Default: 0.
        dtype: Number format of the computation. Default: the model's own.
        layout: `latency` plays over eight devices, as one program a turn.
            Default: on the first device.
        resume: Go on with the game in the output folder after its last whole turn. Window,
            steps and seed are the game's own and need not be given again.
    """
    _check_range("--window", window, low=1, high=1000)
    _check_range("--steps", steps, low=1, high=1000)
    _check_range("--seed", seed, low=0, high=_LARGEST_SEED)
    folder = model_folder(model)
    lines = _gather_instructions(instructions)
    source = str(instructions) if instructions else "standard input"
    game = None
    if resume and _holds_game(out):
        game = Game.load(out)
        for name, asked in (("window", window), ("steps", steps), ("seed", seed)):
            _check_same(game, name, asked)
        window, steps, seed = game.window, game.steps, game.seed
        if lines is not None:
            _check_prefix(game, lines, source)
    else:
        check_no_game(out)
    _check_writable(out)
    seed = 0 if seed is None else seed

    # Imported late: JAX takes a second, and a wrong option should be told at once.
    keep_compiled_programs()
    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.game.player import Player

    bundle = Bundle.open(folder)
    if game is not None:
        _check_same(game, "model", bundle.name)
        _check_same(game, "protocol", bundle.protocol.name)
        if mllm := bundle.config.mllm:
            _check_representations(game, expected=(mllm.num_queries, mllm.representation_size))
    player = Player.from_bundle(
        bundle, window=window, steps=steps, dtype=dtype, layout=layout, num_games=1
    )
    check_instructions(lines or [], source, check=player.check_instruction)
    if game is None:
        game = Game.create(
            out,
            model=bundle.name,
            seed=seed,
            window=player.window,
            steps=player.steps,
            protocol=bundle.protocol.name,
        )
    command = ["animegamer", "play", "--model", model]
    command += ["--instructions", str(instructions)] if instructions else []
    command += ["--out", str(out), "--window", str(game.window), "--steps", str(game.steps)]
    command += ["--seed", str(game.seed), *(["--dtype", dtype] if dtype else [])]
    command += [*(["--layout", layout] if layout else []), "--resume"]
    again = shlex.join(command)
    if lines is not None and instructions is None:
        again += "  (with the same lines on standard input)"
    return _Table(game, player, again=again).play(lines)


def keep_compiled_programs() -> None:
    """Lets JAX keep compiled programs in the user's cache folder, unless another one is set.

    The first turn of the next game on this machine then need not compile again. To be called
    before JAX is imported.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(caches) / "animegamer_jax"))


def model_folder(model: str) -> str:
    """Where a model lies: the path as given, or the embedded one's by the name `toy`.

    Raises:
        UserError: there is no embedded model.
    """
    if model != "toy":
        return model
    folder = ASSETS / "toy"
    if not (folder / "config.json").is_file():
        raise UserError(
            f"--model toy: expected the embedded model in {folder}, found none: give a bundle, "
            "--model DIR (`animegamer convert` makes one, scripts/toy/train.sh trains one)"
        )
    return str(folder)


class Line(NamedTuple):
    """An instruction and the number of its line, from 1."""

    number: int
    text: str


def parse_instructions(data: bytes, source: str) -> list[Line]:
    """Instructions of a file's bytes: UTF-8, one a line, blank lines and # comments left out.

    Raises:
        UserError: other encodings (names the byte offset), control characters, no instruction.
    """
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        skipped = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
        offset = error.start + skipped
        raise UserError(
            f"{source}: expected UTF-8 text, found byte 0x{data[offset]:02x} at offset {offset}: "
            "save the file as UTF-8"
        ) from error
    lines = []
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            check_letters(line)
        except UserError as error:
            raise UserError(f"{source}, line {number}: {error}") from error
        lines.append(Line(number, line))
    if not lines:
        raise UserError(
            f"{source}: expected instructions, one a line, found none: write for example "
            "'Character: Qiqi; Motion: gently turn head; Background: day town.'"
        )
    return lines


def read_instructions(path: Path) -> list[Line]:
    """Reads a file of instructions (`parse_instructions`).

    Raises:
        UserError: the file cannot be read, or its content cannot be played.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path}: expected a file of instructions, found no such file") from error
    except OSError as error:
        raise UserError(
            f"{path}: expected a file of instructions, found: {error.strerror}"
        ) from error
    return parse_instructions(data, str(path))


def check_letters(text: str) -> None:
    """Refuses what no saved game can hold: control characters and broken Unicode.

    Raises:
        UserError: names the character and where it stands.
    """
    for index, letter in enumerate(text):
        if (ord(letter) < 32 and letter != "\t") or ord(letter) == 127:
            kind = "a control character"
        elif 0xD800 <= ord(letter) <= 0xDFFF:
            kind = "a broken character"
        else:
            continue
        raise UserError(f"expected text, found {kind}, U+{ord(letter):04X}, at column {index + 1}")


def check_instructions(lines: list[Line], source: str, *, check: Callable[[str], None]) -> None:
    """Checks every instruction before the first is played.

    Raises:
        UserError: names the first line that cannot be played, and how many more there are.
    """
    errors = []
    for line in lines:
        try:
            check(line.text)
        except UserError as error:
            errors.append(f"{source}, line {line.number}: {error}")
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise UserError(errors[0] + more)


def _gather_instructions(path: Path | None) -> list[Line] | None:
    """Lines of the file, or of standard input where it is not a terminal; None means a prompt."""
    if path is not None:
        return read_instructions(path)
    if sys.stdin is not None and sys.stdin.isatty():
        return None
    data = sys.stdin.buffer.read() if sys.stdin is not None else b""
    lines = parse_instructions(data, "standard input")
    return list(itertools.takewhile(lambda line: line.text.lower() != "quit", lines))


def _check_range(option: str, value: int | None, *, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise UserError(f"{option}: expected a whole number, {low} to {high}, found {value}")


def _holds_game(folder: Path) -> bool:
    return (folder / GAME_FILE).exists()


def _check_writable(folder: Path) -> None:
    """Tells before the networks are loaded that the game cannot be written there."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise UserError(f"--out {folder}: expected a folder, found that {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"--out {folder}: expected a folder to write to, found {nearest} read-only")


def _check_same(game: Game, name: str, asked: object) -> None:
    found = getattr(game, name)
    if asked is not None and asked != found:
        raise UserError(
            f"{game.folder / GAME_FILE}: {name}: expected {asked!r}, as asked for, found "
            f"{found!r}: resume it with that, or name another folder by --out"
        )


def _check_representations(game: Game, *, expected: tuple[int, int]) -> None:
    """Refuses a game of a model that has the same name and another size."""
    for turn, record in zip(reversed(game.turns), reversed(game.history()), strict=False):
        if record.representation.shape != expected:
            raise UserError(
                f"{game.folder / turn.representation_file}: expected a shot representation of "
                f"shape {list(expected)}, as the model's, found "
                f"{list(record.representation.shape)}: give the model that began the game"
            )


def _brief(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _check_prefix(game: Game, lines: list[Line], source: str) -> None:
    path = game.folder / GAME_FILE
    for turn, line in zip(game.turns, lines, strict=False):
        if turn.instruction != line.text:
            raise UserError(
                f"{path}: turn {turn.turn}: instruction: expected {_brief(line.text)}, as in "
                f"{source}, line {line.number}, found {_brief(turn.instruction)}: give the file "
                "that the game was started with, or name another folder by --out"
            )
    if len(game.turns) > len(lines):
        raise UserError(
            f"{path}: turns: expected at most {len(lines)}, as in {source}, found "
            f"{len(game.turns)}: give a file that goes on from there"
        )


class _Table:
    """A game being played on a terminal."""

    def __init__(self, game: Game, player, *, again: str):
        self.game, self.player, self.again = game, player, again
        self.console = Console(highlight=False, markup=False, soft_wrap=True)
        self.playing = False

    def play(self, lines: list[Line] | None) -> int:
        """Plays the lines that are not played yet, or what the prompt gives."""
        game = self.game
        if game.turns:
            self.console.print(f"going on after turn {len(game.turns)} of {game.folder}")
        texts = [line.text for line in lines or []]
        try:
            window = self.player.restore(game.history()) if game.turns else self.player.start()
            coming = self._ask() if lines is None else texts[len(game.turns) :]
            for instruction in coming:
                self.playing = True
                window = self._play_turn(window, instruction, total=len(texts) or None)
                self.playing = False
            self._save_storyboard()
        except KeyboardInterrupt:
            print(f"\nanimegamer play: stopped: {self._standing()}", file=sys.stderr)
            self._save_storyboard_if_possible()
            return 130
        except UserError as error:
            self._save_storyboard_if_possible()
            raise UserError(f"{error}; {self._standing()}") from error
        self._tell_the_end()
        return 0

    def _play_turn(self, window, instruction: str, *, total: int | None):
        number = len(self.game.turns) + 1
        with _show_progress(number, total) as on_progress:
            window, output = self.player.play_turn(
                window,
                [instruction],
                seeds=[self.game.seed],
                turn=number,
                on_progress=on_progress,
            )
        try:
            turn = self.game.add(
                instruction,
                states=output.states[0],
                motion_value=float(output.motion_value[0]),
                representation=output.representation[0].astype(np.float32),
                frames=output.frames[0],
                seconds=output.seconds,
            )
        except OSError as error:
            raise UserError(
                f"{self.game.folder}: turn {number} could not be saved: {error.strerror}"
            ) from error
        self.console.print(describe(turn, self.game.folder, total=total))
        if unknown := self.player.tokenizer.unknown_words(instruction):
            words = ", ".join(map(repr, unknown))
            self.console.print(f"  note: outside this model's world, read as blanks: {words}")
        return window

    def _ask(self) -> Iterator[str]:
        """Instructions from the prompt, until an empty line, `quit` or the end of input."""
        self.console.print(introduce(self.game.model))
        self.console.print("An empty line or 'quit' ends the game.")
        while True:
            try:
                text = self.console.input(f"turn {len(self.game.turns) + 1}> ").strip()
            except EOFError:
                self.console.print()
                return
            if text.lower() in ("", "quit"):
                return
            try:
                check_letters(text)
                self.player.check_instruction(text)
            except UserError as error:
                self.console.print(str(error))
                continue
            yield text

    def _standing(self) -> str:
        """What is being played, what is whole, and how to go on."""
        whole = len(self.game.turns)
        playing = f"turn {whole + 1} was being played; " if self.playing else ""
        turns = (
            "no turn is" if whole == 0 else "turn 1 is" if whole == 1 else f"turns 1 to {whole} are"
        )
        return f"{playing}{turns} whole; go on with: {self.again}"

    def _save_storyboard(self) -> None:
        if not self.game.turns:
            return
        try:
            self.game.save_storyboard()
        except OSError as error:
            raise UserError(
                f"{self.game.folder}: the storyboard could not be saved: {error.strerror}"
            ) from error

    def _save_storyboard_if_possible(self) -> None:
        with contextlib.suppress(UserError):
            self._save_storyboard()

    def _tell_the_end(self) -> None:
        game = self.game
        if not game.turns:
            self.console.print(f"no turn was played; the game is in {game.folder / GAME_FILE}")
            return
        first, last = game.turns[0].clip, game.turns[-1].clip
        clips = str(game.folder / first) + (f" to {last}" if last != first else "")
        self.console.print(f"clips       {clips}")
        self.console.print(f"game        {game.folder / GAME_FILE}")
        self.console.print(f"storyboard  {game.folder / STORYBOARD_FILE}")


def introduce(model: str) -> str:
    """What a prompt says first: an instruction that the model knows, and the toy's whole world."""
    if model != "toy":
        return (
            "One instruction a turn, for example "
            "'Character: Qiqi; Motion: gently turn head; Background: day town.'"
        )
    from animegamer_jax.toy.scene import (
        CHARACTERS,
        MOTIONS,
        PLACES,
    )

    return (
        "One instruction a turn, for example "
        "'Character: Mika; Motion: gently waving; Background: day town.', then 'Go on, faster.'\n"
        f"Characters: {', '.join(CHARACTERS)}. Motions: {', '.join(MOTIONS)}.\n"
        f"Places: {', '.join(PLACES)}; by day and night."
    )


def describe(turn: Turn, folder: Path, *, total: int | None = None) -> str:
    """A turn in one line: motion level, meters with their changes, seconds, clip."""
    number = f"turn {turn.turn}" + (f"/{total}" if total else "")
    meters = "  ".join(
        f"{name} {getattr(turn.meters, name)} ({change:+d})"
        for name, change in turn.changes.items()
    )
    seconds = f"{turn.seconds['total']:.1f} s"
    return f"{number}  motion {turn.motion_level}  {meters}  {seconds}  {folder / turn.clip}"


_STAGES = {"mllm": "language model", "decoder": "denoising", "vae": "frames"}
_PLAIN_INTERVAL = 10.0


@contextlib.contextmanager
def _show_progress(turn: int, total: int | None) -> Iterator[OnProgress]:
    """Bars on a terminal, a plain line every ten seconds elsewhere; both on standard error."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        yield _PlainProgress(turn, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        if total:
            progress.add_task("turns", total=total, completed=turn - 1)
        task = progress.add_task(f"turn {turn}: {_STAGES['mllm']}", total=None)
        current = "mllm"

        def on_progress(stage: str, step: int, steps: int) -> None:
            nonlocal current
            if stage != current:
                current = stage
                progress.reset(task, total=steps, description=f"turn {turn}: {_STAGES[stage]}")
            progress.update(task, total=steps, completed=step)

        yield on_progress


class _PlainProgress:
    """Denoising steps and time left as lines, no more often than every ten seconds."""

    def __init__(self, turn: int, console: Console):
        self.turn, self.console = turn, console
        self.started: tuple[float, int] | None = None
        self.told = time.monotonic()

    def __call__(self, stage: str, step: int, total: int) -> None:
        if stage != "decoder" or step == 0:
            return
        now = time.monotonic()
        if self.started is None:  # the first step may have compiled: time the others
            self.started = now, step
            return
        if now - self.told < _PLAIN_INTERVAL or step == total:
            return
        self.told = now
        began, first = self.started
        left = (now - began) / (step - first) * (total - step)
        self.console.print(
            f"turn {self.turn}: {_STAGES[stage]} {step}/{total}, about {left:.0f} s left"
        )
