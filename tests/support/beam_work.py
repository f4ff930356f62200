"""What Beam's workers are given to do in `test_beam.py`: they import it."""

import os
import signal
import time
from pathlib import Path

from animegamer_jax.data.films import beam
from animegamer_jax.errors import UserError


def note(number: int, *, folder: Path) -> str:
    """Writes who did it."""
    beam.tell(f"item {number}", 1, 1)
    (folder / str(number)).write_text(str(os.getpid()))
    return "a result that nobody wants"


def refuse(number: int) -> None:
    raise UserError(f"film {number}: expected a film [of any kind], found none: check it")


def wait(number: int, *, folder: Path) -> None:
    """Notes its process, and waits for longer than a test may take."""
    (folder / str(os.getpid())).touch()
    time.sleep(600)


def die(number: int, *, folder: Path) -> None:
    """The first one that two processes have begun with ends its own; others wait."""
    try:
        (folder / "first").touch(exist_ok=False)
    except FileExistsError:
        wait(number, folder=folder)
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def fail(number: int) -> None:
    raise ArithmeticError(f"a mistake of ours with {number}")
