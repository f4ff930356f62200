"""The question about a clip: pictures of the characters, frames, and the fields to fill in.

The paper shows four frames and reference images to a vision-language model (paper, section 3.1);
the wording here is our own.
"""

import hashlib
import json

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from animegamer_jax.data.characters import Character, Characters, open_picture
from animegamer_jax.data.films.annotation.labels import Annotation, validated
from animegamer_jax.media.video import pick_frames
from animegamer_jax.vlm.messages import Message, Part, picture_part, read_object, text_part

VERSION = 1
"""Version of the wording; another version is another question."""

_SYSTEM = (
    "You look at short clips of an animated film and fill in a form about each. A player of a game "
    "will read what you write as an instruction, so write plain English, say only what the "
    "pictures show, and answer with one JSON object and nothing around it."
)
_RULES = "Fill in every field:\n" + "\n".join(
    f"- {name}: {field.description}." for name, field in Annotation.model_fields.items()
)


class ClipPrompt:
    """The question about a clip; the characters' pictures are encoded once, for all clips.

    Args:
        characters: With their pictures.
        frames: Number of frames shown of a clip.
        side: Maximum length of a picture's longer side, in pixels.
        seconds: Length of a clip.

    Attributes:
        schema: JSON schema of an answer; it lists the possible subjects.
    """

    def __init__(self, characters: Characters, *, frames: int, side: int, seconds: float):
        self._frames, self._side, self._seconds = frames, side, seconds
        self._characters = characters
        self.schema = Annotation.model_json_schema()
        self.schema["properties"]["subject"]["enum"] = characters.subjects
        self._introduction = [text_part("Characters that the clip may be about:")]
        for character in characters.entries:
            self._introduction += self._introduce(character)

    @property
    def digest(self) -> str:
        """SHA-256 of all but the clip: wording, characters, number and size of the pictures."""
        content = [VERSION, _SYSTEM, _RULES, self._characters.digest]
        content += [self._frames, self._side, round(self._seconds, 3)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def messages(self, clip: UInt8[np.ndarray, "f h w 3"]) -> list[Message]:
        """Returns the conversation about one clip."""
        shown = pick_frames(clip, count=self._frames)
        text = f"The clip: {len(shown)} pictures in order, from {self._seconds:.1f} seconds."
        pictures = [picture_part(Image.fromarray(frame), side=self._side) for frame in shown]
        content = [*self._introduction, text_part(text), *pictures, text_part(_RULES)]
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": content}]

    def parse(self, answer: str) -> Annotation:
        """Returns the record in an answer.

        Raises:
            ValueError: In one line, what is wrong with it.
        """
        return validated(read_object(answer), self._characters)

    def _introduce(self, character: Character) -> list[Part]:
        aliases = f" (also called {', '.join(character.aliases)})" if character.aliases else ""
        parts = [text_part(f"{character.name}{aliases} looks like this:")]
        for digest in character.images:
            name, content = f"picture of {character.name}", self._characters.pictures[digest]
            picture = open_picture(content, name=name, hint="use another one")
            parts.append(picture_part(picture, side=self._side))
        return parts
