"""A portable job service on this machine, as a process: Beam's own, without Java."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def job_service() -> Iterator[tuple[str, ...]]:
    """Beam's options for it; the work itself is done in the process that asks for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("-m", "apache_beam.runners.portability.local_job_service_main", "--port", str(port))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([sys.executable, *words], **quiet)
    try:
        yield f"job_endpoint=localhost:{port}", "environment_type=LOOPBACK"
    finally:
        server.kill()
        server.wait()
