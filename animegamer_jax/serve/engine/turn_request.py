"""A turn that a player asked for: its settings, its progress and its end."""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from animegamer_jax.game.saved.turns import Turn

Status = Literal["waiting", "playing", "done", "stopped", "failed"]


class FirstPicture(NamedTuple):
    """The picture that a model draws first, or a guess of a clip's first frame.

    Attributes:
        jpeg: The picture, a JPEG.
        step: Denoising steps of the clip after which it was made.
        steps: Denoising steps of the turn.
    """

    jpeg: bytes
    step: int
    steps: int


@dataclasses.dataclass(kw_only=True, eq=False)
class TurnRequest:
    """A turn that a player asked for.

    Attributes:
        game: Id of the game.
        instruction: The player's instruction.
        after: Number of earlier turns of the game to keep.
        seed: Seed of the turn's noise.
        window: Turns of context that the model sees.
        steps: Denoising steps.
        level: Motion level that the player set, or 0.
        client: Who asked, for fair turns.
        on_end: Called once, when the request has ended.
        on_change: Called when the status, the progress, the place in the queue or the first picture
            has changed.
        submitted, started, ended_at: Times of `time.monotonic`; 0.0 before.
        status: State of the request.
        stage: Part of the turn that is being played: "mllm", "decoder" or "vae".
        step, num_steps: Steps done and number of steps of that part.
        seconds_left: Estimate for the batch; None before the first denoising step.
        first_picture: The first picture; None before there is one.
        turn: The finished turn.
        error: Why the turn failed, in one line.
    """

    game: str
    instruction: str
    after: int
    seed: int
    window: int
    steps: int
    level: int
    client: str = ""
    on_end: Callable[["TurnRequest"], None] = lambda request: None
    on_change: Callable[["TurnRequest"], None] = lambda request: None
    submitted: float = dataclasses.field(default_factory=time.monotonic)
    started: float = 0.0
    ended_at: float = 0.0
    status: Status = "waiting"
    stage: str = ""
    step: int = 0
    num_steps: int = 0
    seconds_left: float | None = None
    first_picture: FirstPicture | None = None
    turn: Turn | None = None
    error: str = ""
    stop_requested: bool = False
    _ended: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the request has ended; returns False after `seconds`."""
        return self._ended.wait(seconds)

    def end(self, status: Status, *, error: str = "") -> None:
        """Sets the final status and wakes whoever waits."""
        self.status, self.error, self.ended_at = status, error, time.monotonic()
        try:
            self.on_end(self)
        finally:
            self._ended.set()
            self.on_change(self)

    def progress(self, stage: str, step: int, num_steps: int, seconds_left: float | None) -> None:
        """Sets the progress of the part that is being played."""
        self.stage, self.step, self.num_steps = stage, step, num_steps
        self.seconds_left = seconds_left
        self.on_change(self)

    def show(self, picture: FirstPicture) -> None:
        """Sets the first picture of a turn that has not ended, and is not to be stopped."""
        if not (self.ended or self.stop_requested):
            self.first_picture = picture
            self.on_change(self)
