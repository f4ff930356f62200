"""One process at a time writes to a folder."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import absolute, is_bucket


@contextlib.contextmanager
def only_writer(path: epath.PathLike, *, what: str = "") -> Iterator[None]:
    """Keeps out other processes that write to the same folder or file while the block runs.

    The lock is one of the operating system's, on an empty file next to the folder,
    `.NAME.lock`, which is removed at the end. It ends with the process, however that ends, so a
    file that a killed process left locks nobody out. Nothing is locked in a bucket, nor where the
    file system has no locks or the lock's file cannot be made. Over NFS it depends on the mount
    whether other machines see it.

    Args:
        path: The folder or file, which need not exist.
        what: Kind of the work, if other kinds can run there at the same time.

    Raises:
        UserError: Another process is writing there.
    """
    if is_bucket(path):
        yield
        return
    target = Path(os.path.realpath(absolute(path)))
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(_locked_file(target, what))
        except OSError:  # whatever is wrong there, the command finds it as well
            file = -1
        if file is None:
            raise UserError(
                f"{os.fspath(path)}: another process is writing there: wait until it ends, or "
                "choose another place"
            )
        yield


@contextlib.contextmanager
def _locked_file(target: Path, what: str) -> Iterator[int | None]:
    """Locks a file next to `target`; None: another process holds it.

    Raises:
        OSError: It cannot be made, or not be locked.
    """
    made = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    place = target.parent
    if not os.access(place, os.W_OK) and target.is_dir():  # such as a volume at the root
        place = target
    name = place / f".{target.name}{what and '.'}{what}.lock"
    try:
        file = _lock(name)
        try:
            yield file
        finally:
            if file is not None:
                name.unlink(missing_ok=True)  # while it is locked: others then make a new one
                os.close(file)
    finally:
        for parent in made:
            with contextlib.suppress(OSError):  # it is no longer empty
                parent.rmdir()


def _lock(name: Path) -> int | None:
    while True:
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                return file
            os.close(file)  # its holder removed it in between
        except BlockingIOError:
            os.close(file)
            return None
        except OSError:
            os.close(file)
            raise
