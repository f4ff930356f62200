"""Dynamic batching: turns of many players that wait at the same time are played as one batch.

Clients take turns. A batch is padded to one of a few fixed sizes so that nothing recompiles; a
turn in a batch equals the turn played alone. On a CPU with several cores, of which one batch does
not keep two busy, several batches are played in parallel. A turn is saved before its player sees
it.

A batch gives way between two denoising steps: if a client has several turns in it, or if it has
more steps to go than the turn that waits, then a client of whom nothing is being played comes
first. The batch continues afterwards, for at least half as long as it has waited.
"""

import collections
import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax

from animegamer_jax.errors import NonFiniteError, UserError
from animegamer_jax.game.instructions import check_characters
from animegamer_jax.game.player import Player
from animegamer_jax.game.turn_output import TurnOutput
from animegamer_jax.serve.engine.batch_player import BatchPlayer
from animegamer_jax.serve.engine.fair_queue import FairQueue
from animegamer_jax.serve.engine.turn_request import TurnRequest
from animegamer_jax.serve.games.game_store import GameStore
from animegamer_jax.storage.serialization import shown

BATCH_SIZES = (1, 2, 4, 8)  # when one batch is played at a time
MAX_CHARACTERS = 500  # of an instruction: more than any caption's tokens
# Requests that arrive together become one batch. It starts when no request has arrived for the
# first number of seconds, or after the second.
_QUIET_SECONDS, _MAX_WAIT_SECONDS = 0.08, 0.3
_MAX_WORKERS = 4  # on a CPU
_MAX_DEPTH = 3  # batches that have given way on one thread
_OWN_SHARE = 0.5  # of the time that a batch has given way: so long it plays before it does again
MAX_STEPS = 1000
_SHUTTING_DOWN = "the server is shutting down: the game is saved, come back later"
_LARGEST_SEED = 2**31 - 1

_MAX_FAILURES = 3  # batches in a row that end with an internal error

Health = Literal["ready", "warming up", "failing", "shutting down"]


class _StoppedError(Exception):
    """Every player of a batch has stopped their turn."""


@dataclasses.dataclass(kw_only=True)
class _Run:
    """A batch that is being played.

    Attributes:
        batch: Its requests.
        depth: Number of batches that gave way to it on its thread.
        steps_left: Denoising steps to go.
        plays_until: Time until which it does not give way.
        paused: Seconds for which it gave way.
    """

    batch: list[TurnRequest]
    depth: int
    steps_left: int
    plays_until: float = 0.0
    paused: float = 0.0


