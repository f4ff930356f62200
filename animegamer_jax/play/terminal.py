"""A game in the terminal: prints the turns and meters, asks for instructions, shows progress."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from animegamer_jax.bundle.vocabulary import Vocabulary
from animegamer_jax.errors import UserError, printable_lines
from animegamer_jax.game.instructions import Line, check_characters
from animegamer_jax.game.saved.game_file import GAME_FILE, PICTURE_FILE, STORYBOARD_FILE
from animegamer_jax.game.saved.turns import Turn
from animegamer_jax.game.saved_game import Game
from animegamer_jax.media.pictures import encode_png
from animegamer_jax.progress import print_status, show_progress
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import user_errors

PREVIEW_FILE = "preview.png"
_HINT = "free some space there"
_STAGES = {"mllm": "language model", "decoder": "denoising steps", "vae": "frames"}

if TYPE_CHECKING:
    from animegamer_jax.game.player import Player
    from animegamer_jax.game.rollout import Window
    from animegamer_jax.game.turn_output import Preview


class TerminalGame:
    """A game played in the terminal.

    Args:
        game: The game, new or resumed.
        player: The player that plays its turns.
        vocabulary: Words to show at the prompt.
        resume_command: The command that continues the game, shown after an interruption.
        picture_note: What was left out of the file of the player's own picture.
        preview: Whether a picture of each clip is written while it is being made.
    """

    def __init__(
        self,
        game: Game,
        player: "Player",
        vocabulary: Vocabulary,
        *,
        resume_command: str,
        picture_note: str = "",
        preview: bool = False,
    ):
        self.game, self.player, self.vocabulary = game, player, vocabulary
        self.resume_command, self.picture_note = resume_command, picture_note
        self._preview = preview
        self.console = Console(highlight=False, markup=False, soft_wrap=True)
        self.playing = False

    def play(self, lines: list[Line] | None) -> int:
        """Plays the lines that have not been played yet, or those from the prompt if None."""
        game = self.game
        if game.turns:
            self._print(f"continuing after turn {len(game.turns)} of {game.folder}")
        elif game.picture is not None:
            self._print(f"the game starts from {game.folder / PICTURE_FILE}")
            if self.picture_note:
                self._print(f"  note: {self.picture_note}")
            self._note_unknown_words(game.picture.instruction)
        texts = [line.text for line in lines or []]
        try:
            window = self.player.restore([game.history()])
            for instruction in self._ask() if lines is None else texts[len(game.turns) :]:
                self.playing = True
                window = self._play_turn(window, instruction, total=len(texts) or None)
                self.playing = False
            self._save_storyboard()
        except KeyboardInterrupt:
            print(file=sys.stderr)
            print_status(f"animegamer play: stopped: {self._describe_state()}")
            with contextlib.suppress(UserError):
                self._save_storyboard()
            return 130
        except UserError as error:
            with contextlib.suppress(UserError):
                self._save_storyboard()
            raise UserError(f"{error}; {self._describe_state()}") from error
        self._print_files()
        return 0

    def _play_turn(self, window: "Window", instruction: str, *, total: int | None) -> "Window":
        number = len(self.game.turns) + 1
        with show_progress(transient=True) as progress:
            if total:
                progress("turns", number - 1, total)
            window, output = self.player.play_turn(
                window,
                [instruction],
                seeds=[self.game.seed],
                turn=number,
                on_progress=lambda stage, done, steps: progress(
                    f"turn {number}: {_STAGES[stage]}", done, steps
                ),
                on_frames=self._show if self._preview else None,
            )
        with user_errors(self.game.folder, f"turn {number} could not be saved", hint=_HINT):
            turn = self.game.add(output.row(0), instruction)
        self._print(describe(turn, self.game.folder, total=total))
        self._note_unknown_words(instruction)
        return window

    def _show(self, preview: "Preview") -> None:
        """Writes the first frame, as soon as there is a guess of it and again when it is known."""
        if preview.first == 0:
            path = self.game.folder / PREVIEW_FILE
            with user_errors(path, "could not be written", hint=_HINT):
                write_whole(path, encode_png(preview.frames[0, 0]))

    def _note_unknown_words(self, text: str) -> None:
        if unknown := self.player.tokenizer.unknown_words(text):
            words = ", ".join(map(repr, unknown))
            self._print(f"  note: the model does not know: {words}")

    def _ask(self) -> Iterator[str]:
        """Yields instructions from the prompt, until an empty line, `quit` or the end of input."""
        self._print(introduce(self.vocabulary))
        self._print("An empty line or 'quit' ends the game.")
        while True:
            try:
                text = self.console.input(f"turn {len(self.game.turns) + 1}> ").strip()
            except EOFError:
                self.console.print()
                return
            if text.lower() in ("", "quit"):
                return
            try:
                check_characters(text)
                self.player.check_instruction(text)
            except UserError as error:
                self._print(str(error))
                continue
            yield text

    def _print(self, text: str) -> None:
        self.console.print(printable_lines(text))

    def _describe_state(self) -> str:
        """Says which turn was interrupted, which are saved, and how to continue."""
        count = len(self.game.turns)
        playing = f"turn {count + 1} was being played; " if self.playing else ""
        saved = ("no turn is", "turn 1 is")[count] if count < 2 else f"turns 1 to {count} are"
        return f"{playing}{saved} saved; continue with: {self.resume_command}"

    def _save_storyboard(self) -> None:
        if self.game.turns:
            with user_errors(self.game.folder, "the storyboard could not be saved", hint=_HINT):
                self.game.save_storyboard()

    def _print_files(self) -> None:
        game = self.game
        if not game.turns:
            self._print(f"no turn was played; the game is in {game.folder / GAME_FILE}")
            return
        first, last = game.turns[0].clip, game.turns[-1].clip
        clips = str(game.folder / first) + (f" to {last}" if last != first else "")
        self._print(f"clips       {clips}")
        self._print(f"game        {game.folder / GAME_FILE}")
        self._print(f"storyboard  {game.folder / STORYBOARD_FILE}")


_EXAMPLE = "Character: Qiqi; Motion: gently turn head; Background: day town."


def introduce(vocabulary: Vocabulary) -> str:
    """Returns the prompt's first lines: example instructions, and the words that it may offer."""
    examples = " then ".join(repr(text) for text in vocabulary.examples or (_EXAMPLE,))
    lines = [f"One instruction a turn, for example {examples}"]
    for name in ("characters", "motions", "places", "times"):
        if words := getattr(vocabulary, name):
            lines.append(f"{name.capitalize()}: {', '.join(words)}.")
    return "\n".join(lines)


def describe(turn: Turn, folder: Path, *, total: int | None = None) -> str:
    """Returns a turn in one line: motion level, meters with their changes, seconds, clip."""
    number = f"turn {turn.turn}" + (f"/{total}" if total else "")
    meters = "  ".join(
        f"{name} {getattr(turn.meters, name)} ({change:+d})"
        for name, change in turn.changes.items()
    )
    seconds = f"{turn.seconds['total']:.1f} s"
    return f"{number}  motion {turn.motion_level}  {meters}  {seconds}  {folder / turn.clip}"
