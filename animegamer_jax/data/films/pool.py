"""Calls a function for many items in processes of this machine."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from animegamer_jax.errors import UserError


def run_in_processes(
    items: Sequence[Any], function: Callable[[Any], Any], workers: int
) -> Generator[None, None, None]:
    """Calls a function for each item, and yields whenever one is finished.

    One worker is this process itself. The first error ends all workers, and so does Ctrl-C: what
    they were writing does not count.

    Raises:
        UserError: A worker process died.
    """
    if workers == 1:
        for item in items:
            function(item)
            yield
        return
    others = multiprocessing.active_children()
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker)
    try:
        for future in as_completed([pool.submit(function, item) for item in items]):
            future.result()
            yield
    except BaseException as error:
        for worker in multiprocessing.active_children():
            if worker not in others:
                worker.terminate()
        if isinstance(error, BrokenProcessPool):
            raise UserError(
                "a worker process died, probably out of memory: run the same command again, "
                "or with fewer --workers"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Leaves Ctrl-C to the parent process, which ends its workers, and ends with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
