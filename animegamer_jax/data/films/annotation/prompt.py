"""What a model is shown and asked of a clip: pictures of the cast, frames, and the fields to fill.

The paper shows four frames and reference images to a vision-language model (PAPER section 3.1);
the wording here is our own.
"""

import hashlib
import json

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
from animegamer_jax.vlm.messages import Message, Part, picture_part, read_object, text_part

VERSION = 1
"""Of the wording: answers to another one are asked for again."""


_SYSTEM = (
    "You look at short clips of an animated film and fill in a form about each. A player of a game "
    "will read what you write as an instruction, so write plain English, say only what the "
    "pictures show, and answer with one JSON object and nothing around it."
)
_RULES = "Fill in every field:\n" + "\n".join(
    f"- {name}: {field.description}." for name, field in Annotation.model_fields.items()
)


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
