"""What stands before the page: hosts, limits a client, sizes of bodies, headers, the log."""

import asyncio
import collections
import dataclasses
import ipaddress
import math
import re
import socket
import time
from collections.abc import Collection
from contextlib import AsyncExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

from h11 import LocalProtocolError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from animegamer_jax.serve.guard.limits import (
    MAX_BODY_BYTES,
    MAX_UPLOAD_FILES,
    MAX_UPLOAD_MB,
    Limits,
    Logins,
    Rate,
    Uploads,
    client_of,
)
from animegamer_jax.serve.guard.monitor import PAGE_FILES, Monitor, endpoint_of

_LOCAL = ("localhost", "127.0.0.1", "::1")
_ANY = ("0.0.0.0", "::")
_FREE = (*PAGE_FILES, "/health", "/metrics")  # not counted as a client's requests
_UPLOADS = ("/gradio_api/upload", "/api/v1/games/picture", "/api/v1/games/archive")
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "media-src 'self' blob:; connect-src 'self'; manifest-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
    ),
    "x-frame-options": "SAMEORIGIN",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
}


def hosts_of(host: str, allowed: Collection[str]) -> "Hosts":
    """Returns the names under which a server may be asked for.

    Args:
        host: Address that it serves on. For all addresses, any address is allowed, and the
            machine's own name: other names may be an attacker's, who makes them mean this machine.
        allowed: Further names; `*` allows all.
    """
    names = {name.lower() for name in (*_LOCAL, host, *allowed)}
    if host in _ANY:
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return Hosts(names=frozenset(names), addresses=host in _ANY)


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Names under which a server may be asked for.

    Attributes:
        names: Names in small letters; `*` for all.
        addresses: Whether any IP address is allowed.
    """

    names: frozenset[str]
    addresses: bool

    def allow(self, header: str) -> bool:
        """Returns whether a `Host` header has one of the names."""
        try:
            name = urlsplit(f"//{header}").hostname or ""
            urlsplit(f"//{header}").port  # noqa: B018  (raises for what is no port)
        except ValueError:
            return False
        if "*" in self.names or name in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.addresses


class _RefusedError(Exception):
    """A request is refused: status, limit, reason, and seconds after which it may come again."""

    def __init__(self, status: int, limit: str, reason: str, seconds: float = 0.0):
        super().__init__(reason)
        self.status, self.limit, self.reason, self.seconds = status, limit, reason, seconds

    def response(self) -> JSONResponse:
        headers = {"retry-after": str(math.ceil(self.seconds))} if self.seconds else {}
        content = {"detail": self.reason, "error": self.reason}
        return JSONResponse(content, self.status, headers={"connection": "close", **headers})


class Guard:
    """Middleware around the page.

    Args:
        app: The page.
        hosts: Names under which the server may be asked for.
        limits: Limits of a client and of all.
        uploads: Folder of the uploads.
        monitor: Log and metrics.
        behind_proxy: Whether a trusted proxy sets the forwarded headers; else they are dropped.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Hosts,
        limits: Limits,
        uploads: Uploads,
        monitor: Monitor,
        behind_proxy: bool = False,
    ):
        self.app, self.hosts, self.limits, self.uploads = app, hosts, limits, uploads
        self.monitor, self.behind_proxy = monitor, behind_proxy
        self._requests = Rate(limits.client_requests, 60.0)
        self._upload_bytes = Rate(limits.client_upload_mb << 20, 3600.0)
        self._logins = Logins()
        self._open: collections.Counter[str] = collections.Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client, start, status = client_of((scope.get("client") or ("",))[0]), time.monotonic(), 499
        if not self.behind_proxy:
            scope["headers"] = [
                pair for pair in scope["headers"] if b"forwarded" not in pair[0].lower()
            ]

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(_HEADERS)
            with suppress(LocalProtocolError):  # uvicorn has refused the rest of the body
                await send(message)

        self._open[client] += 1
        try:
            async with AsyncExitStack() as stack:
                try:
                    receive = await self._admit(scope, receive, client, stack)
                except _RefusedError as refused:
                    self.monitor.count_refusal(refused.limit)
                    await refused.response()(scope, receive, send_guarded)
                    return
                try:
                    await self.app(scope, receive, send_guarded)
                except RuntimeError as error:
                    if not isinstance(error.__cause__, HTTPException):
                        raise
                    # Gradio refuses a session after its stream has begun: the stream ends.
                    await send({"type": "http.response.body", "body": b""})
            if endpoint_of(scope["path"]) == "/login" and status == 200:
                self._logins.succeeded(client)
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]
            self.monitor.count_request(
                client=client, method=scope["method"], path=scope["path"], status=status,
                seconds=time.monotonic() - start,
            )  # fmt: skip

    async def _admit(
        self, scope: Scope, receive: Receive, client: str, stack: AsyncExitStack
    ) -> Receive:
        """Checks a request before the page sees it; returns its checked body.

        Raises:
            _RefusedError: It is over a limit.
        """
        headers, endpoint = Headers(scope=scope), endpoint_of(scope["path"])
        if not self.hosts.allow(headers.get("host", "")):
            raise _RefusedError(
                421, "host", "this server is not known by that name: see --allowed-hosts"
            )
        if endpoint == "other":
            raise _RefusedError(404, "path", "nothing is here: the page is at /")
        if self._open[client] > self.limits.client_connections:
            raise _RefusedError(429, "connections", "too many requests at once: end some", 5.0)
        if endpoint not in _FREE and (seconds := self._requests.take(client)):
            raise _RefusedError(429, "requests", "too many requests: try again later", seconds)
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return receive
        if endpoint == "/login" and (seconds := self._logins.wait(client)):
            raise _RefusedError(
                429, "login", f"wrong password: try again in {math.ceil(seconds)} s", seconds
            )
        length = headers.get("content-length", "")
        if "transfer-encoding" in headers or not re.fullmatch(r"\d{1,15}", length):
            raise _RefusedError(
                411, "length", "expected the header Content-Length, and no Transfer-Encoding"
            )
        if endpoint not in _UPLOADS:
            if int(length) > MAX_BODY_BYTES:
                raise _RefusedError(413, "body", f"expected at most {MAX_BODY_BYTES >> 20} MB")
            return receive
        return await self._admit_upload(headers, int(length), receive, client, stack)

    async def _admit_upload(
        self, headers: Headers, length: int, receive: Receive, client: str, stack: AsyncExitStack
    ) -> Receive:
        if length > MAX_UPLOAD_MB << 20:
            raise _RefusedError(413, "upload", f"expected at most {MAX_UPLOAD_MB} MB")
        room: Any = self.uploads.room(length)
        fits = await asyncio.to_thread(room.__enter__)
        stack.push(room)
        if not fits:
            raise _RefusedError(
                507, "uploads", "no room for further uploads now: try again later", 60.0
            )
        if seconds := self._upload_bytes.take(client, length):
            raise _RefusedError(
                429, "upload bytes",
                f"more than {self.limits.client_upload_mb} MB in an hour: try again later", seconds,
            )  # fmt: skip
        return _count_files(receive, headers.get("content-type", ""))


def _count_files(receive: Receive, content_type: str) -> Receive:
    """Returns a body that ends with an error after too many parts."""
    found = re.search(r'boundary="?([^";,\s]+)', content_type)
    mark = b"--" + (found[1] if found else "").encode("latin-1")
    parts, tail = 0, b""

    async def receive_counted() -> Message:
        nonlocal parts, tail
        message = await receive()
        data = tail + message.get("body", b"")
        parts += data.count(mark)
        tail = data[-(len(mark) - 1) :]
        if parts > MAX_UPLOAD_FILES + 1:  # a mark before each part, and one at the end
            raise MultiPartException(f"expected at most {MAX_UPLOAD_FILES} files in a request")
        return message

    return receive_counted if found else receive
