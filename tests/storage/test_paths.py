"""Errors of storage: one line each, with what to do."""

import http.server
import subprocess
import sys
import threading

import pytest

from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import absolute, refuse_existing, user_errors

HINT = "make room there"
# The library comes with the extra `bucket` alone.
NoCredentials = type("NoCredentials", (Exception,), {"__module__": "google.auth.exceptions"})


def error_of(path: str, error: Exception) -> str:
    with pytest.raises(UserError) as caught, user_errors(path, "cannot be written", hint=HINT):
        raise error
    assert "\n" not in str(caught.value)
    return str(caught.value)


def wrapped(cause: Exception) -> Exception:
    """As Orbax raises what tensorstore raised."""
    error = Exception("a write failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        NoCredentials("Your defaults were not found. To set up Application"),
        ValueError("UNAUTHENTICATED: Error opening kvstore: HTTP response code: 401"),
        ValueError("PERMISSION_DENIED: Error writing gs://bucket/x: HTTP response code: 403"),
        wrapped(ValueError("PERMISSION_DENIED: Error writing gs://bucket/x")),
        OSError("Forbidden: bucket/x\nnobody@nowhere does not have storage.objects.create access"),
        OSError("Anonymous caller does not have storage.objects.list access, 401"),
    ],
)
def test_a_bucket_without_credentials(error):
    line = error_of("gs://bucket/x", error)
    assert line.startswith("gs://bucket/x: cannot be written: ")
    assert "sign in with `gcloud auth application-default login`" in line
    assert HINT not in line


def test_other_refusals_keep_their_remedy():
    full = ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device")
    assert error_of("gs://bucket/x", full).endswith(HINT)
    mine = ValueError("PERMISSION_DENIED: Error opening /x: Permission denied [OS error 13]")
    assert error_of("/x", mine) == f"/x: cannot be written: Permission denied: {HINT}"


def test_a_damaged_file_of_tensorstore_is_one_line():
    text = 'Error reading Byte range [0, 9) of local file "/x/d/1": Error decoding "manifest"'
    assert error_of("/x", ValueError(text)) == f"/x: cannot be written: {text}: {HINT}"
    with pytest.raises(ValueError, match="another"), user_errors("/x", "wrong", hint=HINT):
        raise ValueError("another error")


def test_addresses_in_buckets_stay():
    assert str(absolute("gs://bucket/a/../b")) == "gs://bucket/a/../b"
    assert str(absolute("a")).startswith("/")


def test_what_a_killed_process_left_does_not_take_a_folder(tmp_path):
    folder = absolute(tmp_path)
    (folder / "set.json.part-0123abcd").touch()
    refuse_existing(folder, overwrite=None)
    (folder / "set.json").touch()
    with pytest.raises(UserError, match="already there: choose another folder"):
        refuse_existing(folder, overwrite=None)


class Refusing(http.server.BaseHTTPRequestHandler):
    """A bucket's server that knows nobody."""

    def refuse(self) -> None:
        body = b'{"error": {"code": 401, "message": "Anonymous caller does not have access"}}'
        self.send_response(401)
        self.send_header("Content-Length", f"{len(body)}")
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = refuse  # noqa: N815 - as the library names them

    def log_message(self, format: str, *args: object) -> None:
        pass


WRITE = """
from animegamer_jax.storage.paths import absolute, user_errors
path = absolute("gs://bucket/x")
try:
    with user_errors(path, "cannot be written", hint="make room there"):
        path.mkdir(parents=True, exist_ok=True)
        (path / "a").write_text("x")
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_a_real_library_for_buckets_that_is_refused(monkeypatch):
    pytest.importorskip("gcsfs")
    server = http.server.ThreadingHTTPServer(("localhost", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://localhost:{server.server_port}")
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    done = subprocess.run([sys.executable, "-c", WRITE], capture_output=True, text=True, check=True)
    server.shutdown()
    server.server_close()
    assert done.stdout.startswith("UserError: gs://bucket/x: cannot be written: Anonymous caller")
    assert "sign in with `gcloud auth application-default login`" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_bucket_without_its_library_is_one_line(monkeypatch):
    monkeypatch.setattr("animegamer_jax.storage.paths.is_installed", lambda module: False)
    with pytest.raises(UserError, match=r"^gs://bucket/x: a bucket needs gcsfs: .*bucket"):
        absolute("gs://bucket/x")
