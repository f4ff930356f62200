"""A server before a bucket's server that fails for some requests.

python tests/faults/cases/failing_proxy.py HOST:PORT

It prints its own port and passes requests on. `POST /_fail` with {"first", "last", "how"} lets the
requests with these numbers fail, counted from 1 since then; `GET /_count` returns how many came.
"""

import http.client
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOW = ("503", "429", "hang up", "cut")
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, behind: str):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind, self.lock = behind, threading.Lock()
        self.count, self.first, self.last, self.how = 0, 0, 0, ""

    def next_failure(self) -> str:
        """Returns how the next request fails, or ""."""
        with self.lock:
            self.count += 1
            return self.how if self.first <= self.count <= self.last else ""

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that hung up


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Proxy

    def _pass_on(self) -> None:
        body = self._read()
        if self.path == "/_count":
            self._answer(200, json.dumps(self.server.count).encode())
        elif self.path == "/_fail":
            with self.server.lock:
                vars(self.server).update(json.loads(body) | {"count": 0})
            self._answer(200, b"{}")
        else:
            self._forward(body, self.server.next_failure())

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = _pass_on  # noqa: N815

    def _forward(self, body: bytes, failure: str) -> None:
        if failure == "hang up":
            self.close_connection = True
        elif failure in ("503", "429"):
            self._answer(int(failure), b'{"error": {"message": "try again later"}}')
        else:
            connection = http.client.HTTPConnection(self.server.behind, timeout=60)
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
            headers |= {"Host": self.server.behind, "Content-Length": str(len(body))}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            self._answer(answer.status, content, answer.getheaders(), cut=failure == "cut")

    def _read(self) -> bytes:
        if "chunked" not in (self.headers.get("transfer-encoding") or ""):
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, content: bytes, headers: Any = (), *, cut: bool = False) -> None:
        own = f"127.0.0.1:{self.server.server_port}"
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in _HOP:
                self.send_header(name, value.replace(self.server.behind, own))
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


if __name__ == "__main__":
    proxy = _Proxy(sys.argv[1])
    print(proxy.server_port, flush=True)
    proxy.serve_forever()
