"""Turns of many players on one set of networks: what waits at the same time is played as a batch.

First come, first served. A batch is filled up to one of a few fixed sizes, so that nothing compiles
again; a turn of its games is the one that each would play alone. On a processor with several cores,
of which one batch does not keep two busy, batches are played side by side. A turn is on the disk
before its player is told of it.
"""

import collections
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import numpy as np

from animegamer_jax.errors import NonFiniteError, UserError
from animegamer_jax.game.instructions import check_letters
from animegamer_jax.game.player import Player, TurnOutput
from animegamer_jax.game.saved_game import Game, Turn
from animegamer_jax.serve.shelf import Shelf

BATCH_SIZES = (1, 2, 4, 8)  # where one batch is played at a time
LONGEST_INSTRUCTION = 500  # letters: more than any caption's tokens
# Players who press at once become one batch: it begins when nobody has come for so many seconds, or
# has waited for so many.
_QUIET, _GATHER = 0.08, 0.3
_MOST_WORKERS = 4  # on a processor
_LARGEST_SEED = 2**31 - 1

Status = Literal["waiting", "playing", "done", "stopped", "failed"]


class _StoppedError(Exception):
    """Every player of a batch has stopped it."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Ticket:
    """A turn that a player asked for.

    Attributes:
        game: its id.
        instruction: what the player said.
        after: how many turns of the game stay before it.
        seed: of its noise.
        window, steps: that it is played with.
        level: the motion level that the player set, or 0.
        status: how far it is.
        stage: "mllm", "decoder" or "vae", while it is playing.
        step, num_steps: of the stage.
        seconds_left: of the batch, as far as can be told; None before the first denoising step.
        turn: the finished turn.
        error: why it failed, one line.
    """

    game: str
    instruction: str
    after: int
    seed: int
    window: int
    steps: int
    level: int
    status: Status = "waiting"
    stage: str = ""
    step: int = 0
    num_steps: int = 0
    seconds_left: float | None = None
    turn: Turn | None = None
    error: str = ""
    _stop: bool = False
    _ended: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for its end; whether it came."""
        return self._ended.wait(seconds)


