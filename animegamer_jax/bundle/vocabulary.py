"""The tokenizer and the words of a bundle or a dataset: `tokenizer/`, and optionally `words.json`.

`words.json` lists the words that the world of a model understands, so that a prompt or a page can
offer them.
"""

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path

from etils import epath

from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import is_bucket, user_errors
from animegamer_jax.storage.serialization import read_json

TOKENIZER_FOLDER = "tokenizer"
T5_TOKENIZER_FOLDER = "t5_tokenizer"
WORDS_FILE = "words.json"
_HINT = "write it again, or remove it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The words to offer for each part of an instruction; a player may type others.

    Attributes:
        characters: Names of characters.
        adverbs: Adverbs of a motion, from slow to fast.
        motions: Motions, such as "walking".
        times: Times of day.
        places: Places, such as "beach".
        examples: Whole instructions.
        effects: Changes of the meters by motion, as far as they do not depend on more.
    """

    characters: tuple[str, ...] = ()
    adverbs: tuple[str, ...] = ()
    motions: tuple[str, ...] = ()
    times: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    effects: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)


def read_vocabulary(folder: epath.Path) -> Vocabulary:
    """Reads the `words.json` of a bundle; an empty vocabulary if it has none.

    Raises:
        UserError: The file is not an object of lists of texts.
    """
    path = folder / WORDS_FILE
    with user_errors(path, "cannot be read", hint=_HINT):
        if not path.exists():
            return Vocabulary()
    return read_json(path, Vocabulary, hint=_HINT)


def local_tokenizer(folder: epath.Path, *, hint: str, name: str = TOKENIZER_FOLDER) -> Path:
    """Returns the tokenizer of a bundle or a dataset as a local folder.

    From a bucket it is copied to a temporary folder, with the `words.json` next to it.

    Args:
        folder: The bundle or dataset.
        hint: What to do if it has no tokenizer, for the error.
        name: Name of the tokenizer's folder.

    Raises:
        UserError: It has no tokenizer.
    """
    source = folder / name
    if not source.is_dir():
        raise UserError(f"{folder}: no {name}/ there: {hint}")
    if not is_bucket(source):
        return Path(source)
    local = Path(tempfile.mkdtemp(prefix="animegamer-")) / name
    copy_tokenizer_folder(source, epath.Path(local))
    return local


def copy_tokenizer_folder(source: epath.Path, target: epath.Path, *, words: bool = True) -> None:
    """Copies a tokenizer's folder, and with `words` the `words.json` next to it if there is one."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file():
            (target / file.name).write_bytes(file.read_bytes())
    if words and (file := source.parent / WORDS_FILE).exists():
        (target.parent / WORDS_FILE).write_bytes(file.read_bytes())