class Engine:
    """Plays the turns of a store's games in batches, on its own threads.

    Args:
        player: The player; its window is the largest that a game may have.
        store: The games.
        batch_sizes: Sizes in ascending order; the last is the largest batch.
        workers: Number of batches played in parallel, which share the waiting requests.
        max_steps: Most denoising steps of a turn. Games that ask for more are played with these.
        client_turns: Most turns of one client that wait or are played; None: no limit.
        first_pictures: Whether the picture that the model draws first is shown, or a guess of the
            clip's first frame after half of the steps.
        on_end: Called with each request that has ended.

    Attributes:
        on_change: Called with each request whose status or progress has changed; must not block.
    """

    def __init__(
        self,
        player: Player,
        store: GameStore,
        *,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        workers: int = 1,
        max_steps: int = MAX_STEPS,
        client_turns: int | None = None,
        first_pictures: bool = True,
        on_end: Callable[[TurnRequest], None] = lambda request: None,
    ):
        self.on_change: Callable[[TurnRequest], None] = lambda request: None
        self.player, self.store, self.batch_sizes = player, store, tuple(batch_sizes)
        self.max_steps, self.client_turns, self._on_end = max_steps, client_turns, on_end
        self._batches = BatchPlayer(
            player, store, batch_sizes=self.batch_sizes, first_pictures=first_pictures
        )
        self._waiting: FairQueue[TurnRequest] = FairQueue(lambda request: request.client)
        self._playing: list[TurnRequest] = []
        self._failures = 0  # internal errors in a row
        self._largest = self.batch_sizes[-1]  # size that is compiled; 0 before there is one
        self._idle_workers = workers
        self._lock = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"engine-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def warm_up(self, on_progress: Callable[[int], None] = lambda size: None) -> None:
        """Compiles the programs of every batch size, the smallest first.

        Turns wait for the first of them, and are then played in batches of the compiled sizes.
        """
        self._largest = 0
        try:
            for size in self.batch_sizes:
                if self._closing:
                    return
                on_progress(size)
                self._batches.compile(size)
                with self._lock:
                    self._largest = size
                    self._lock.notify_all()
        finally:
            with self._lock:
                self._largest = self.batch_sizes[-1]
                self._lock.notify_all()

    @property
    def compiled(self) -> int:
        """Largest batch size that is compiled; 0 while turns wait for the first."""
        return self._largest

    @property
    def health(self) -> Health:
        """The state of the engine; `failing` after several internal errors in a row."""
        if self._closing:
            return "shutting down"
        if not self._largest:
            return "warming up"
        alive = all(thread.is_alive() for thread in self._threads)
        return "ready" if alive and self._failures < _MAX_FAILURES else "failing"

    def count_turns(self) -> tuple[int, int]:
        """Returns how many turns wait, and how many are being played."""
        with self._lock:
            return len(self._waiting), len(self._playing)

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
        client: str = "",
    ) -> TurnRequest:
        """Queues a turn.

        Args:
            game: Id of the game.
            instruction: The player's instruction.
            after: Number of earlier turns to keep; the new turn replaces the others. None: all.
            seed: Seed of the turn's noise; the game's if None.
            window: Turns of context that the model sees; the game's if None.
            steps: Denoising steps; the game's if None.
            level: Motion level; 0 keeps the model's own.
            client: Who asks, for fair turns.

        Raises:
            UserError: There is no such game, another of its turns is waiting, the client has too
                many turns, or the turn cannot be played.
        """
        instruction = instruction.strip()
        self.check_instruction(instruction)
        levels = self.player.protocol.motion_levels
        if level and level not in levels:
            raise UserError(f"motion level {level}: expected one of {list(levels)}")
        self.check_settings(seed=seed, window=window, steps=steps)
        with self.store.use(game, client=client) as found:
            turns = len(found.turns)
            if after is not None and not 0 <= after <= turns:
                raise UserError(f"after turn {after}: expected 0 to {turns}, the turns of the game")
            request = TurnRequest(
                game=game,
                instruction=instruction,
                after=turns if after is None else after,
                seed=found.seed if seed is None else seed,
                window=found.window if window is None else window,
                steps=min(found.steps if steps is None else steps, self.max_steps),
                level=level,
                client=client,
                on_end=self._end_of,
                on_change=self.on_change,
            )
            with self._lock:
                if self._closing:
                    raise UserError(_SHUTTING_DOWN)
                if self.request_of(game) is not None:
                    raise UserError("a turn of this game is being played: wait for it, or stop it")
                self._check_turns(client)
                self.store.pin(game)
                self._waiting.append(request)
                self._lock.notify_all()
        request.on_change(request)
        return request

    def _check_turns(self, client: str) -> None:
        """Raises UserError if a client has too many turns already."""
        playing = sum(r.client == client and not r.ended for r in self._playing)
        turns = self._waiting.count(client) + playing
        if self.client_turns is not None and turns >= self.client_turns:
            raise UserError(
                f"{turns} of your turns are waiting or being played, the most that this server "
                "allows: wait for one"
            )

    def _end_of(self, request: TurnRequest) -> None:
        self.store.unpin(request.game)
        self._on_end(request)

    def check_instruction(self, instruction: str) -> None:
        """Raises UserError if an instruction cannot be played."""
        if not instruction:
            raise UserError("expected an instruction, found nothing: say what happens next")
        self.check_length(instruction)
        check_characters(instruction)
        self.player.check_instruction(instruction)

    def check_length(self, text: str) -> None:
        """Raises UserError if a player's text has more characters than any caption's tokens."""
        if len(text) > MAX_CHARACTERS:
            raise UserError(
                f"expected an instruction of at most {MAX_CHARACTERS} characters, found "
                f"{len(text)}: use fewer words"
            )

    def check_settings(self, *, seed: Any, window: Any, steps: Any) -> None:
        """Raises UserError if a value is not a whole number in its range; None is skipped."""
        for name, value, low, high in (
            ("seed", seed, 0, _LARGEST_SEED),
            ("window", window, 1, self.player.window),
            ("steps", steps, 1, self.max_steps),
        ):
            if value is not None and not (_is_whole(value) and low <= value <= high):
                raise UserError(
                    f"{name}: expected a whole number, {low} to {high}, found {shown(value)}"
                )

    def request_of(self, game: str) -> TurnRequest | None:
        """Returns the request of a game that is waiting or being played, if there is one."""
        with self._lock:
            for request in (*self._playing, *self._waiting):
                if request.game == game and not request.ended:
                    return request
        return None

    def queue_position(self, request: TurnRequest) -> int:
        """Returns how many requests wait before this one; 0: it is next, or being played."""
        with self._lock:
            waiting = list(self._waiting)
            return waiting.index(request) if request in waiting else 0

    def stop(self, game: str) -> bool:
        """Stops the turn of a game, which stays as it was; returns whether there was one."""
        with self._lock:
            request = self.request_of(game)
            if request is None:
                return False
            request.stop_requested = True
            with contextlib.suppress(ValueError):  # it is being played
                self._waiting.remove(request)
                request.end("stopped")
            return True

    def close(self, *, seconds: float = 0.0) -> None:
        """Refuses new requests, ends those that wait, and ends the threads.

        Args:
            seconds: Time for turns that are being played; then they are stopped.
        """
        with self._lock:
            self._closing = True
            for request in self._waiting:
                request.end("stopped", error=_SHUTTING_DOWN)
            self._waiting.clear()
            self._lock.notify_all()
            self._lock.wait_for(lambda: not self._playing, seconds)
            for request in self._playing:
                request.stop_requested = True
        for thread in self._threads:
            thread.join()
        self._batches.close()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closing or (self._waiting and self._largest))
                if self._closing:
                    return
            self._wait_for_batch()
            with self._lock:
                batch = self._take_batch()
                self._idle_workers -= 1
            if batch:  # another worker may have taken the requests
                self._run(batch, depth=0)
            with self._lock:
                self._idle_workers += 1

    def _run(self, batch: list[TurnRequest], *, depth: int) -> None:
        """Plays a batch that was taken, and ends all of its requests."""
        failed = False
        try:
            self._play(batch, depth=depth)
        except Exception:  # a bug must not end the other games
            failed = True
            logging.getLogger(__name__).exception("a batch of turns failed")
        with self._lock:
            self._failures = self._failures + 1 if failed else 0
            for request in batch:
                if not request.ended:
                    request.end(
                        "failed", error="an internal error: the game is unchanged, try again"
                    )
                self._playing.remove(request)
            self._lock.notify_all()

    def _wait_for_batch(self) -> None:
        """Waits a moment for requests that arrive together."""
        deadline, count = time.monotonic() + _MAX_WAIT_SECONDS, 0
        while count != (waiting := self.count_turns()[0]) and time.monotonic() < deadline:
            count = waiting
            time.sleep(_QUIET_SECONDS)

    def _take_batch(self) -> list[TurnRequest]:
        """Takes the first request, and later ones that can be played in the same batch.

        Takes no more than a worker's share, so that every idle worker gets some.
        """
        if not self._waiting:
            return []
        share = min(self._largest, math.ceil(len(self._waiting) / self._idle_workers))
        return self._take(self._waiting, most=share)

    def _take(self, found: Iterable[TurnRequest], *, most: int) -> list[TurnRequest]:
        """Moves requests with the steps of the first one from those that wait to those played."""
        batch: list[TurnRequest] = []
        for request in list(found):
            if len(batch) < most and request.steps == (batch or [request])[0].steps:
                batch.append(request)
                self._waiting.remove(request)
                request.status, request.started = "playing", time.monotonic()
        self._playing += batch
        for request in (*batch, *self._waiting):  # the others are further ahead
            request.on_change(request)
        return batch

    def _give_way(self, run: _Run) -> None:
        """Plays turns that are to come before the rest of a batch (see the module's head)."""
        start = time.monotonic()
        with self._lock:
            idle = self._idle_workers or not self._waiting
            if idle or self._closing or run.depth >= _MAX_DEPTH or start < run.plays_until:
                return
            turns = collections.Counter(request.client for request in self._playing)
            greedy = any(turns[request.client] > 1 for request in run.batch)
            first: dict[str, TurnRequest] = {}
            for request in self._waiting:
                if not turns[request.client] and (greedy or request.steps < run.steps_left):
                    first.setdefault(request.client, request)
            batch = self._take(first.values(), most=self._largest)
        if batch:
            self._run(batch, depth=run.depth + 1)
            seconds = time.monotonic() - start
            run.paused += seconds
            run.plays_until = time.monotonic() + _OWN_SHARE * seconds

    def _play(self, batch: list[TurnRequest], *, depth: int) -> None:
        try:
            output = self._play_batch(batch, depth=depth)
        except _StoppedError:
            for request in batch:
                request.end("stopped", error=_SHUTTING_DOWN if self._closing else "")
            return
        except UserError as error:
            if len(batch) > 1:  # play the turns one by one, so that only the failing one fails
                for request in batch:
                    self._play([request], depth=depth)
                return
            problem = str(error)
            if isinstance(error, NonFiniteError):
                problem = f"the clip could not be generated: try another seed ({error})"
            batch[0].end("failed", error=problem)
            return
        self._batches.save(batch, output)

    def _play_batch(self, batch: list[TurnRequest], *, depth: int) -> TurnOutput:
        start, paused = time.monotonic(), 0.0  # before the clip's first step
        run = _Run(batch=batch, depth=depth, steps_left=batch[0].steps)

        def on_progress(stage: str, step: int, total: int) -> None:
            if all(request.stop_requested for request in batch):
                raise _StoppedError
            nonlocal start, paused
            left = None
            if stage == "decoder":
                run.steps_left = total - step
                if step:
                    took = time.monotonic() - start - (run.paused - paused)
                    left = took / step * (total - step)
                else:
                    start, paused = time.monotonic(), run.paused
            for request in batch:
                request.progress(stage, step, total, left)
            if stage != "vae":  # so close to its end, a batch does not give way
                self._give_way(run)

        return self._batches.play(batch, on_progress=on_progress)


def whole_number(name: str, value: Any) -> int:
    """Returns a value of any type that must be a whole number.

    Raises:
        UserError: The value is not a whole number.
    """
    if not _is_whole(value):
        raise UserError(f"{name}: expected a whole number, found {shown(value)}")
    return int(value)


def _is_whole(value: Any) -> bool:
    """Returns whether a value of any type is a whole number; browsers send numbers as floats."""
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


def suitable_batches() -> tuple[tuple[int, ...], int]:
    """Returns the batch sizes and the number of workers for this machine's devices.

    An accelerator plays one batch at a time. On a CPU each core plays a smaller one: two batches
    of four in parallel finish sooner than one of eight.
    """
    if jax.default_backend() != "cpu":
        return BATCH_SIZES, 1
    workers = min(os.cpu_count() or 1, _MAX_WORKERS)
    return BATCH_SIZES if workers == 1 else BATCH_SIZES[:-1], workers
