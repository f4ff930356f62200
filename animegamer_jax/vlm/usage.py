"""Requests, tokens and costs of a model."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class Usage:
    """What was asked, and what it cost.

    Attributes:
        requests: Number of requests sent, repeated ones included.
        answered: Number of requests with an answer.
        prompt_tokens, completion_tokens: Number of tokens, as the server counts them.
        cost: In the currency of the prices; None if no price is set.
        cached: Number of answers found on disk.
    """

    requests: int = 0
    answered: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    cached: int = 0

    def add_answer(self, tokens: tuple[int, int], prices: tuple[float | None, ...]) -> None:
        """Adds one answer, by its tokens of prompt and completion and their prices a million."""
        self.answered += 1
        self.prompt_tokens += tokens[0]
        self.completion_tokens += tokens[1]
        if prices != (None, None):
            paid = sum(n * (price or 0.0) / 1e6 for n, price in zip(tokens, prices, strict=True))
            self.cost = (self.cost or 0.0) + paid

    def __add__(self, other: "Usage") -> "Usage":
        pairs = zip(vars(self).items(), vars(other).values(), strict=True)
        return Usage(**{name: a if b is None else (a or 0) + b for (name, a), b in pairs})

    def __sub__(self, other: "Usage") -> "Usage":
        """Returns what came since `other`."""
        negative: Any = {name: n if n is None else -n for name, n in vars(other).items()}
        return self + Usage(**negative)

    def __str__(self) -> str:
        text = f"{self.requests:,} requests ({self.requests - self.answered:,} unanswered), "
        text += f"{self.prompt_tokens:,} + {self.completion_tokens:,} tokens"
        return text + (f", cost {self.cost:,.2f}" if self.cost is not None else "")
