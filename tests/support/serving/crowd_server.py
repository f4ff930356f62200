"""A server with a player that needs no networks, as a process of its own, and clients by HTTP."""

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_player


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, subprocess.Popen, Path]]:
    """A server with a fake player of 0.02 s a step: host and port, process, log.

    It trusts the header X-Forwarded-For of this machine. A client has 4 turns, 20 connections and
    1 MB of uploads.
    """
    command = [sys.executable, fake_player.__file__, str(folder / "games"), "4", "0.02"]
    log = folder / "log"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
    assert process.stdout is not None
    try:
        found = next((m for line in process.stdout if (m := re.search(r"//(\S+)", line))), None)
        assert found, log.read_text()
        yield found[1], process, log
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def fetch(
    address: str, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, names)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, found, answer.read().decode(errors="replace")
    finally:
        connection.close()


def call_api(
    address: str, method: str, path: str, client: str, **content: object
) -> tuple[int, Any]:
    """Asks the page's API; returns the status and the answer."""
    body = json.dumps(content).encode() if method == "POST" else None
    status, _, text = fetch(
        address, method, f"/api/v1/{path}", body, Content_Type="application/json",
        X_Forwarded_For=client,
    )  # fmt: skip
    return status, json.loads(text)


def begin(address: str, name: str, *data: Any, client: str = "1.1.1.1") -> str:
    """Calls an endpoint of the API; returns the path of its answer."""
    status, _, text = fetch(
        address, "POST", f"/gradio_api/call/{name}", json.dumps({"data": data}).encode(),
        Content_Type="application/json", X_Forwarded_For=client,
    )  # fmt: skip
    assert status == 200, text
    return f"/gradio_api/call/{name}/{json.loads(text)['event_id']}"


def result(address: str, path: str, client: str = "1.1.1.1") -> tuple[str, Any]:
    """Returns the kind of an answer, "complete" or "error", and its content."""
    _, _, text = fetch(address, "GET", path, X_Forwarded_For=client)
    kind, data = re.findall(r"event: (complete|error)\ndata: (.*)", text)[-1]
    return kind, json.loads(data)


def ask(address: str, name: str, *data: Any, client: str = "1.1.1.1") -> Any:
    kind, found = result(address, begin(address, name, *data, client=client), client)
    return found[0] if kind == "complete" else found["error"]
