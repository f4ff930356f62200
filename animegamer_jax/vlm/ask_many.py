"""Asks a model many prompts: several at a time, each until valid, with a cache on disk."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from etils import epath

from animegamer_jax.errors import UserError
from animegamer_jax.storage.files import write_json
from animegamer_jax.storage.serialization import to_json
from animegamer_jax.vlm.client import RERUN, AskSettings, Endpoint, NoAnswerError, connect
from animegamer_jax.vlm.retry import MAX_TEXT, Prompt, Reply, ask_until_valid, load_cached_reply
from animegamer_jax.vlm.usage import Usage

T = TypeVar("T")

_WRITERS = 4  # threads that write the cache
_REPORT_EVERY = 60.0  # seconds between lines about a slow server


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer(Generic[T]):
    """The outcome of one prompt.

    Attributes:
        value: The parsed answer; None if there is no valid one.
        reason: Why there is no valid one; None if there is.
        text: What the model, or else the server, wrote last; None if nothing came.
        reply: The model's last reply; None if there is none.
    """

    value: T | None = None
    reason: str | None = None
    text: str | None = None
    reply: Reply | None = None


class AskMany:
    """Asks prompts of one kind; counts usage and failures over all calls.

    Args:
        settings: Which model is asked, and how.
        noun: What the prompts are about, in the plural, for messages.
        best_effort: Whether failures only skip prompts, also those left after `settings.patience`
            failures in a row, unless they are cached. Otherwise they end the run.
        on_wait: Called with a line about a slow or busy server, once a minute at most.

    Attributes:
        usage: Requests, tokens and costs so far.

    Raises:
        UserError: The settings name no model.
    """

    def __init__(
        self,
        settings: AskSettings,
        *,
        noun: str,
        best_effort: bool = False,
        on_wait: Callable[[str], None] = lambda line: None,
    ):
        if settings.model is None:
            raise UserError("model: expected the name of a model at the endpoint, found none")
        self._settings, self._noun, self._best_effort = settings, noun, best_effort
        self._on_wait, self._last_report = on_wait, -_REPORT_EVERY
        self._failures, self._gave_up = 0, ""
        self.usage = Usage()

    def __call__(
        self,
        prompts: Sequence[Callable[[], Prompt[T]]],
        *,
        cache: epath.Path,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Answer[T]]:
        """Returns the answers in the order of the prompts.

        Args:
            prompts: Functions that make the prompts, in threads, so that few are in memory.
            cache: Folder of the replies; each is written as soon as it comes.
            on_progress: Called with the numbers of finished and of all prompts.

        Raises:
            UserError: No prompt can be answered, or the cache cannot be read or written. Replies
                received so far are cached.
        """
        answers: dict[int, Answer[T]] = {}
        left = iter(enumerate(prompts))

        async def work(endpoint: Endpoint, writers: ThreadPoolExecutor) -> None:
            for index, make in left:
                answers[index] = await self._answer(make, endpoint, cache, writers)
                on_progress(len(answers), len(prompts))

        async def run() -> None:
            with ThreadPoolExecutor(_WRITERS) as writers:  # waits for the last file
                async with (
                    connect(self._settings, on_request=self._count_request) as endpoint,
                    asyncio.TaskGroup() as group,
                ):
                    for _ in range(self._settings.parallel):
                        group.create_task(work(endpoint, writers))

        on_progress(0, len(prompts))
        try:
            asyncio.run(run())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [answers[index] for index in range(len(prompts))]

    async def _answer(
        self,
        make: Callable[[], Prompt[T]],
        endpoint: Endpoint,
        cache: epath.Path,
        writers: ThreadPoolExecutor,
    ) -> Answer[T]:
        tolerated: tuple[type[UserError], ...] = (UserError,) if self._best_effort else ()
        try:
            prompt = await asyncio.to_thread(make)
        except tolerated as error:
            return Answer(reason=str(error))
        file = cache / prompt.key[:2] / f"{prompt.key}.json"
        if reply := await asyncio.to_thread(load_cached_reply, file):
            answer = _parsed(reply, prompt)
            if answer.reason is None:  # others may come of a sick server, or of bad luck
                self.usage.cached += 1
                return answer
        if self._gave_up:
            return Answer(reason=self._gave_up)
        try:
            reply = await ask_until_valid(endpoint, prompt, self._settings, usage=self.usage)
        except NoAnswerError as error:
            answer = Answer(reason=str(error), text=error.found and error.found[:MAX_TEXT])
        except tolerated as error:
            answer = Answer(reason=str(error))
        else:
            answer = _parsed(reply, prompt)
            # Shielded: a run that ends now still writes what it has paid for.
            written = writers.submit(write_json, file, to_json(reply))
            await asyncio.shield(asyncio.wrap_future(written))
        self._count_failures(answer.reason)
        return answer

    def _count_failures(self, reason: str | None) -> None:
        self._failures = 0 if reason is None else self._failures + 1
        if self._failures < self._settings.patience or self._gave_up:
            return
        line = f"no usable answer for {self._failures} {self._noun} in a row, the last: {reason}"
        if not self._best_effort:
            endpoint = self._settings.endpoint
            raise UserError(f"{endpoint}: {line}: check the server and the model, {RERUN}")
        self._gave_up = f"not asked: {line}"

    def _count_request(self, retry: int, status: int | None) -> None:
        s, now = self._settings, time.monotonic()
        self.usage.requests += 1
        if retry and now - self._last_report > _REPORT_EVERY:
            self._last_report = now
            reason = f"no answer within {s.timeout:g} s" if status is None else f"answers {status}"
            self._on_wait(
                f"{s.endpoint}: {reason}: sending the request again ({retry} of {s.retries} times)"
            )


def _parsed(reply: Reply, prompt: Prompt[T]) -> Answer[T]:
    try:
        return Answer(value=prompt.parse(reply.answer), text=reply.answer, reply=reply)
    except ValueError as error:
        return Answer(reason=reply.reason(error), text=reply.answer, reply=reply)
