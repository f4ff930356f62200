"""Paths of folders, local or in a bucket, and errors of their storage in one line."""

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Iterator

from etils import epath

from animegamer_jax.errors import UserError
from animegamer_jax.extras import how_to_install, is_installed

_NEEDS_GCSFS = f"a bucket needs gcsfs: {how_to_install('bucket')}"

_TEMPORARY = re.compile(r"\.part-[0-9a-f]{8}$")


def absolute(path: epath.PathLike) -> epath.Path:
    """Makes a local path absolute, as Orbax needs it, and leaves an address in a bucket as it is.

    Raises:
        UserError: The path is empty, or in a bucket and gcsfs is not installed.
    """
    text = os.fspath(path)
    if not text.strip():
        raise UserError("expected a folder's path, found an empty one")
    if is_bucket(text):
        # It also prints each error that it raises.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        if text.startswith("gs://") and not is_installed("gcsfs"):
            raise UserError(f"{text}: {_NEEDS_GCSFS}")
        return epath.Path(text)
    return epath.Path(os.path.abspath(os.path.expanduser(text)))


def temporary_name(name: str) -> str:
    """Returns a name for a file that is being written, next to the one that it will replace."""
    return f"{name}.part-{secrets.token_hex(4)}"


def is_free(path: epath.Path) -> bool:
    """Returns whether nothing is there, or a folder that is empty but for temporary files.

    A process that was killed while it wrote the first file of a folder leaves one of those.
    """
    if not path.exists():
        return True
    return path.is_dir() and all(_TEMPORARY.search(child.name) for child in path.iterdir())


def refuse_existing(path: epath.Path, *, overwrite: bool | None) -> None:
    """Checks that `path` may be written: it is free, or a folder of ours that may be replaced.

    Args:
        path: Path of the new folder.
        overwrite: Whether a folder of ours may be replaced; None: the command has no such option.

    Raises:
        UserError: The path is taken; with `overwrite`, only by a folder without our config.json.
    """
    if is_free(path):
        return
    if not overwrite:
        option = "" if overwrite is None else ", or pass --overwrite"
        raise UserError(f"{path}: already there: choose another folder{option}")
    if not (path / "config.json").exists():
        raise UserError(
            f"{path}: not overwritten, because it holds no config.json: choose another folder"
        )


# Files by which a reader knows that a folder is complete.
_LAST = ("config.json", "set.json")


def move_into_place(temporary: epath.Path, path: epath.Path) -> None:
    """Renames a finished folder to `path`, then removes the folder that was there before.

    In a bucket, where nothing can be renamed, the files are copied, `config.json` last, and after
    an error those that were copied are removed.
    """
    if is_bucket(path):
        _copy_into_place(temporary, path)
    elif not path.exists():
        temporary.rename(path)
    else:
        _replace(temporary, path)


def _replace(temporary: epath.Path, path: epath.Path) -> None:
    old = path.parent / f"{path.name}.old-{os.getpid()}"
    path.rename(old)
    temporary.rename(path)
    old.rmtree()


def files_under(folder: epath.Path) -> Iterator[epath.Path]:
    """Yields every file of a folder and of the folders in it."""
    for child in folder.iterdir():
        if child.is_dir():
            yield from files_under(child)
        else:
            yield child


def _copy_into_place(temporary: epath.Path, path: epath.Path) -> None:
    files = sorted(files_under(temporary), key=lambda file: file.name in _LAST)
    if path.exists():
        for name in _LAST:
            (path / name).unlink(missing_ok=True)
        path.rmtree()
    try:
        for file in files:
            file.copy(path / file.relative_to(temporary), overwrite=True)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error says why
            path.rmtree()
        raise
    with contextlib.suppress(FileNotFoundError):  # an answer was lost, not the request
        temporary.rmtree()


# Libraries for buckets, which raise types of their own.
_BUCKET_MODULES = ("gcsfs", "google", "aiohttp", "fsspec", "botocore", "requests")
# Start of tensorstore's ValueErrors about a disk or a bucket.
_STATUS = re.compile(
    r"(RESOURCE_EXHAUSTED|PERMISSION_DENIED|NOT_FOUND|DATA_LOSS|UNAVAILABLE|INTERNAL|OUT_OF_RANGE"
    r"|INVALID_ARGUMENT|FAILED_PRECONDITION|UNAUTHENTICATED|UNKNOWN|DEADLINE_EXCEEDED|ABORTED)\b"
    r"|Error (reading|decoding|opening|writing)\b"  # of a damaged file it says no status
)
_SIGN_IN = (
    "sign in with `gcloud auth application-default login`, or let this machine's account into the "
    "bucket"
)
# Words of gcsfs and tensorstore about missing or insufficient credentials.
_REFUSED = re.compile(
    r"UNAUTHENTICATED|PERMISSION_DENIED|Forbidden|Anonymous caller|\b40[13]\b|credentials", re.I
)


def is_bucket(path: epath.PathLike) -> bool:
    """Returns whether a path is an address in a bucket."""
    return "://" in os.fspath(path)


def _lacks_credentials(error: BaseException | None) -> bool:
    """Returns whether a bucket denied access to this machine's account, or found no account."""
    while error is not None:
        if type(error).__module__.startswith("google.auth") or _REFUSED.search(str(error)):
            return True
        error = error.__cause__
    return False


def _reason(error: Exception) -> str | None:
    """Returns the reason of a storage error in a few words; None for other errors."""
    if type(error) is Exception and isinstance(error.__cause__, Exception):
        error = error.__cause__  # Orbax wraps tensorstore's errors
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, ImportError):
        return _NEEDS_GCSFS if error.name in ("gcsfs", "fsspec") else None
    status = _STATUS.match(str(error)) if isinstance(error, ValueError) else None
    of_bucket = type(error).__module__.partition(".")[0] in _BUCKET_MODULES
    if status is None and not of_bucket and not isinstance(error, OSError):
        return None
    known = re.search(
        r"No space left on device|File too large|Disk quota exceeded|Permission denied"
        r"|Read-only file system|No such file or directory",
        str(error),
    )
    if known:
        return known[0]
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= 160 else line[:157] + "..."


@contextlib.contextmanager
def user_errors(path: epath.PathLike, what: str, *, hint: str) -> Iterator[None]:
    """Turns errors of a disk or a bucket into one line: `path`, `what`, the reason, `hint`.

    If a bucket denies access, the line says how to sign in instead of `hint`.

    Raises:
        UserError: The block raised an error of storage.
    """
    try:
        yield
    except Exception as error:
        reason = _reason(error)
        if reason is None or isinstance(error, UserError):
            raise
        if is_bucket(path) and _lacks_credentials(error):
            hint = _SIGN_IN
        raise UserError(f"{os.fspath(path)}: {what}: {reason}: {hint}") from error
