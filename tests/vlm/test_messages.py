"""Messages to a model, and the JSON in its answers."""

import base64
import io

import pytest
from PIL import Image

from animegamer_jax.vlm.messages import picture_part, read_object, retry_messages


@pytest.mark.parametrize("answer", ['{"a": 1}', '```json\n{"a": 1}\n```', ' ```\n{"a": 1}\n``` '])
def test_an_object_is_read_with_or_without_a_fence(answer):
    assert read_object(answer) == {"a": 1}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("Sure!", r"not valid JSON \(.*\), found 'Sure!'"),
        ('```json\n["a"]\n```', r"""expected a JSON object, found '\["a"\]'"""),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_anything_else_is_refused_in_one_line(answer, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_object(answer)
    assert len(str(caught.value)) < 250
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("size", "sent"), [((300, 100), (150, 50)), ((60, 40), (60, 40))])
def test_a_picture_is_made_smaller_but_never_larger(size, sent):
    url = picture_part(Image.new("RGB", size, "red"), side=150)["image_url"]["url"]
    head, _, data = url.partition(",")
    assert head == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert picture.size == sent


def test_a_model_sees_its_wrong_answer_and_what_is_wrong():
    answer, complaint = retry_messages("x" * 5000, error="subject: missing")
    assert answer == {"role": "assistant", "content": "x" * 4000}
    assert complaint["role"] == "user"
    assert "That cannot be used: subject: missing." in complaint["content"]
    assert retry_messages("", error="nothing")[0]["content"] == "(nothing)"
