"""A chat server on a local port that answers as a function says, over real sockets."""

import base64
import contextlib
import dataclasses
import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One request: its number from 0, its path, its headers and its JSON."""

    number: int
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]

    @property
    def pictures(self) -> list[np.ndarray]:
        """Every picture in the messages, decoded: [h, w, 3]."""
        found = []
        for message in self.body["messages"]:
            for part in message["content"] if isinstance(message["content"], list) else ():
                if part["type"] == "image_url":
                    head, _, data = part["image_url"]["url"].partition(",")
                    assert head == "data:image/jpeg;base64"
                    found.append(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))))
        return found

    @property
    def text(self) -> str:
        """All texts of the messages."""
        return json.dumps(self.body["messages"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """What goes back; `delay` in seconds comes before it, `body` None hangs up."""

    body: bytes | None
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    delay: float = 0.0


def says(text: str | None, *, finish: str = "stop", delay: float = 0.0) -> Reply:
    """A chat completion of 100 and 20 tokens."""
    message = {"role": "assistant", "content": text}
    content = {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "stand-in",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
    }
    return Reply(body=json.dumps(content).encode(), delay=delay)


def refuses(status: int) -> Reply:
    """An error in the form of the API, that may be tried again at once."""
    content = {"error": {"message": f"refused with {status}", "type": "error", "code": None}}
    body = json.dumps(content).encode()
    return Reply(body=body, status=status, headers={"retry-after-ms": "1"})


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that hung up


class StandIn:
    """A running server.

    Attributes:
        questions: The requests so far.
    """

    def __init__(self, answer: Callable[[Question], Reply]):
        self.questions: list[Question] = []
        self._lock = threading.Lock()
        self.server = _Server(("127.0.0.1", 0), _handler(self, answer))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def note(self, handler: BaseHTTPRequestHandler) -> Question:
        length = int(handler.headers.get("content-length") or 0)
        body = json.loads(handler.rfile.read(length))
        with self._lock:
            headers = {name.lower(): value for name, value in handler.headers.items()}
            number = len(self.questions)
            question = Question(number=number, path=handler.path, headers=headers, body=body)
            self.questions.append(question)
        return question


def _handler(stand_in: StandIn, answer: Callable[[Question], Reply]) -> type:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = stand_in.note(self)
            reply = answer(question)
            time.sleep(reply.delay)
            if reply.body is None:
                return
            self.send_response(reply.status)
            self.send_header("content-type", reply.content_type)
            self.send_header("content-length", str(len(reply.body)))
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@contextlib.contextmanager
def serving(answer: Callable[[Question], Reply]) -> Iterator[StandIn]:
    """A server for the time of the block."""
    stand_in = StandIn(answer)
    thread = threading.Thread(target=stand_in.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        stand_in.server.shutdown()
        stand_in.server.server_close()
        thread.join()
