"""The page: its files, sent compressed, and the page that describes the API."""

import gzip
import hashlib
import mimetypes
from pathlib import Path

from fastapi import FastAPI, Request, Response

_FILES = Path(__file__).with_name("files")
_COMPRESSED = (".html", ".js", ".css", ".json", ".svg")
_LEAST_BYTES = 400  # below it, compression saves nothing


class _Asset:
    """A file of the page, read and compressed once."""

    def __init__(self, path: Path):
        self.plain = path.read_bytes()
        self.media = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        if path.suffix == ".js":
            self.media = "text/javascript"
        if path.suffix in _COMPRESSED:
            self.media += "; charset=utf-8"
        self.tag = f'"{hashlib.sha256(self.plain).hexdigest()[:16]}"'
        small = len(self.plain) < _LEAST_BYTES or path.suffix not in _COMPRESSED
        self.small = None if small else gzip.compress(self.plain, 9, mtime=0)

    def response(self, request: Request) -> Response:
        """Answers with the file, or with 304 if the browser has it."""
        # The browser asks each time: after an update of the server it has the new page at once.
        headers = {"etag": self.tag, "cache-control": "no-cache", "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        if self.small is not None and "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            return Response(self.small, headers=headers, media_type=self.media)
        return Response(self.plain, headers=headers, media_type=self.media)


def add_page(app: FastAPI) -> None:
    """Adds the page and its files to an application."""
    files = {
        path.relative_to(_FILES).as_posix(): _Asset(path)
        for path in _FILES.rglob("*")
        if path.is_file()
    }

    @app.get("/", include_in_schema=False)
    def page(request: Request) -> Response:
        return files["index.html"].response(request)

    @app.get("/api", include_in_schema=False)
    def description(request: Request) -> Response:
        return files["api.html"].response(request)

    @app.get("/assets/{name:path}", include_in_schema=False)
    def asset(request: Request, name: str) -> Response:
        if name not in files:
            return Response("no such file", 404)
        return files[name].response(request)
