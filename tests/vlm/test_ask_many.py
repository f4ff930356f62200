"""Many prompts to a model: order, cache, invalid answers, failures."""

import functools
import hashlib
import json

import pytest
from etils import epath
from stand_in_server import refuses, says, serving

from animegamer_jax.errors import UserError
from animegamer_jax.vlm.ask_many import AskMany
from animegamer_jax.vlm.client import AskSettings
from animegamer_jax.vlm.messages import read_object
from animegamer_jax.vlm.retry import Prompt

SCHEMA = {"type": "object", "properties": {"double": {"type": "integer"}}}


def parse(answer: str) -> int:
    found = read_object(answer).get("double")
    if type(found) is not int:
        raise ValueError(f"double: expected a whole number, found {found!a}")
    return found


def prompt(number: int) -> Prompt[int]:
    return Prompt(
        key=hashlib.sha256(str(number).encode()).hexdigest(),
        messages=lambda: [{"role": "user", "content": str(number)}],
        schema=SCHEMA,
        parse=parse,
    )


def doubled(question):
    return says(json.dumps({"double": 2 * int(question.body["messages"][0]["content"])}))


def ask(server, cache, numbers, *, best_effort=False, **changes):
    options = {"model": "stand-in", "parallel": 3, "retries": 0, "attempts": 2, "patience": 3}
    settings = AskSettings(endpoint=server.endpoint, **(options | changes))
    asker = AskMany(settings, noun="numbers", best_effort=best_effort)
    prompts = [functools.partial(prompt, number) for number in numbers]
    return asker(prompts, cache=epath.Path(cache)), asker


def test_answers_come_in_order_and_are_asked_once(tmp_path):
    with serving(doubled) as server:
        answers, asker = ask(server, tmp_path, range(6))
        assert [answer.value for answer in answers] == [0, 2, 4, 6, 8, 10]
        assert (asker.usage.requests, asker.usage.cached) == (6, 0)
        again, asker = ask(server, tmp_path, range(7))
        assert again[:6] == answers
        assert (asker.usage.requests, asker.usage.cached) == (1, 6)


def test_a_damaged_reply_in_the_cache_is_asked_for_again(tmp_path):
    with serving(doubled) as server:
        ask(server, tmp_path, [4])
        (file,) = tmp_path.rglob("*.json")
        whole = file.read_bytes()
        file.write_bytes(whole[:-5])
        (answer,), asker = ask(server, tmp_path, [4])
    assert (answer.value, asker.usage.requests) == (8, 1)
    assert file.read_bytes() == whole


def test_an_invalid_answer_is_shown_to_the_model(tmp_path):
    def answer(question):
        return says('{"double": "four"}') if question.number == 0 else says('{"double": 4}')

    with serving(answer) as server:
        (found,), _ = ask(server, tmp_path, [2])
        first, second = (question.body["messages"] for question in server.questions)
    assert (found.value, found.reply.attempts) == (4, 2)
    assert second[: len(first)] == first
    assert second[1]["content"] == '{"double": "four"}'
    assert "expected a whole number, found 'four'" in second[2]["content"]


def test_an_answer_that_stays_invalid_has_a_reason(tmp_path):
    with serving(lambda question: says("no")) as server:
        (found,), _ = ask(server, tmp_path, [2])
    assert found.value is None
    assert found.reason.startswith("asked 2 times, no valid answer: not valid JSON")
    assert found.text == "no"


def test_failures_in_a_row_end_the_run_or_skip_the_rest(tmp_path):
    with serving(lambda question: refuses(400)) as server:
        with pytest.raises(UserError, match="no usable answer for 3 numbers in a row, the last: "):
            ask(server, tmp_path, range(9), parallel=1)
        assert len(server.questions) == 3
        answers, _ = ask(server, tmp_path, range(9), parallel=1, best_effort=True)
        assert len(server.questions) == 6
    assert all("the server answers 400" in answer.reason for answer in answers)
    asked = [not answer.reason.startswith("not asked: ") for answer in answers]
    assert asked == [True] * 3 + [False] * 6
