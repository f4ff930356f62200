"""Messages to a model: texts, pictures, the JSON in an answer, and what follows an invalid one."""

import base64
import io
import json
import re
from typing import Any

from PIL import Image

Message = dict[str, Any]
Part = dict[str, Any]

_QUALITY = 85  # of a JPEG
_SHOWN = 4000  # characters of a wrong answer that the model sees again
_FENCED = re.compile(r"\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)


def text_part(text: str) -> Part:
    """Returns a text as a part of a message."""
    return {"type": "text", "text": text}


def picture_part(picture: Image.Image, *, side: int) -> Part:
    """Returns a picture as a part of a message: a JPEG, its longer side `side` pixels at most."""
    small = picture.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, format="JPEG", quality=_QUALITY)
    url = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _without_fence(answer: str) -> str:
    """Removes the Markdown fence that some models put around JSON."""
    fenced = _FENCED.fullmatch(answer)
    return fenced[1] if fenced else answer


def read_content(answer: str) -> Any:
    """Returns the JSON in an answer, with or without a Markdown fence.

    Raises:
        ValueError: In one line, why there is none.
    """
    try:
        return json.loads(_without_fence(answer))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error}), found {answer[:60]!a}") from None


def read_object(answer: str) -> dict[str, Any]:
    """Returns the JSON object in an answer, with or without a Markdown fence.

    Raises:
        ValueError: In one line, what is there instead.
    """
    fields = read_content(answer)
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, found {_without_fence(answer)[:60]!a}")
    return fields


def retry_messages(answer: str, *, error: str) -> list[Message]:
    """Returns the messages that follow an invalid answer: the answer, and what is wrong."""
    text = f"That cannot be used: {error}. Answer again with the whole, corrected JSON object."
    return [
        {"role": "assistant", "content": answer[:_SHOWN] or "(nothing)"},
        {"role": "user", "content": text},
    ]
