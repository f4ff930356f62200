"""Serves the page of an engine until a signal, behind a guard, and shuts down in order."""

import asyncio
import dataclasses
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import anyio.to_thread
import uvicorn
from fastapi import FastAPI
from rich.console import Console
from starlette.middleware import Middleware

from animegamer_jax.bundle.vocabulary import Vocabulary
from animegamer_jax.game.openings import Openings
from animegamer_jax.serve.api.actions import Actions
from animegamer_jax.serve.application import make_application
from animegamer_jax.serve.engine.engine import Engine
from animegamer_jax.serve.guard.guard import Guard, hosts_of
from animegamer_jax.serve.guard.limits import Limits, Uploads
from animegamer_jax.serve.guard.monitor import Monitor

_DELIVERY_SECONDS = 1.0  # for the last answers to reach their players
_STOP_SECONDS = 10.0
_SWEEP_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server (those of `animegamer serve`).

    Attributes:
        host: Address to serve on.
        port: Free port.
        auth: Names and passwords; empty if everyone may play.
        limits: Limits of a client and of all.
        allowed_hosts: Further names under which the server may be asked for.
        trusted_proxies: Addresses whose X-Forwarded-For names the client.
        shutdown_seconds: Time for turns that are being played when the server stops.
        warm_up: Whether to compile before the first turn.
    """

    host: str
    port: int
    auth: tuple[tuple[str, str], ...] = ()
    limits: Limits = dataclasses.field(default_factory=Limits)
    allowed_hosts: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    shutdown_seconds: float = 30.0
    warm_up: bool = True


def run(
    engine: Engine,
    vocabulary: Vocabulary,
    monitor: Monitor,
    options: ServerOptions,
    *,
    name: str,
    steps: int,
    openings: Openings | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM; then closes the engine.

    Args:
        engine: The engine that plays.
        vocabulary: Words to offer for the parts of an instruction.
        monitor: Log and metrics.
        options: Options of the server.
        name: Name of the model.
        steps: Denoising steps of a new game.
        openings: Prepared first shots; None for none.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    stopped = _catch_signals()
    os.environ["FORWARDED_ALLOW_IPS"] = ",".join(options.trusted_proxies)  # read by uvicorn
    with tempfile.TemporaryDirectory(
        prefix="animegamer-serve-", ignore_cleanup_errors=True
    ) as temporary:
        os.environ["GRADIO_TEMP_DIR"] = temporary
        limits = options.limits
        uploads = Uploads(
            Path(temporary),
            max_bytes=limits.uploads_mb << 20,
            max_seconds=60.0 * limits.uploads_minutes,
        )
        monitor.watch(engine, uploads)
        sent = Path(temporary) / "sent"
        sent.mkdir()
        actions = Actions(
            engine, vocabulary=vocabulary, steps=steps, folder=sent, openings=openings
        )
        guard = Middleware(
            Guard,
            hosts=hosts_of(options.host, options.allowed_hosts),
            limits=limits,
            uploads=uploads,
            monitor=monitor,
            behind_proxy=bool(options.trusted_proxies),
        )
        app = make_application(
            actions, model=name, auth=options.auth, guard=guard, routes=[*monitor.routes()]
        )
        server = _Server(app, options, threads=max(64, 4 * engine.store.max_games))
        try:
            server.start()
            threading.Thread(target=_sweep, args=(uploads, stopped), daemon=True).start()
            shown = f"[{options.host}]" if ":" in options.host else options.host
            console.print(f"{name} is served on http://{shown}:{options.port}  (Ctrl-C stops it)")
            console.print(f"games are saved in {engine.store.folder}")
            if options.warm_up:
                _warm_up(engine, console, stopped)
                if not stopped.is_set():
                    console.print("all batch sizes are compiled")
            stopped.wait()
            console.print(f"stopping: turns in play have {options.shutdown_seconds:g} s to end")
        finally:
            engine.close(seconds=options.shutdown_seconds if stopped.is_set() else 0.0)
            if stopped.is_set():
                time.sleep(_DELIVERY_SECONDS)
            actions.hub.close()
            server.stop()
    console.print("stopped; every finished turn is saved")


class _Server:
    """An HTTP server on a thread of its own.

    Args:
        app: The application.
        options: Where it serves.
        threads: Number of threads for its handlers.
    """

    def __init__(self, app: FastAPI, options: ServerOptions, *, threads: int):
        self._threads = threads
        config = uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=int(_DELIVERY_SECONDS),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def _run(self) -> None:
        async def serve() -> None:
            anyio.to_thread.current_default_thread_limiter().total_tokens = self._threads
            await self._server.serve()

        asyncio.run(serve())

    def start(self) -> None:
        """Starts it and waits until it answers.

        Raises:
            RuntimeError: It ended before.
        """
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the HTTP server could not start")
            time.sleep(0.01)

    def stop(self) -> None:
        """Ends it, with the answers that are being sent."""
        self._server.should_exit = True
        self._thread.join(_STOP_SECONDS)


def _catch_signals() -> threading.Event:
    """Returns an event that Ctrl-C and SIGTERM set, so that the server can shut down in order."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    return stopped


def _warm_up(engine: Engine, console: Console, stopped: threading.Event) -> None:
    """Compiles all programs on a thread of its own, so that a signal ends the wait."""
    errors: list[BaseException] = []

    def compile_all() -> None:
        try:
            engine.warm_up(lambda size: console.print(f"compiling for {size} games at once"))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=compile_all, daemon=True)
    thread.start()
    while thread.is_alive() and not stopped.is_set():
        thread.join(0.2)
    if errors:
        raise errors[0]


def _sweep(uploads: Uploads, stopped: threading.Event) -> None:
    """Deletes old uploads, and copies of clips that were shown, once a minute."""
    while not stopped.wait(_SWEEP_SECONDS):
        uploads.sweep()
