"""Counts the tokens that questions used, and what they cost."""

import dataclasses


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
