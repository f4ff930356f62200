"""Requests, tokens and costs of a model; over all runs in `usage/` of the shots folder.

Each process writes a file of its own there every few seconds. Failed requests and invalid answers
count too. All functions raise `UserError` if a file is damaged, or cannot be read or written.
"""

import secrets
import time

from animegamer_jax.data.films.clips.store import ShotsFolder
from animegamer_jax.storage.files import write_json
from animegamer_jax.storage.paths import user_errors
from animegamer_jax.storage.serialization import read_json, to_json
from animegamer_jax.vlm.usage import Usage

_USAGE = "usage"
_EVERY = 5.0  # seconds


class UsageFile:
    """The usage file of this process."""

    def __init__(self):
        self._name = f"{time.time():.0f}-{secrets.token_hex(4)}.json"
        self._written_at = 0.0

    def update(self, folder: ShotsFolder, usage: Usage) -> None:
        """Writes the file, unless that was done a few seconds ago."""
        if time.monotonic() - self._written_at > _EVERY:
            self.write(folder, usage)

    def write(self, folder: ShotsFolder, usage: Usage) -> None:
        """Writes the file, if there was any request."""
        self._written_at = time.monotonic()
        if usage.requests:
            write_json(folder.path / _USAGE / self._name, to_json(usage))


def read_usage(folder: ShotsFolder) -> Usage:
    """Returns the usage of all processes of all runs."""
    total, path = Usage(), folder.path / _USAGE
    with user_errors(path, "cannot be read", hint="check the path"):
        files = sorted(path.glob("*.json")) if path.exists() else []
    for file in files:
        total += read_json(file, Usage, hint="remove it; its requests are not counted then")
    return total
