"""Requests, tokens and costs, added up."""

from animegamer_jax.vlm.usage import Usage


def test_answers_are_added_with_their_cost():
    usage = Usage(requests=3)
    usage.add_answer((1_000_000, 500_000), (2.0, 4.0))
    usage.add_answer((500_000, 0), (2.0, None))
    assert usage == Usage(
        requests=3, answered=2, prompt_tokens=1_500_000, completion_tokens=500_000, cost=5.0
    )
    assert str(usage) == "3 requests (1 unanswered), 1,500,000 + 500,000 tokens, cost 5.00"


def test_without_a_price_there_is_no_cost():
    usage = Usage(requests=1)
    usage.add_answer((10, 2), (None, None))
    assert usage.cost is None
    assert str(usage) == "1 requests (0 unanswered), 10 + 2 tokens"


def test_what_came_since():
    before = Usage(requests=2, answered=1, prompt_tokens=5, cached=1)
    later = before + Usage(requests=3, answered=3, cost=1.5)
    assert later - before == Usage(requests=3, answered=3, cost=1.5)
    assert (before + before).cost is None
