"""Client of an OpenAI-compatible `/v1/chat/completions` endpoint, hosted or local.

`NoAnswerError` concerns one request. An error that every request would meet (a wrong key, no
server) is a `UserError`, which ends the run.
"""

import asyncio
import contextlib
import dataclasses
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import openai
import pydantic

from animegamer_jax.errors import UserError, check_at_least
from animegamer_jax.vlm.options import ServerOptions

RERUN = "then run the same command again (answers received so far are cached)"
_LOCAL_KEY = "none"  # local servers ignore the key, but the client requires one
_LONGEST = 160


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskSettings(ServerOptions):
    """Which model is asked, and how.

    Attributes:
        model: Name of the model at the endpoint. Default: no model is asked.
        patience: Number of clips in a row without a usable answer, over all films of a process,
            that ends the run.
        frames: Number of frames shown of each clip.
        side: Maximum length of a picture's longer side, in pixels.

    Raises:
        UserError: A value is out of range.
    """

    model: str | None = None
    patience: int = 10
    frames: int = 4
    side: int = 512

    def __post_init__(self) -> None:
        least = {"parallel": 1, "attempts": 1, "retries": 0, "patience": 1, "frames": 1, "side": 32}
        for name, low in (least | {"max_tokens": 16}).items():
            check_at_least(name, getattr(self, name), low)
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
        """Returns the API key from the environment.

        Raises:
            UserError: It holds characters that no key has.
        """
        key = os.environ.get(self.key_variable, "").strip() or _LOCAL_KEY
        if not re.fullmatch(r"[!-~]+", key):
            raise UserError(f"{self.key_variable}: expected a key of ASCII letters and digits")
        return key


class NoAnswerError(Exception):
    """One request got no usable response; `found` is the response's text, if there is any."""

    def __init__(self, reason: str, *, found: str | None = None):
        super().__init__(reason)
        self.found = found


class Completion(NamedTuple):
    """A model's text, whether it ends at the token limit, and the tokens that it took."""

    text: str
    is_cut: bool
    prompt_tokens: int
    completion_tokens: int


class _Message(pydantic.BaseModel):
    content: str | None = None


class _Choice(pydantic.BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Response(pydantic.BaseModel):
    """The fields of a response that are used."""

    choices: list[_Choice] = pydantic.Field(min_length=1)
    usage: Any = None


class Endpoint:
    """An open connection to the server; `connect` makes one."""

    def __init__(self, client: openai.AsyncOpenAI, settings: AskSettings):
        self._client, self._settings = client, settings

    async def complete(self, messages: list[dict[str, Any]], schema: dict[str, Any]) -> Completion:
        """Sends a conversation and returns the model's next message.

        Args:
            messages: The conversation.
            schema: JSON schema of the answer.

        Raises:
            NoAnswerError: There is no usable response to this request.
            UserError: The server answers no request.
        """
        more: dict[str, Any] = {}
        if self._settings.temperature is not None:
            more["temperature"] = self._settings.temperature
        create: Any = self._client.chat.completions.with_raw_response.create
        with self._own_errors():
            response = await create(
                model=self._settings.model,
                messages=messages,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "strict": True, "schema": schema},
                },
                max_completion_tokens=self._settings.max_tokens,
                **more,
            )
        return _parse(response.text)

    @contextlib.contextmanager
    def _own_errors(self) -> Iterator[None]:
        """Turns the client's errors into ours."""
        s = self._settings
        try:
            yield
        except openai.APITimeoutError:
            raise NoAnswerError(f"no answer within {s.timeout:g} seconds") from None
        except openai.APIConnectionError as error:
            reason = _one_line(str(error.__cause__ or error))
            raise UserError(
                f"{s.endpoint}: cannot be reached ({reason}): start the server or check the "
                f"address, {RERUN}"
            ) from None
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            what = "asks for a key" if s.key() == _LOCAL_KEY else "rejects the key"
            raise UserError(
                f"{s.endpoint}: {what} ({error.status_code}): put a valid one into the environment "
                f"variable {s.key_variable}, {RERUN}"
            ) from None
        except openai.NotFoundError as error:
            raise UserError(
                f"{s.endpoint}: no such address, or no model {s.model!r} there "
                f"({_one_line(error.message)}): check both, {RERUN}"
            ) from None
        except openai.APIStatusError as error:
            raise NoAnswerError(
                f"the server answers {error.status_code}: {_one_line(error.message)}",
                found=error.response.text[:_LONGEST],
            ) from None
        except openai.OpenAIError as error:
            raise NoAnswerError(_one_line(str(error))) from None


def _one_line(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line[:_LONGEST] or "no reason given"


def _parse(text: str) -> Completion:
    """Reads a response of any server."""
    try:
        response = _Response.model_validate_json(text)
    except pydantic.ValidationError:
        raise NoAnswerError(
            f"expected a chat completion, found {_one_line(text)[:60]!a}", found=text
        ) from None
    choice, usage = response.choices[0], response.usage
    prompt, answer = (_count(usage, name) for name in ("prompt_tokens", "completion_tokens"))
    return Completion(
        choice.message.content or "", choice.finish_reason == "length", prompt, answer
    )


def _count(usage: Any, name: str) -> int:
    """Returns a number of tokens; 0 if the server does not count."""
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if type(count) is int and count > 0 else 0


@contextlib.asynccontextmanager
async def connect(
    settings: AskSettings,
    *,
    on_request: Callable[[int, int | None], None] = lambda retry, status: None,
) -> AsyncIterator[Endpoint]:
    """Opens a connection.

    Args:
        settings: Which model is asked, and how.
        on_request: Called before each request with the number of times that it was sent before,
            and the status of the server's answer to the last of them (None: there was no answer).

    Raises:
        UserError: The key cannot be one.
    """
    statuses: dict[Any, int] = {}  # of the last answer, by the task that sends a request again

    async def report(request: Any) -> None:
        retry = int(request.headers.get("x-stainless-retry-count", 0))  # the client's own
        on_request(retry, statuses.pop(asyncio.current_task(), None))

    async def note(response: Any) -> None:
        if response.is_error:
            statuses[asyncio.current_task()] = response.status_code

    hooks = {"request": [report], "response": [note]}
    async with openai.AsyncOpenAI(
        api_key=settings.key(),
        base_url=settings.endpoint,
        max_retries=settings.retries,
        timeout=settings.timeout,
        http_client=openai.DefaultAsyncHttpxClient(event_hooks=hooks),
    ) as client:
        yield Endpoint(client, settings)
