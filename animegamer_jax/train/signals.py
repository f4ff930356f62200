"""SIGTERM and Ctrl-C during training: stop after the current step, on all hosts alike."""

import os
import signal
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopSignals:
    """Records SIGTERM and Ctrl-C within the block; a second Ctrl-C stops at once.

    With several hosts, one of them may get the signal: JAX catches SIGTERM with a handler of its
    own and makes all hosts agree on the step after which to stop. Ctrl-C is passed on as SIGTERM.

    Attributes:
        number: The signal received, None before there is one.
    """

    def __init__(self):
        self.number: int | None = None
        self._alone = jax.process_count() == 1
        self._handled = (signal.SIGTERM, signal.SIGINT) if self._alone else (signal.SIGINT,)

    def __enter__(self) -> "StopSignals":
        self._former = {number: signal.signal(number, self._handle) for number in self._handled}
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.number == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.number = number
        if not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)

    def received(self, step: int) -> bool:
        """Returns whether to stop after this step; the same on all hosts."""
        if self._alone:
            return self.number is not None
        if not multihost_utils.reached_preemption_sync_point(step):
            return False
        self.number = self.number or signal.SIGTERM
        return True
