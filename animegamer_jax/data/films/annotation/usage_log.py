"""What a model was asked and what it took, over all runs: `usage/` in the shots folder.

Each process keeps a file of its own there, written anew now and then; a killed one loses a few
seconds of it. What failed and what was answered in vain is counted as well.
"""

import dataclasses
import json
import os
import secrets
import threading
import time
from typing import Any

from animegamer_jax.bundle.config import from_json, to_json
from animegamer_jax.data.films.clips.archive import write_json
from animegamer_jax.data.films.clips.store import ShotsFolder
from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import telling

_USAGE = "usage"
_EVERY = 5.0  # seconds


@dataclasses.dataclass
class Usage:
    """What was asked.

    Attributes:
        requests: that were sent, each time that they were.
        answered: of these.
        prompt_tokens, completion_tokens: as the server counts them.
        cost: of them, in the currency of the prices; None: there were none.
        cached: answers that were on disk.
    """

    requests: int = 0
    answered: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    cached: int = 0

    def add_answer(self, tokens: tuple[int, int], prices: tuple[float | None, ...]) -> None:
        """Counts one answer: tokens of prompt and completion, and the prices of a million."""
        self.answered += 1
        self.prompt_tokens += tokens[0]
        self.completion_tokens += tokens[1]
        if prices != (None, None):
            paid = sum(n * (price or 0.0) / 1e6 for n, price in zip(tokens, prices, strict=True))
            self.cost = (self.cost or 0.0) + paid

    def __add__(self, other: "Usage") -> "Usage":
        costs = [cost for cost in (self.cost, other.cost) if cost is not None]
        return Usage(
            requests=self.requests + other.requests,
            answered=self.answered + other.answered,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cost=sum(costs) if costs else None,
            cached=self.cached + other.cached,
        )

    def __sub__(self, other: "Usage") -> "Usage":
        """What came since `other`."""
        return self + Usage(
            requests=-other.requests,
            answered=-other.answered,
            prompt_tokens=-other.prompt_tokens,
            completion_tokens=-other.completion_tokens,
            cost=None if other.cost is None else -other.cost,
            cached=-other.cached,
        )

    def __str__(self) -> str:
        told = f"{self.requests:,} requests ({self.requests - self.answered:,} unanswered), "
        told += f"{self.prompt_tokens:,} + {self.completion_tokens:,} tokens"
        return told + (f", cost {self.cost:,.2f}" if self.cost is not None else "")


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
