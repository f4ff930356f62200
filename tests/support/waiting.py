"""Waits for what another thread or process does."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], *, seconds: float = 30) -> None:
    """Returns once the condition holds; fails if it does not within these seconds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
