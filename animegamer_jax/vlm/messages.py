"""Chat messages to a model, with text and pictures, and what its reply holds."""

import base64
import io
import json
import re
from typing import Any

from PIL import Image

Message = dict[str, Any]


Part = dict[str, Any]


_QUALITY = 85


_SHOWN = 4000  # letters of a wrong answer that the model sees again


_FENCED = re.compile(r"\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)


def text_part(text: str) -> Part:
    """A text in a message."""
    return {"type": "text", "text": text}


def picture_part(picture: Image.Image, *, side: int) -> Part:
    """A picture in a message, as a JPEG of at most `side` pixels on its longer side."""
    small = picture.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, format="JPEG", quality=_QUALITY)
    url = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _bare(answer: str) -> str:
    """An answer without the fence that some models put around JSON."""
    fenced = _FENCED.fullmatch(answer)
    return fenced[1] if fenced else answer


def read_content(answer: str) -> Any:
    """The JSON in an answer, alone or in a fenced block.

    Raises:
        ValueError: in one line, why there is none.
    """
    try:
        return json.loads(_bare(answer))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error}), found {answer[:60]!a}") from None


def read_object(answer: str) -> dict[str, Any]:
    """The JSON object in an answer, alone or in a fenced block.

    Raises:
        ValueError: in one line, what is there instead.
    """
    fields = read_content(answer)
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, found {_bare(answer)[:60]!a}")
    return fields


def again(answer: str, *, wrong: str) -> list[Message]:
    """Messages that follow an answer in which something is wrong."""
    said = answer[:_SHOWN] or "(nothing)"
    told = f"That cannot be used: {wrong}. Answer again with the whole, corrected JSON object."
    return [{"role": "assistant", "content": said}, {"role": "user", "content": told}]
