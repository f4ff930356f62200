"""What a model was asked and what it took, over all runs: `usage/` in the shots folder.

Each process keeps a file of its own there, written anew now and then; a killed one loses a few
seconds of it. What failed and what was answered in vain is counted as well.
"""

import json
import os
import secrets
import threading
import time
from typing import Any

from animegamer_jax.bundle.config import from_json, to_json
from animegamer_jax.data.films.clips.store import ShotsFolder
from animegamer_jax.errors import UserError
from animegamer_jax.storage.files import write_json
from animegamer_jax.storage.paths import telling
from animegamer_jax.vlm.usage import Usage

_USAGE = "usage"
_EVERY = 5.0  # seconds


class UsageFile:
    """This process's file; threads may write it."""

    def __init__(self):
        self._name = f"{time.time():.0f}-{secrets.token_hex(4)}.json"
        self._lock = threading.Lock()
        self._written: Any = None
        self._when = 0.0

    def update(self, folder: ShotsFolder, usage: Usage) -> None:
        """Writes it, unless that was done a few seconds ago.

        Raises:
            UserError: the disk refuses.
        """
        if time.monotonic() - self._when > _EVERY:
            self.write(folder, usage)

    def write(self, folder: ShotsFolder, usage: Usage) -> None:
        """Writes it, if something was asked since.

        Raises:
            UserError: the disk refuses.
        """
        with self._lock:
            self._when = time.monotonic()
            content = to_json(usage)
            if usage.requests and content != self._written:
                write_json(folder.path / _USAGE / self._name, content)
                self._written = content


def read_usage(folder: ShotsFolder) -> Usage:
    """What all processes of all runs asked about a folder's clips.

    Raises:
        UserError: a file is damaged.
    """
    total, place = Usage(), folder.path / _USAGE
    with telling(place, "cannot be read", mend="check the path"):
        files = sorted(place.glob("*.json")) if place.exists() else []
        texts = {os.fspath(file): file.read_bytes() for file in files}
    for name, text in texts.items():
        try:
            total += from_json(Usage, json.loads(text), name)
        except (ValueError, UserError):
            raise UserError(f"{name}: damaged: remove it; its requests are not counted") from None
    return total
