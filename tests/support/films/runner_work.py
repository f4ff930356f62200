"""What the workers of `test_runners.py` and `test_beam.py` do: they import it."""

import os
import signal
import time
from pathlib import Path

from etils import epath

from animegamer_jax.errors import UserError


def note(number: int, *, folder: Path) -> str:
    """Writes who did it."""
    (folder / str(number)).write_text(str(os.getpid()))
    time.sleep(0.1)  # else one worker may do all
    return "a result that nobody wants"


def note_or_die(number: int, *, folder: Path) -> None:
    """The process that comes to the item 3 first is killed there."""
    if number == 3 and not (folder / "killed").exists():
        (folder / "killed").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    note(number, folder=folder)


def touch(path: epath.Path, *, folder: Path) -> None:
    (folder / path.name).touch()


def refuse(number: int) -> None:
    raise UserError(f"film {number}: expected a film [of any kind], found none: check it")


def wait(number: int, *, folder: Path) -> None:
    """Notes its process, and waits for longer than a test may take."""
    (folder / str(os.getpid())).touch()
    time.sleep(600)


def refuse_next_to_others(number: int, *, folder: Path) -> None:
    """The first item is refused once another process waits."""
    if number:
        wait(number, folder=folder)
    while not list(folder.iterdir()):
        time.sleep(0.05)
    refuse(number)


def die(number: int, *, folder: Path) -> None:
    """The first item's process dies once another process waits."""
    if number:
        wait(number, folder=folder)
    while not list(folder.iterdir()):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def fail(number: int) -> None:
    raise ArithmeticError(f"a mistake of ours with {number}")
