"""Asks one question until the answer is valid; replies cached on disk."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from etils import epath

from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import user_errors
from animegamer_jax.storage.serialization import read_json
from animegamer_jax.vlm.client import AskSettings, Endpoint
from animegamer_jax.vlm.messages import Message, retry_messages
from animegamer_jax.vlm.usage import Usage

T = TypeVar("T")

MAX_TEXT = 10_000
"""Maximum number of characters of an answer that are kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt(Generic[T]):
    """One question, and how its answer is read.

    Attributes:
        key: SHA-256 of all that the answer depends on; names the file in the cache.
        messages: Makes the conversation; called in a thread, and only if nothing is cached.
        schema: JSON schema of an answer.
        parse: Returns the value of an answer; raises ValueError, in one line, if it is not valid.
    """

    key: str
    messages: Callable[[], list[Message]]
    schema: dict[str, Any]
    parse: Callable[[str], T]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """The last answer to a prompt, valid or not, and what it took to get it.

    Attributes:
        answer: The text.
        attempts: Number of questions.
        max_tokens: Limit of the answer.
        is_cut: Whether the answer ends at the limit.
        prompt_tokens, completion_tokens: Number of tokens of all attempts.
    """

    answer: str
    attempts: int
    max_tokens: int
    is_cut: bool
    prompt_tokens: int
    completion_tokens: int

    def reason(self, error: ValueError) -> str:
        """Returns why there is no valid answer, if parsing this one raised `error`."""
        times = f"{self.attempts} time" + "s" * (self.attempts > 1)
        cut = f" (cut at {self.max_tokens} tokens)" if self.is_cut else ""
        return f"asked {times}, no valid answer{cut}: {error}"


def load_cached_reply(file: epath.Path) -> Reply | None:
    """Loads a reply from the cache; None if there is none, or if the file is damaged.

    Raises:
        UserError: The cache cannot be read.
    """
    with user_errors(file, "cannot be read", hint="check the path"):
        if not file.exists():
            return None
    try:
        return read_json(file, Reply, hint="")
    except UserError:
        return None


async def ask_until_valid(
    endpoint: Endpoint, prompt: Prompt[Any], settings: AskSettings, *, usage: Usage
) -> Reply:
    """Asks until an answer is valid or the attempts are used up; the model sees its mistakes.

    Args:
        endpoint: The connection to the model.
        prompt: The question.
        settings: Number of attempts, and the prices.
        usage: Counter of answers, tokens and costs; updated here.

    Raises:
        NoAnswerError: There is no usable response to this question.
        UserError: The server answers no question.
    """
    messages = await asyncio.to_thread(prompt.messages)
    attempt = prompt_tokens = completion_tokens = 0
    while True:
        found = await endpoint.complete(messages, prompt.schema)
        attempt += 1
        prompt_tokens += found.prompt_tokens
        completion_tokens += found.completion_tokens
        prices = settings.prompt_price, settings.completion_price
        usage.add_answer((found.prompt_tokens, found.completion_tokens), prices)
        reply = Reply(
            answer=found.text[:MAX_TEXT],
            attempts=attempt,
            max_tokens=settings.max_tokens,
            is_cut=found.is_cut,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
        try:
            prompt.parse(reply.answer)
        except ValueError as error:
            if attempt == settings.attempts:
                return reply
            messages = [*messages, *retry_messages(found.text, error=str(error))]
        else:
            return reply
