"""Health, metrics in Prometheus' text format, and a log line for each request and each turn.

Nothing private is in them: no instruction, no password, no id of a game, no query string.
"""

import logging
import re
import time
from collections.abc import Sequence

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from animegamer_jax.serve.engine.engine import Engine, TurnRequest
from animegamer_jax.serve.guard.limits import Uploads

_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
# Parts of a path after which the rest is an id or the name of a file.
_ENDPOINTS = (
    "/assets", "/login", "/logout", "/config", "/health", "/metrics",
    "/favicon.ico", "/gradio_api/file", "/gradio_api/upload",
    "/gradio_api/queue/join", "/gradio_api/queue/data",
    "/gradio_api/heartbeat", "/gradio_api/info", "/gradio_api/startup-events",
    "/gradio_api/call", "/gradio_api/cancel",
    "/gradio_api/reset", "/gradio_api/login_check",
    "/api/v1/server", "/api/v1/read", "/api/v1/openings", "/api/v1/openapi.json",
    "/api/v1/games",
)  # fmt: skip
_GAME_ENDPOINT = re.compile(r"/api/v1/games(/picture|/archive|/[^/]+/([a-z]+)\b.*)")
_GAME_PARTS = (
    "events", "copy", "rules", "meters", "day", "turns", "again", "progress", "stop", "undo",
    "redo", "go", "clips", "pictures", "game", "film", "card",
)  # fmt: skip
PAGE_FILES = ("/assets",)
"""Paths of the page's own files."""

log = logging.getLogger(__name__)


def endpoint_of(path: str) -> str:
    """Returns the part of a path that names no game, session or file; "other" if none is known."""
    path = path.rstrip("/")
    if found := _GAME_ENDPOINT.fullmatch(path):
        if found[2] is None:
            return path
        return f"/api/v1/games/*/{found[2]}" if found[2] in _GAME_PARTS else "other"
    for endpoint in sorted(_ENDPOINTS, key=len, reverse=True):
        if path == endpoint or path.startswith((f"{endpoint}/", f"{endpoint}=")):
            return endpoint
    if path in ("", "/api"):
        return path or "/"
    return "other"


class Monitor:
    """Counts what happens on a server.

    `watch` adds the engine, once there is one.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self.registry)
        self._engine: Engine | None = None

        def made(kind: type, name: str, text: str, labels: Sequence[str] = (), **options):
            return kind(f"animegamer_{name}", text, labels, registry=self.registry, **options)

        self._requests = made(
            Counter, "requests", "HTTP requests", ("endpoint", "method", "status")
        )
        self._refused = made(Counter, "refused", "Requests over a limit", ("limit",))
        self._turns = made(Counter, "turns", "Turns that have ended", ("status",))
        self._waited = made(
            Histogram, "turn_wait_seconds", "Time of a finished turn in the queue", buckets=_BUCKETS
        )
        self._played = made(
            Histogram, "turn_seconds", "Time in which a finished turn was played", buckets=_BUCKETS
        )
        self._gauges = {
            name: made(Gauge, name, text)
            for name, text in (
                ("ready", "1 if turns are played, 0 while warming up, failing or shutting down"),
                ("turns_waiting", "Turns in the queue"),
                ("turns_playing", "Turns that are being played"),
                ("open_games", "Games in memory"),
                ("uploads_bytes", "Bytes of uploads and shown files in the temporary folder"),
            )
        }

    def watch(self, engine: Engine, uploads: Uploads) -> None:
        """Measures an engine and the uploads whenever the metrics are read."""
        self._engine = engine
        for name, measure in (
            ("ready", lambda: engine.health == "ready"),
            ("turns_waiting", lambda: engine.count_turns()[0]),
            ("turns_playing", lambda: engine.count_turns()[1]),
            ("open_games", lambda: len(engine.store)),
            ("uploads_bytes", lambda: uploads.size),
        ):
            self._gauges[name].set_function(measure)

    def routes(self) -> list[Route]:
        return [Route("/health", self.health), Route("/metrics", self.metrics)]

    def health(self, request: Request) -> JSONResponse:
        """Answers with the state, as 200 if it is `ready`, else as 503."""
        state = self._engine.health if self._engine else "warming up"
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    def metrics(self, request: Request) -> Response:
        """Answers with all metrics."""
        return Response(
            prometheus_client.generate_latest(self.registry),
            media_type=prometheus_client.CONTENT_TYPE_LATEST,
        )

    def count_refusal(self, limit: str) -> None:
        self._refused.labels(limit).inc()

    def count_request(
        self, *, client: str, method: str, path: str, status: int, seconds: float
    ) -> None:
        endpoint = endpoint_of(path)
        method = method if method in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        self._requests.labels(endpoint, method, status).inc()
        level = logging.DEBUG if endpoint in PAGE_FILES else logging.INFO
        log.log(level, "%s %s %s %d %.0f ms", client, method, endpoint, status, 1000 * seconds)

    def count_turn(self, request: TurnRequest) -> None:
        self._turns.labels(request.status).inc()
        started = request.started or request.ended_at
        waited, played = started - request.submitted, request.ended_at - started
        if request.status == "done":
            self._waited.observe(waited)
            self._played.observe(played)
        log.info(
            "%s turn %s: %d steps, waited %.2f s, played %.2f s",
            request.client or "-", request.status, request.steps, waited, played,
        )  # fmt: skip


def show_log() -> None:
    """Writes the log of the server's package to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.formatter.converter = time.gmtime  # type: ignore[union-attr]
    package = logging.getLogger("animegamer_jax.serve")
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False
