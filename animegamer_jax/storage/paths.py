"""Where bundles lie: local folders and buckets, and what can go wrong there, told in one line."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator

from etils import epath

from animegamer_jax.errors import UserError


def absolute(path: epath.PathLike) -> epath.Path:
    """An absolute local path, or an address in a bucket as it is; Orbax takes no relative ones.

    Raises:
        UserError: the path is empty.
    """
    text = os.fspath(path)
    if not text.strip():
        raise UserError("expected a folder's path, found an empty one")
    if is_bucket(text):
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it prints what it raises as well
        return epath.Path(text)
    return epath.Path(os.path.abspath(os.path.expanduser(text)))


def refuse_existing(
    path: epath.Path, *, overwrite: bool | None, marker: str = "config.json"
) -> None:
    """Makes sure that `path` may be written: it is free, or a folder of ours to be replaced.

    Args:
        path: what is to be written.
        overwrite: whether a folder of ours may be replaced; None: the command has no such option.
        marker: the file that tells a folder of ours.

    Raises:
        UserError: it is taken; with `overwrite`, only if the folder does not hold `marker`.
    """
    if not path.exists():
        return
    if path.is_dir() and not any(path.iterdir()):
        return
    if not overwrite:
        option = "" if overwrite is None else ", or pass --overwrite"
        raise UserError(f"{path}: already there: choose another folder{option}")
    if not (path / marker).exists():
        raise UserError(
            f"{path}: not overwritten, because it holds no {marker}: it is something else"
        )


def move_into_place(temporary: epath.Path, path: epath.Path) -> None:
    """Renames a finished folder; one that stood there is removed only after that."""
    if not path.exists():
        temporary.rename(path)
        return
    old = path.parent / f"{path.name}.old-{os.getpid()}"
    path.rename(old)
    temporary.rename(path)
    old.rmtree()


# Libraries for buckets raise types of their own.
_BUCKET_MODULES = ("gcsfs", "google", "aiohttp", "fsspec", "botocore", "requests")
# What tensorstore's ValueErrors start with when a disk or a bucket refuses.
_STATUS = re.compile(
    r"(RESOURCE_EXHAUSTED|PERMISSION_DENIED|NOT_FOUND|DATA_LOSS|UNAVAILABLE|INTERNAL|OUT_OF_RANGE"
    r"|INVALID_ARGUMENT|FAILED_PRECONDITION|UNAUTHENTICATED|UNKNOWN|DEADLINE_EXCEEDED|ABORTED)\b"
)


_SIGN_IN = (
    "sign in with `gcloud auth application-default login`, or let this machine's account into the "
    "bucket"
)
# What gcsfs and tensorstore say to one whom they do not know, or who may not.
_REFUSED = re.compile(
    r"UNAUTHENTICATED|PERMISSION_DENIED|Forbidden|Anonymous caller|\b40[13]\b|credentials", re.I
)


def is_bucket(path: epath.PathLike) -> bool:
    """Whether a path is an address in a bucket."""
    return "://" in os.fspath(path)


def _lacks_credentials(error: BaseException | None) -> bool:
    """Whether a bucket refused this machine's account, or found none."""
    while error is not None:
        if type(error).__module__.startswith("google.auth") or _REFUSED.search(str(error)):
            return True
        error = error.__cause__
    return False


def _reason(error: Exception) -> str | None:
    """Why storage refused, in a few words; None: the error is another one's."""
    if type(error) is Exception and isinstance(error.__cause__, Exception):
        error = error.__cause__  # Orbax wraps what tensorstore raises
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, ImportError):
        needs = "needs the extra `tpu` (pip install 'animegamer-jax[tpu]')"
        return f"a bucket {needs}" if error.name in ("gcsfs", "fsspec") else None
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
def telling(path: epath.PathLike, what: str, *, mend: str) -> Iterator[None]:
    """Turns what a disk or a bucket raises into one line: `path`, `what`, the reason, `mend`.

    A bucket that refuses this machine's account has a remedy of its own.

    Raises:
        UserError: storage refused.
    """
    try:
        yield
    except Exception as error:
        reason = _reason(error)
        if reason is None or isinstance(error, UserError):
            raise
        if is_bucket(path) and _lacks_credentials(error):
            mend = _SIGN_IN
        raise UserError(f"{os.fspath(path)}: {what}: {reason}: {mend}") from error