class Engine:
    """Plays the turns of a shelf's games in batches, on threads of its own.

    Args:
        player: whose window is the largest that a game may have.
        shelf: of the games.
        batch_sizes: in rising order; the last is the largest batch.
        workers: batches that are played side by side, among which those who wait are shared.
    """

    def __init__(
        self,
        player: Player,
        shelf: Shelf,
        *,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        workers: int = 1,
    ):
        self.player, self.shelf, self.batch_sizes = player, shelf, tuple(batch_sizes)
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._playing: list[Ticket] = []
        self._idle = workers
        self._lock = threading.Condition()
        self._closing = False
        self._savers = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="save")
        self._threads = [
            threading.Thread(target=self._serve, name=f"engine-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def warm_up(self, on_progress: Callable[[int], None] = lambda size: None) -> None:
        """Compiles the programs of every batch size, so that no player waits for them."""
        for size in self.batch_sizes:
            on_progress(size)
            window = self.player.start(size)
            self.player.play_turn(
                window, ["Motion: wave."] * size, seeds=[0] * size, turn=[1] * size, steps=1
            )

    def submit(
        self,
        game: str,
        instruction: str,
        *,
        after: int | None = None,
        seed: int | None = None,
        window: int | None = None,
        steps: int | None = None,
        level: int = 0,
    ) -> Ticket:
        """Asks for a turn.

        Args:
            game: its id.
            instruction: what the player says.
            after: turns that stay before it; None: all. Fewer: it takes the others' place.
            seed: of its noise; the game's if None.
            window: turns that the model sees; the game's if None.
            steps: of denoising; the game's if None.
            level: motion level, 0: the model's own.

        Raises:
            UserError: one line: no such game, one of its turns is waiting, or what was asked for
                cannot be played.
        """
        found = self.shelf.get(game)
        instruction = instruction.strip()
        self._check(instruction, seed=seed, window=window, steps=steps, level=level)
        turns = len(found.turns)
        if after is not None and not 0 <= after <= turns:
            raise UserError(f"after turn {after}: expected 0 to {turns}, as the game has turns")
        ticket = Ticket(
            game=game,
            instruction=instruction,
            after=turns if after is None else after,
            seed=found.seed if seed is None else seed,
            window=found.window if window is None else window,
            steps=found.steps if steps is None else steps,
            level=level,
        )
        with self._lock:
            if self._closing:
                raise UserError("the server is going down: the game is saved, come back later")
            if self.ticket_of(game) is not None:
                raise UserError("a turn of this game is being played: wait for it, or stop it")
            self._waiting.append(ticket)
            self._lock.notify_all()
        return ticket

    def _check(
        self,
        instruction: str,
        *,
        seed: int | None,
        window: int | None,
        steps: int | None,
        level: int,
    ) -> None:
        if not instruction:
            raise UserError("expected an instruction, found nothing: say what happens next")
        if len(instruction) > LONGEST_INSTRUCTION:
            raise UserError(
                f"expected an instruction of at most {LONGEST_INSTRUCTION} letters, found "
                f"{len(instruction)}: say it in fewer words"
            )
        check_letters(instruction)
        self.player.check_instruction(instruction)
        levels = self.player.protocol.motion_levels
        if level and level not in levels:
            raise UserError(f"motion level {level}: expected one of {list(levels)}")
        self.check_settings(seed=seed, window=window, steps=steps)

    def check_settings(self, *, seed: Any, window: Any, steps: Any) -> None:
        """Raises UserError where one is no whole number, or out of its range; None is not asked."""
        for name, value, low, high in (
            ("seed", seed, 0, _LARGEST_SEED),
            ("window", window, 1, self.player.window),
            ("steps", steps, 1, 1000),
        ):
            whole = isinstance(value, int | float) and value % 1 == 0
            if value is not None and not (whole and low <= value <= high):
                raise UserError(f"{name}: expected a whole number, {low} to {high}, found {value}")

    def ticket_of(self, game: str) -> Ticket | None:
        """The turn of a game that is waiting or being played."""
        with self._lock:
            for ticket in (*self._playing, *self._waiting):
                if ticket.game == game and not ticket.ended:
                    return ticket
        return None

    def place(self, ticket: Ticket) -> int:
        """How many turns wait before this one; 0: it is next, or being played."""
        with self._lock:
            return self._waiting.index(ticket) if ticket in self._waiting else 0

    def stop(self, game: str) -> bool:
        """Ends the turn of a game, which stays as it was before; whether there was one."""
        with self._lock:
            ticket = self.ticket_of(game)
            if ticket is None:
                return False
            ticket._stop = True
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                _end(ticket, "stopped")
            return True

    def close(self) -> None:
        """Takes no more turns, ends those that are there, and waits for that."""
        with self._lock:
            self._closing = True
            for ticket in (*self._playing, *self._waiting):
                ticket._stop = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()
        self._savers.shutdown()

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    for ticket in self._waiting:
                        _end(ticket, "stopped")
                    self._waiting.clear()
                    return
            self._gather()
            with self._lock:
                batch = self._take()
                self._playing += batch
                self._idle -= 1
            try:
                if batch:  # another worker may have been quicker
                    self._play(batch)
            except Exception:  # a defect must not end the others' games
                logging.getLogger(__name__).exception("a batch of turns failed")
            with self._lock:
                for ticket in batch:
                    if not ticket.ended:
                        ticket.error = "an internal error: the game is as it was, try again"
                        _end(ticket, "failed")
                    self._playing.remove(ticket)
                self._idle += 1

    def _gather(self) -> None:
        """Lets those who press at once come together."""
        until, found = time.monotonic() + _GATHER, 0
        while found != len(self._waiting) and time.monotonic() < until:
            found = len(self._waiting)
            time.sleep(_QUIET)

    def _take(self) -> list[Ticket]:
        """The first that waits, and those after it that can be played beside it.

        No more than its share, so that every idle worker has something to do.
        """
        taken: list[Ticket] = []
        share = min(self.batch_sizes[-1], math.ceil(len(self._waiting) / self._idle))
        for ticket in list(self._waiting):
            if len(taken) < share and ticket.steps == (taken or [ticket])[0].steps:
                taken.append(ticket)
                self._waiting.remove(ticket)
                ticket.status = "playing"
        return taken

    def _play(self, batch: list[Ticket]) -> None:
        try:
            output = self._play_batch(batch)
        except _StoppedError:
            for ticket in batch:
                _end(ticket, "stopped")
            return
        except UserError as error:
            if len(batch) > 1:  # one game's trouble is not the others'; whose it is, shows alone
                for ticket in batch:
                    self._play([ticket])
                return
            lost = isinstance(error, NonFiniteError)
            batch[0].error = (
                f"no picture came out: try another seed ({error})" if lost else str(error)
            )
            _end(batch[0], "failed")
            return
        list(self._savers.map(lambda row: self._save(batch[row], output, row), range(len(batch))))

    def _play_batch(self, batch: list[Ticket]) -> TurnOutput:
        size = next(size for size in self.batch_sizes if size >= len(batch))
        rows = [*batch, *[batch[0]] * (size - len(batch))]
        histories = [
            self.shelf.get(t.game).history(before=t.after + 1, window=t.window) for t in batch
        ]
        window = self.player.window_of([*histories, *[histories[0]] * (size - len(batch))])
        began = time.perf_counter()

        def tell(stage: str, step: int, total: int) -> None:
            if all(ticket._stop for ticket in batch):
                raise _StoppedError
            left = None
            if stage == "decoder" and step:
                left = (time.perf_counter() - began) / step * (total - step)
            for ticket in batch:
                ticket.stage, ticket.step, ticket.num_steps = stage, step, total
                ticket.seconds_left = left

        _, output = self.player.play_turn(
            window,
            [ticket.instruction for ticket in rows],
            seeds=[ticket.seed for ticket in rows],
            turn=[ticket.after + 1 for ticket in rows],
            steps=batch[0].steps,
            levels=[ticket.level for ticket in rows],
            on_progress=tell,
        )
        return output

    def _save(self, ticket: Ticket, output: TurnOutput, row: int) -> None:
        """Writes a batch's row as its player's turn, unless that was stopped; ends the ticket."""
        if ticket._stop:
            _end(ticket, "stopped")
            return
        game: Game = self.shelf.get(ticket.game)
        try:
            ticket.turn = game.add(
                ticket.instruction,
                states=output.states[row],
                motion_value=float(output.motion_value[row]),
                representation=output.representation[row].astype(np.float32),
                frames=output.frames[row],
                seconds=output.seconds,
                after=ticket.after,
                seed=ticket.seed,
                window=ticket.window,
                steps=ticket.steps,
                chosen_level=bool(ticket.level),
            )
        except OSError as error:
            ticket.error = f"the turn could not be saved: {error.strerror}"
            _end(ticket, "failed")
        else:
            _end(ticket, "done")


def suitable_batches() -> tuple[tuple[int, ...], int]:
    """Batch sizes and workers for this machine's devices.

    An accelerator plays one batch at a time. Of a processor each core plays a smaller one: two
    batches of four at once are done sooner than one of eight.
    """
    if jax.default_backend() != "cpu":
        return BATCH_SIZES, 1
    workers = min(os.cpu_count() or 1, _MOST_WORKERS)
    return BATCH_SIZES if workers == 1 else BATCH_SIZES[:-1], workers


def _end(ticket: Ticket, status: Status) -> None:
    ticket.status = status
    ticket._ended.set()
