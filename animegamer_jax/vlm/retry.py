"""Asking a model until its answer is valid, and the answers that are kept on disk.

For annotation, judging and writing games.
"""

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

from etils import epath

from animegamer_jax.bundle.config import from_json
from animegamer_jax.errors import UserError
from animegamer_jax.storage.files import read_json
from animegamer_jax.storage.paths import telling
from animegamer_jax.vlm.client import AskSettings, Endpoint
from animegamer_jax.vlm.messages import Message, again
from animegamer_jax.vlm.usage import Usage

_KEPT = 10_000  # letters of an answer that are kept
_TELL_EVERY = 60.0  # seconds between words on a slow server


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """The last answer to a question, and what it took to get it.

    Attributes:
        answer: as it came; valid or not.
        attempts: questions asked.
        max_tokens: that the answer could have.
        is_cut: whether it ended there.
        prompt_tokens, completion_tokens: of all attempts.
    """

    answer: str
    attempts: int
    max_tokens: int
    is_cut: bool
    prompt_tokens: int
    completion_tokens: int

    def why(self, error: ValueError) -> str:
        """Why this is no usable answer, where reading it raised `error`."""
        times = f"{self.attempts} time" + "s" * (self.attempts > 1)
        cut = f" (cut at {self.max_tokens} tokens)" if self.is_cut else ""
        return f"asked {times}, no valid answer{cut}: {error}"

    def may_be_bettered(self, settings: AskSettings) -> bool:
        """Whether these settings ask more often, or for longer answers, than it was asked."""
        return settings.attempts > self.attempts or settings.max_tokens > self.max_tokens


def answer_file(cache: epath.Path, key: str) -> epath.Path:
    """Where the answer to a question of this digest is kept."""
    return cache / key[:2] / f"{key}.json"


def kept_answer(file: epath.Path) -> Asked | None:
    """An answer on disk; None: there is none, or it is damaged, and is asked for again.

    Raises:
        UserError: the disk refuses.
    """
    with telling(file, "cannot be read", mend="check the path"):
        if not file.exists():
            return None
    try:
        return from_json(Asked, read_json(file), os.fspath(file))
    except UserError:
        return None


def cut_answer(text: str | None) -> str | None:
    """As much of an answer as is kept."""
    return text[:_KEPT] if text is not None else None


class Requests:
    """Counts requests, and tells of a slow or busy server now and then.

    Args:
        settings: which server.
        usage: in which they are counted.
        on_wait: called with a line.
    """

    def __init__(self, settings: AskSettings, usage: Usage, *, on_wait: Callable[[str], None]):
        self._settings, self._usage, self._on_wait = settings, usage, on_wait
        self._told = -_TELL_EVERY

    def sent(self, retry: int) -> None:
        """Counts a request, and tells of one that was sent before."""
        s, now = self._settings, time.monotonic()
        self._usage.requests += 1
        if retry and now - self._told > _TELL_EVERY:
            self._told = now
            self._on_wait(
                f"{s.endpoint}: no answer within {s.timeout:g} s, or too busy for one: asking "
                f"again ({retry} of {s.retries} times)"
            )


async def ask_until_valid(
    endpoint: Endpoint,
    messages: list[Message],
    *,
    schema: dict[str, Any],
    name: str,
    read: Callable[[str], Any],
    settings: AskSettings,
    usage: Usage,
) -> Asked:
    """Asks until an answer is valid, or often enough; what is wrong is told to the model.

    Args:
        endpoint: that answers.
        messages: the question.
        schema: the JSON schema of an answer.
        name: of the schema.
        read: raises ValueError, in one line, where an answer is not valid.
        settings: how often, and the prices.
        usage: counts each answer.

    Raises:
        NoAnswerError: the server does not answer this.
        UserError: the server answers nothing.
    """
    attempt = prompt = completion = 0
    while True:
        found = await endpoint.ask(messages, schema, name=name)
        attempt += 1
        prompt, completion = prompt + found.prompt_tokens, completion + found.completion_tokens
        prices = settings.prompt_price, settings.completion_price
        usage.add_answer((found.prompt_tokens, found.completion_tokens), prices)
        asked = Asked(
            answer=found.text[:_KEPT],
            attempts=attempt,
            max_tokens=settings.max_tokens,
            is_cut=found.is_cut,
            prompt_tokens=prompt,
            completion_tokens=completion,
        )
        try:
            read(asked.answer)
        except ValueError as error:
            if attempt == settings.attempts:
                return asked
            messages = [*messages, *again(found.text, wrong=str(error))]
        else:
            return asked
