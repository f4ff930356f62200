"""What a model is shown and asked of a clip: pictures of the cast, frames, and the fields to fill.

The paper shows four frames and reference images to a vision-language model (PAPER section 3.1);
the wording here is our own.
"""

import base64
import hashlib
import io
import json
import re
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from animegamer_jax.data.characters import (
    NOBODY,
    Cast,
    Character,
    open_picture,
)
from animegamer_jax.data.films.annotation.labels import Annotation, validated
from animegamer_jax.media.video import pick_frames

VERSION = 1
"""Of the wording: answers to another one are asked for again."""

Message = dict[str, Any]
Part = dict[str, Any]

_QUALITY = 85
_SHOWN = 4000  # letters of a wrong answer that the model sees again
_SYSTEM = (
    "You look at short clips of an animated film and fill in a form about each. A player of a game "
    "will read what you write as an instruction, so write plain English, say only what the "
    "pictures show, and answer with one JSON object and nothing around it."
)
_RULES = "Fill in every field:\n" + "\n".join(
    f"- {name}: {field.description}." for name, field in Annotation.model_fields.items()
)
_FENCED = re.compile(r"\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)


class Question:
    """The question about a clip, with the cast's pictures made ready once.

    Args:
        cast: with its pictures.
        frames: that are shown of a clip.
        side: pixels of a picture's longer side at most.
        seconds: of a clip.

    Attributes:
        schema: the JSON schema of an answer; the subjects are the cast's.
    """

    def __init__(self, cast: Cast, *, frames: int, side: int, seconds: float):
        self._frames, self._side, self._seconds = frames, side, seconds
        self._cast = cast
        self.schema = Annotation.model_json_schema()
        self.schema["properties"]["subject"]["enum"] = [*cast.names, *NOBODY]
        self._about = [text_part("Characters that the clip may be about:")]
        for character in cast.characters:
            self._about += self._introduce(character)

    @property
    def digest(self) -> str:
        """SHA-256 of all but the clip: the wording, the cast, the number and size of pictures."""
        about = [VERSION, _SYSTEM, _RULES, self._cast.digest]
        about += [self._frames, self._side, round(self._seconds, 3)]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()

    def ask(self, clip: UInt8[np.ndarray, "f h w 3"]) -> list[Message]:
        """The messages about one clip."""
        shown = pick_frames(clip, count=self._frames)
        told = f"The clip: {len(shown)} pictures in order, from {self._seconds:.1f} seconds."
        pictures = [self._picture(Image.fromarray(frame)) for frame in shown]
        content = [*self._about, text_part(told), *pictures, text_part(_RULES)]
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": content}]

    def read(self, answer: str) -> Annotation:
        """The record in an answer.

        Raises:
            ValueError: in one line, what is wrong with it.
        """
        return validated(read_object(answer), self._cast)

    def _introduce(self, character: Character) -> list[Part]:
        called = f" (also called {', '.join(character.aliases)})" if character.aliases else ""
        parts = [text_part(f"{character.name}{called} looks like this:")]
        for digest in character.images:
            name = f"picture of {character.name}"
            picture = open_picture(self._cast.pictures[digest], name=name, mend="use another one")
            parts.append(self._picture(picture))
        return parts

    def _picture(self, picture: Image.Image) -> Part:
        return picture_part(picture, side=self._side)


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
