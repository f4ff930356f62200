"""Progress on standard error: one line that changes on a terminal, else a line now and then."""

import sys
import time
from collections.abc import Callable

_LINE_EVERY = 10.0  # seconds between lines where there is no terminal


def say(line: str) -> None:
    """A line at once, such as of a server that is slow."""
    print(line, file=sys.stderr, flush=True)


def teller(what: str, unit: str) -> Callable[[int, int], None]:
    """A function to be called with how many are done and how many there are.

    Args:
        what: is being done, such as "played".
        unit: what is counted, such as "turns".
    """
    told = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal told
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if done != total and not terminal and now - told < _LINE_EVERY:
            return
        told = now
        begin, end = ("\r", "\n" if done == total else "") if terminal else ("", "\n")
        print(f"{begin}{what} {done} of {total} {unit}", end=end, file=sys.stderr, flush=True)

    return tell
