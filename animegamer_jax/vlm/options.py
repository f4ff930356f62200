"""Options of every command that asks a model."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The server that is asked, and how.

    Attributes:
        endpoint: Address of an OpenAI-compatible server, without /chat/completions.
        key_variable: Environment variable that holds the API key, on every machine that sends
            requests; local servers need none.
        parallel: Number of simultaneous requests of each process.
        attempts: Maximum number of times that one question is asked until an answer is valid.
        retries: Number of times that a request is sent again if the server is busy (status 429
            or 5xx) or too slow; the pauses in between grow.
        timeout: Seconds to wait for an answer.
        max_tokens: Maximum number of tokens of an answer, reasoning included.
        temperature: Sampling temperature. None: not sent, for models that accept none.
        prompt_price: Price of a million prompt tokens, in any currency. Default: not counted.
        completion_price: Price of a million completion tokens. Default: not counted.
    """

    endpoint: str = "http://localhost:8000/v1"
    key_variable: str = "OPENAI_API_KEY"
    parallel: int = 8
    attempts: int = 3
    retries: int = 4
    timeout: float = 120.0
    max_tokens: int = 1000
    temperature: float | None = 0.0
    prompt_price: float | None = None
    completion_price: float | None = None
