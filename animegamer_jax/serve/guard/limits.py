"""What one client may do, and all of them together: rates, files that are worked on, uploads."""

import collections
import contextlib
import dataclasses
import ipaddress
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from animegamer_jax.errors import UserError

MAX_UPLOAD_MB = 256  # of one request
MAX_UPLOAD_FILES = 4  # of one request
MAX_BODY_BYTES = 1 << 20  # of any other request
_MAX_FILE_WORK = 2  # of one client at a time: loading, packing, copying a game, reading a picture
_MAX_CLIENTS = 10_000  # clients whose request rates are kept
_FRESH_SECONDS = 600.0  # an upload is not deleted sooner, even when room is short
_LOGIN_SECONDS, _MAX_LOGIN_SECONDS = 1.0, 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a client, and of all of them together.

    Attributes:
        client_requests: Most requests of one client in a minute, without the page's own files.
        client_connections: Most requests of one client at the same time.
        client_upload_mb: Most MB that one client may upload in an hour.
        uploads_mb: Most MB of uploads and copies of clips that are kept, of all clients together.
        uploads_minutes: Age in minutes after which uploaded files are deleted.
    """

    client_requests: int = 1200
    client_connections: int = 100
    client_upload_mb: int = 512
    uploads_mb: int = 4096
    uploads_minutes: int = 120


def client_of(host: str | None) -> str:
    """Returns the client of an address: for IPv6, the network of 64 bits, which one host has."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return host or ""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def current_client() -> str:
    """Returns the client whose request Gradio is handling: account or address; "" outside one."""
    from gradio.context import LocalContext

    request = LocalContext.request.get(None)
    if request is None:
        return ""
    return name_client(request.username, request.client.host if request.client else None)


def name_client(account: str | None, host: str | None) -> str:
    """Returns the client of a request: an account, or else an address (`client_of`)."""
    return f"account {account}" if account else client_of(host)


class Rate:
    """Bounds what each client uses, as a bucket that fills again steadily.

    Args:
        most: Capacity of a bucket.
        seconds: Time in which an empty one fills.
    """

    def __init__(self, most: int | float, seconds: float):
        self._most, self._speed = most, most / seconds
        self._used: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def take(self, client: str, amount: int | float = 1) -> float:
        """Takes an amount; returns 0.0, or the seconds to wait if there is not enough."""
        with self._lock:
            now = time.monotonic()
            used = self._used_now(client, now)
            if used + amount > self._most:
                return (used + amount - self._most) / self._speed
            if len(self._used) >= _MAX_CLIENTS:
                self._used = {c: u for c, u in self._used.items() if self._used_now(c, now)}
            self._used[client] = (used + amount, now)
            return 0.0

    def _used_now(self, client: str, now: float) -> float:
        used, then = self._used.get(client, (0.0, now))
        return max(0.0, used - (now - then) * self._speed)


class Logins:
    """Delays a client's next login after wrong passwords: 1 s, then twice as long each time."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[int, float]] = {}

    def wait(self, client: str) -> float:
        """Returns the seconds until the client may try again; counts the attempt if it may now.

        An attempt counts as wrong until `succeeded`, so attempts side by side gain nothing.
        """
        failures, until = self._failed.get(client, (0, 0.0))
        now = time.monotonic()
        if now < until:
            return until - now
        if len(self._failed) >= _MAX_CLIENTS:
            self._failed = {c: f for c, f in self._failed.items() if f[1] > now}
        delay = min(_LOGIN_SECONDS * 2**failures, _MAX_LOGIN_SECONDS)
        self._failed[client] = (failures + 1, now + delay)
        return 0.0

    def succeeded(self, client: str) -> None:
        self._failed.pop(client, None)


class FileWork:
    """Bounds the work on files that clients ask for, so that threads remain for the others."""

    def __init__(self) -> None:
        self._working: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def slot(self, client: str) -> Iterator[None]:
        """Counts a block as a client's work.

        Raises:
            UserError: The client has enough of it going on.
        """
        with self._lock:
            if client and self._working[client] >= _MAX_FILE_WORK:
                raise UserError(
                    f"{_MAX_FILE_WORK} files of yours are being worked on: try again after that"
                )
            self._working[client] += 1
        try:
            yield
        finally:
            with self._lock:
                self._working[client] -= 1
                if not self._working[client]:
                    del self._working[client]


class Uploads:
    """The folder in which Gradio keeps uploads, and copies of what a page shows.

    Args:
        folder: Folder, of this server only.
        max_bytes: Most bytes in it.
        max_seconds: Age after which files are deleted.
    """

    def __init__(self, folder: Path, *, max_bytes: int, max_seconds: float):
        self.folder, self.max_bytes, self.max_seconds = folder, max_bytes, max_seconds
        self._reserved = 0
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size, _ in self._files())

    def _files(self) -> list[tuple[float, int, Path]]:
        """Returns time, size and path of all files, oldest first."""
        found = []
        for path in self.folder.rglob("*"):
            with contextlib.suppress(OSError):  # deleted meanwhile
                if path.is_file():
                    state = path.stat()
                    found.append((state.st_mtime, state.st_size, path))
        return sorted(found)

    def sweep(self, *, needed: int = 0) -> int:
        """Deletes old files; returns the bytes of the others.

        Args:
            needed: Bytes to make room for, by deleting files that are not quite fresh, too.
        """
        found, now = self._files(), time.time()
        size = sum(size for _, size, _ in found)
        for changed, bytes_, path in found:
            short = size + needed > self.max_bytes and now - changed > _FRESH_SECONDS
            if short or now - changed > self.max_seconds:
                with contextlib.suppress(OSError):
                    path.unlink()
                    size -= bytes_
                with contextlib.suppress(OSError):  # the folder has other files
                    path.parent.rmdir()
        return size

    @contextlib.contextmanager
    def room(self, needed: int) -> Iterator[bool]:
        """Reserves room for an upload; yields whether there is enough."""
        with self._lock:
            fits = self.sweep(needed=needed + self._reserved) + self._reserved + needed
            fits = fits <= self.max_bytes
            self._reserved += needed if fits else 0
        try:
            yield fits
        finally:
            with self._lock:
                self._reserved -= needed if fits else 0
