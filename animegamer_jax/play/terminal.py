"""What `animegamer play` prints: the model, the turns and the meters."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console

from animegamer_jax.errors import UserError
from animegamer_jax.game.instructions import Line, check_letters
from animegamer_jax.game.saved_game import GAME_FILE, STORYBOARD_FILE, Game, Turn
from animegamer_jax.progress import show_progress

_STAGES = {"mllm": "language model", "decoder": "denoising steps", "vae": "frames"}


def _brief(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


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
