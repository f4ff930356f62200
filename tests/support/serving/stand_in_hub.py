"""A hub on a local port: answers what `huggingface_hub` asks for listings, files and uploads."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

Files = dict[str, bytes]


class StandInHub:
    """Repositories by kind and name, each a list of commits on branches, and the requests so far.

    Every commit holds all files.
    """

    def __init__(self) -> None:
        self.commits: dict[str, Files] = {}
        self.branches: dict[tuple[str, str, str], str] = {}  # kind, name, branch
        self.created: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.url = ""

    def commit(self, name: str, files: Files, *, kind: str = "models", branch: str = "main") -> str:
        """Adds a commit that holds these files alone, and returns its hash."""
        sha = hashlib.sha1(f"{len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[kind, name, branch] = sha
        return sha

    def find(self, kind: str, name: str, revision: str) -> str | None:
        """Returns the commit of a branch or a hash; "" if there is no such repository."""
        if not any(key[:2] == (kind, name) for key in self.branches):
            return ""
        found = self.branches.get((kind, name, revision))
        return found or (revision if revision in self.commits else None)


def _handler(hub: StandInHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def reply(self, body: Any, status: int = 200, **headers: str) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            headers = {"Content-Length": str(len(data)), **headers}
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def missing(self, code: str) -> None:
            self.reply({"error": code}, 404, X_Error_Code=code, X_Error_Message=code)

        def at(self, kind: str, name: str, revision: str) -> str | None:
            found = hub.find(kind, name, unquote(revision))
            if found:
                return found
            self.missing("RevisionNotFound" if found is None else "RepoNotFound")
            return None

        def do_GET(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            path = unquote(urlsplit(self.path).path)
            if match := re.fullmatch(r"/api/(\w+)/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                kind, name, revision = match[1], match[2], match[3] or "main"
                if sha := self.at(kind, name, revision):
                    listed = [{"rfilename": file} for file in hub.commits[sha]]
                    self.reply({"id": name, "sha": sha, "siblings": listed, "private": False})
            elif match := re.fullmatch(r"/api/(\w+)/([^/]+/[^/]+)/tree/([^/]+).*", path):
                if sha := self.at(*match.groups()):
                    files = hub.commits[sha].items()
                    rows = [
                        {"type": "file", "path": file, "size": len(data), "oid": _etag(data)}
                        for file, data in files
                    ]
                    self.reply(rows)
            elif match := re.fullmatch(
                r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path
            ):
                if sha := self.at(match[1] or "models", match[2], match[3]):
                    data = hub.commits[sha].get(match[4])
                    if data is None:
                        self.missing("EntryNotFound")
                    else:
                        self.reply(data, ETag=f'"{_etag(data)}"', X_Repo_Commit=sha)
            else:
                self.missing("EntryNotFound")

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = unquote(urlsplit(self.path).path)
            if path == "/api/repos/create":
                made = json.loads(body)
                kind, name = f"{made['type']}s", f"{made['organization']}/{made['name']}"
                hub.created.append(made)
                if hub.find(kind, name, "main") == "":
                    hub.commit(name, {}, kind=kind)
                self.reply({"url": f"{hub.url}/{name}", "name": name})
            elif path == "/api/validate-yaml":
                self.reply({"errors": [], "warnings": []})
            elif match := re.fullmatch(r"/api/(\w+)/([^/]+/[^/]+)/branch/(.+)", path):
                if sha := self.at(match[1], match[2], "main"):
                    hub.branches[match[1], match[2], match[3]] = sha
                    self.reply({})
            elif match := re.fullmatch(r"/api/(\w+)/([^/]+/[^/]+)/preupload/(.+)", path):
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                self.reply({"files": files})
            elif match := re.fullmatch(r"/api/(\w+)/([^/]+/[^/]+)/commit/(.+)", path):
                if sha := self.at(*match.groups()):
                    kind, name, branch = match.groups()
                    files = dict(hub.commits[sha])
                    for line in map(json.loads, body.splitlines()):
                        if line["key"] == "file":
                            value = line["value"]
                            files[value["path"]] = base64.b64decode(value["content"])
                    made = hub.commit(name, files, kind=kind, branch=branch)
                    self.reply({"commitUrl": f"{hub.url}/{name}/commit/{made}", "commitOid": made})
            else:
                self.missing("EntryNotFound")

    return Handler


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextlib.contextmanager
def serve_hub() -> Iterator[StandInHub]:
    """Serves a hub on a free port of this machine until the block ends."""
    hub = StandInHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def using_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[StandInHub]:
    """A hub on this machine that `huggingface_hub` uses, with a cache of its own."""
    with serve_hub() as hub:
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setenv("HF_TOKEN", "none")
        yield hub
