"""Asking a model behind an OpenAI-compatible `/v1/chat/completions`, a hosted or a local one.

What goes wrong for one clip raises `NoAnswerError`; what would go wrong for every clip (a wrong
key, no server) raises `UserError`, which ends the run.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import openai
import pydantic

from animegamer_jax.errors import UserError

_GO_ON = "then run the same command again: finished answers are kept"
_LOCAL_KEY = "none"  # local servers read no key, but the client wants one
_LONGEST = 160


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskSettings:
    """Which model is asked, and how.

    Attributes:
        model: its name at the endpoint; None: nobody is asked.
        endpoint: OpenAI-compatible: the address before /chat/completions.
        key_variable: environment variable that holds the key, on every machine that asks; local
            servers need none.
        parallel: questions at a time, in each process.
        attempts: questions about one clip, while its answers are not valid.
        retries: of a request that the server refuses (429, 5xx) or does not answer in time; the
            pauses between them grow.
        timeout: of an answer, in seconds.
        patience: clips without a usable answer in a row, of all films of a process, that end the
            run.
        frames: of a clip that are shown.
        side: pixels of a picture's longer side at most.
        max_tokens: of an answer, with what the model thinks before it.
        temperature: of the model; None: not sent, for models that have one of their own.
        prompt_price: of a million tokens, in any currency; None: not counted.
        completion_price: of a million tokens.

    Raises:
        UserError: a value out of range.
    """

    model: str | None = None
    endpoint: str = "http://localhost:8000/v1"
    key_variable: str = "OPENAI_API_KEY"
    parallel: int = 8
    attempts: int = 3
    retries: int = 4
    timeout: float = 120.0
    patience: int = 10
    frames: int = 4
    side: int = 512
    max_tokens: int = 1000
    temperature: float | None = 0.0
    prompt_price: float | None = None
    completion_price: float | None = None

    def __post_init__(self) -> None:
        least = {"parallel": 1, "attempts": 1, "retries": 0, "patience": 1, "frames": 1, "side": 32}
        for name, low in (least | {"max_tokens": 16}).items():
            if (value := getattr(self, name)) < low:
                raise UserError(f"{name} {value}: expected {low} or more")
        if not 0 < self.timeout < float("inf"):
            raise UserError(f"timeout {self.timeout}: expected seconds, more than 0")
        for name in ("temperature", "prompt_price", "completion_price"):
            if (value := getattr(self, name)) is not None and not 0 <= value < float("inf"):
                raise UserError(f"{name} {value}: expected 0 or more")
        if not re.fullmatch(r"https?://[^\s/?#]+[^\s?#]*", self.endpoint):
            raise UserError(
                f"endpoint {self.endpoint!r}: expected an address such as http://localhost:8000/v1"
            )
        if self.model is not None and not self.model.strip():
            raise UserError("model: expected the name of a model at the endpoint, found none")

    def key(self) -> str:
        """The key from the environment.

        Raises:
            UserError: it holds signs that a key cannot have.
        """
        key = os.environ.get(self.key_variable, "").strip() or _LOCAL_KEY
        if not re.fullmatch(r"[!-~]+", key):
            raise UserError(f"{self.key_variable}: expected a key of ASCII letters and digits")
        return key


class NoAnswerError(Exception):
    """A request that brought nothing for one clip; `found` is what came instead, if anything."""

    def __init__(self, reason: str, *, found: str | None = None):
        super().__init__(reason)
        self.found = found


class Answer(NamedTuple):
    """A model's answer and what it took."""

    text: str
    is_cut: bool
    prompt_tokens: int
    completion_tokens: int


class _Message(pydantic.BaseModel):
    content: str | None = None


class _Choice(pydantic.BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Completion(pydantic.BaseModel):
    """Of a response, what is read here."""

    choices: list[_Choice] = pydantic.Field(min_length=1)
    usage: Any = None


class Endpoint:
    """An open connection to the server."""

    def __init__(self, client: openai.AsyncOpenAI, settings: AskSettings):
        self._client, self._settings = client, settings

    async def ask(
        self, messages: list[dict[str, Any]], schema: dict[str, Any], *, name: str
    ) -> Answer:
        """One question.

        Args:
            messages: of the conversation.
            schema: of the answer, JSON.
            name: of the schema.

        Raises:
            NoAnswerError: nothing usable came, for this question.
            UserError: no question can be asked.
        """
        wanted = {"name": name, "strict": True, "schema": schema}
        more: dict[str, Any] = {}
        if self._settings.temperature is not None:
            more["temperature"] = self._settings.temperature
        create: Any = self._client.chat.completions.with_raw_response.create
        with self._telling():
            response = await create(
                model=self._settings.model,
                messages=messages,
                response_format={"type": "json_schema", "json_schema": wanted},
                max_completion_tokens=self._settings.max_tokens,
                **more,
            )
        return _read(response.text)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """The client's errors as ours."""
        s = self._settings
        try:
            yield
        except openai.APITimeoutError:
            raise NoAnswerError(f"no answer within {s.timeout:g} seconds") from None
        except openai.APIConnectionError as error:
            reason = _line(str(error.__cause__ or error))
            raise UserError(
                f"{s.endpoint}: cannot be reached ({reason}): start the server or check the "
                f"address, {_GO_ON}"
            ) from None
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            what = "asks for a key" if s.key() == _LOCAL_KEY else "does not take the key"
            raise UserError(
                f"{s.endpoint}: {what} ({error.status_code}): put a valid one into the environment "
                f"variable {s.key_variable}, {_GO_ON}"
            ) from None
        except openai.NotFoundError as error:
            raise UserError(
                f"{s.endpoint}: no such address, or no model {s.model!r} there "
                f"({_line(error.message)}): check both, {_GO_ON}"
            ) from None
        except openai.APIStatusError as error:
            found = error.response.text[:_LONGEST]
            raise NoAnswerError(
                f"the server answers {error.status_code}: {_line(error.message)}", found=found
            ) from None
        except openai.OpenAIError as error:
            raise NoAnswerError(_line(str(error))) from None


def _line(text: str) -> str:
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return line[:_LONGEST] or "no reason given"


def _read(text: str) -> Answer:
    """What a response says, whatever the server is."""
    try:
        completion = _Completion.model_validate_json(text)
    except pydantic.ValidationError:
        raise NoAnswerError(
            f"expected a chat completion, found {_line(text)[:60]!a}", found=text
        ) from None
    choice, usage = completion.choices[0], completion.usage
    prompt, answer = (_count(usage, name) for name in ("prompt_tokens", "completion_tokens"))
    return Answer(choice.message.content or "", choice.finish_reason == "length", prompt, answer)


def _count(usage: Any, name: str) -> int:
    """A number of tokens; 0 where the server does not count."""
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if type(count) is int and count > 0 else 0


@contextlib.asynccontextmanager
async def connected(
    settings: AskSettings, *, on_request: Callable[[int], None] = lambda retry: None
) -> AsyncIterator[Endpoint]:
    """A connection for some questions.

    Args:
        settings: which model is asked, and how.
        on_request: called with each request: 0, or how many times it was sent before.

    Raises:
        UserError: the key cannot be one.
    """
    key = settings.key()

    async def tell(request: Any) -> None:
        on_request(int(request.headers.get("x-stainless-retry-count", 0)))  # the client's own

    client = openai.AsyncOpenAI(
        api_key=key,
        base_url=settings.endpoint,
        max_retries=settings.retries,
        timeout=settings.timeout,
        http_client=openai.DefaultAsyncHttpxClient(event_hooks={"request": [tell]}),
    )
    async with client:
        yield Endpoint(client, settings)
