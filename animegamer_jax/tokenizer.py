"""The tokenizer of a bundle: converts instructions to ids, and checks for the special tokens.

`write_word_tokenizer` makes a tokenizer of whole words, for a world with a known vocabulary.
"""

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from animegamer_jax.errors import UserError, first_line
from animegamer_jax.protocol import SPECIAL_TOKENS, TokenIds
from animegamer_jax.storage.serialization import decode_text, read_json
from animegamer_jax.storage.untrusted import read_file

FILE = "tokenizer.json"
PUNCTUATION = tuple(".,;:!?'-")
PAD, UNKNOWN, BEGIN, MASK, CLOSE, END = "<pad>", "<unk>", "<s>", "<mask>", "</s>", "<end>"
_MAX_BYTES = 64 << 20  # of a tokenizer's file: those of the largest vocabularies have 35 MB
_MAX_EXTRA = 1000  # sentinel tokens that a sentencepiece folder asks for: T5 has 100
MAX_CHARACTERS = 2000  # of an instruction: far more than any caption holds, cheap to check


class Tokenizer:
    """A `tokenizers` tokenizer with the game's special tokens.

    Raises:
        UserError: Tokens are missing, or the number of entries is not the model's vocabulary size.
    """

    def __init__(self, tokenizer, *, name: str, vocab_size: int | None, num_queries: int = 226):
        self._tokenizer = tokenizer
        self._name = name
        frames = _frame_tokens(num_queries)
        known = tokenizer.get_vocab(with_added_tokens=True)
        missing = [token for token in ("<s>", *frames, *SPECIAL_TOKENS) if token not in known]
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise UserError(
                f"tokenizer {name}: {len(missing)} special tokens are missing ({shown}); use the "
                "tokenizer folder that came with the checkpoint"
            )
        if vocab_size is not None and len(known) != vocab_size:
            raise UserError(
                f"tokenizer {name}: it has {len(known)} entries, the model's embedding has "
                f"{vocab_size} rows; use the tokenizer folder that came with the checkpoint"
            )
        _check_ids(known, name=name)
        self.ids = TokenIds(
            bos=known["<s>"],
            special={token: known[token] for token in SPECIAL_TOKENS},
            frames=tuple(known[token] for token in frames),
        )
        self._added = _added_tokens(tokenizer)

    @classmethod
    def load(
        cls, folder: Path | str, *, vocab_size: int | None = None, num_queries: int = 226
    ) -> "Tokenizer":
        """Reads a bundle's `tokenizer.json`, or a folder in a format that transformers reads.

        Raises:
            UserError: The folder holds no tokenizer, or its special tokens are not this game's.
        """
        folder = Path(folder)
        tokenizer = _read_folder(folder, model="tokenizer.model")
        return cls(tokenizer, name=str(folder), vocab_size=vocab_size, num_queries=num_queries)

    def __len__(self) -> int:
        """Returns the number of entries, special tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def has(self, token: str) -> bool:
        """Returns whether there is such an entry."""
        return self._tokenizer.token_to_id(token) is not None

    def id_of(self, token: str) -> int:
        """Returns the id of one entry.

        Raises:
            UserError: There is no such entry.
        """
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise UserError(
                f"tokenizer {self._name}: no {token} in it: use a tokenizer of whole words, as "
                "`animegamer data toyworld` writes it"
            )
        return found

    def _escape(self, text: str) -> str:
        return _escape(text, self._added)

    def encode(self, instruction: str) -> list[int]:
        """Returns the ids of an instruction between `<TURN>` and `<img>`.

        A player's words never become a special token, whatever they spell.
        """
        text = f"<TURN>{self._escape(instruction)}<img>"
        return self._tokenizer.encode(text, add_special_tokens=False).ids[1:-1]

    def padded(self, text: str, length: int) -> Int[np.ndarray, " {length}"]:
        """Returns ids for T5: truncated or padded with id 0 to `length`."""
        return _pad(self.encode(text)[:length], length)

    def padded_with_end(self, text: str, length: int) -> Int[np.ndarray, " {length}"]:
        """Returns ids for CLIP: truncated, followed by the end token, padded with id 0.

        Raises:
            UserError: The tokenizer has no end token.
        """
        return _pad([*self.encode(text)[: length - 1], self.id_of(END)], length)

    def unknown_words(self, text: str) -> tuple[str, ...]:
        """Returns the words of a text that the tokenizer does not know, in order, each once.

        Empty if every character has an id, as in the released tokenizer.
        """
        text = self._escape(text)
        unknown = self._tokenizer.token_to_id(UNKNOWN)
        found = self._tokenizer.encode(text, add_special_tokens=False)
        pairs = zip(found.ids, found.offsets, strict=True)
        return tuple(dict.fromkeys(text[slice(*span)] for i, span in pairs if i == unknown))

    def caption(self, instruction: str, length: int) -> tuple[np.ndarray, int]:
        """Returns the ids of an instruction padded to `length`, and their number.

        Raises:
            UserError: The instruction is empty or too long.
        """
        instruction = " ".join(instruction.split())
        if not instruction:
            raise UserError("the instruction is empty: say what the character does")
        if len(instruction) > MAX_CHARACTERS:
            raise UserError(
                f"the instruction has {len(instruction)} characters: at most {MAX_CHARACTERS} "
                "are allowed: use fewer words"
            )
        ids = self.encode(instruction)
        if len(ids) > length:
            raise UserError(
                f"the instruction has {len(ids)} tokens, the model reads {length}: use fewer words "
                f"({instruction[:40]!r}...)"
            )
        padded = np.zeros(length, np.int32)
        padded[: len(ids)] = ids
        return padded, len(ids)


class T5Tokenizer:
    """T5's own tokenizer, for a T5 that does not share the vocabulary of the language model.

    Raises:
        UserError: It has no end token, or more entries than T5's vocabulary.
    """

    def __init__(self, tokenizer, *, name: str, vocab_size: int):
        self._tokenizer = tokenizer
        self._added = _added_tokens(tokenizer)
        self._end = tokenizer.token_to_id(CLOSE)
        if self._end is None or tokenizer.token_to_id(PAD) != 0:
            raise UserError(f"tokenizer {name}: expected {CLOSE}, and {PAD} as id 0: use T5's own")
        _check_ids(tokenizer.get_vocab(with_added_tokens=True), name=name)
        # T5's vocabulary is rounded up.
        if (size := tokenizer.get_vocab_size(with_added_tokens=True)) > vocab_size:
            raise UserError(
                f"tokenizer {name}: it has {size} entries, T5's embedding has {vocab_size} rows; "
                "use the tokenizer folder that came with T5"
            )

    @classmethod
    def load(cls, folder: Path | str, *, vocab_size: int) -> "T5Tokenizer":
        """Reads `tokenizer.json`, or `spiece.model` with its configuration.

        Raises:
            UserError: The folder holds no tokenizer of T5's.
        """
        folder = Path(folder)
        tokenizer = _read_folder(folder, model="spiece.model")
        return cls(tokenizer, name=str(folder), vocab_size=vocab_size)

    def save(self, folder: Path) -> None:
        """Writes it as a `tokenizer.json`, which loads fast."""
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / FILE))

    def padded(self, text: str, length: int) -> Int[np.ndarray, " {length}"]:
        """Returns ids: truncated, followed by the end token, padded with id 0, as in training."""
        found = self._tokenizer.encode(_escape(text, self._added), add_special_tokens=False)
        return _pad([*found.ids[: length - 1], self._end], length)


def _check_ids(known: Mapping[str, int], *, name: str) -> None:
    """Refuses ids beyond the number of entries, for which a model has no embedding.

    Raises:
        UserError: There is one.
    """
    token, largest = max(known.items(), key=lambda entry: entry[1])
    if largest >= len(known):
        raise UserError(
            f"tokenizer {name}: {token!a:.60} has the id {largest}, and there are {len(known)} "
            "entries: use the tokenizer folder that came with the checkpoint"
        )


def _added_tokens(tokenizer) -> list[str]:
    added = tokenizer.get_added_tokens_decoder().values()
    return sorted((token.content for token in added), key=len, reverse=True)


def _escape(text: str, added: Sequence[str]) -> str:
    """Adds a space after the bracket of text that spells a special token, such as `<img>`."""
    for token in added:
        if token in text:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def _pad(ids: list[int], length: int) -> np.ndarray:
    return np.array(ids + [0] * (length - len(ids)), np.int32)


def _read_folder(folder: Path, *, model: str):
    """Reads a folder's `tokenizer.json`, or else its sentencepiece `model`."""
    if (folder / FILE).is_file():
        import tokenizers

        with _reading(folder / FILE, "not a tokenizer file"):
            text = decode_text(read_file(folder / FILE, most=_MAX_BYTES), str(folder / FILE))
            return tokenizers.Tokenizer.from_str(text)
    if (folder / model).is_file():
        for file in folder.iterdir():
            if file.is_file() and file.stat().st_size > _MAX_BYTES:
                raise UserError(f"{file}: expected at most {_MAX_BYTES >> 20} MB in a tokenizer")
        _check_extra_tokens(folder / "tokenizer_config.json")
        return _from_transformers(folder)
    raise UserError(f"{folder}: no tokenizer there; expected a folder with {FILE} or {model}")


def _check_extra_tokens(file: Path) -> None:
    """Refuses a number of sentinel tokens for which transformers would take minutes and gigabytes.

    Raises:
        UserError: There are too many, or the file is damaged.
    """
    if not file.is_file():
        return
    hint = "use the tokenizer folder that came with the checkpoint"
    extra = read_json(file, dict[str, Any], hint=hint).get("extra_ids", 0)
    if not isinstance(extra, int) or extra > _MAX_EXTRA:
        raise UserError(
            f"{file}: extra_ids: expected at most {_MAX_EXTRA}, found {extra!a:.60}: {hint}"
        )


def _frame_tokens(count: int) -> tuple[str, ...]:
    return tuple(f"<frame_{i:05d}>" for i in range(count))


def write_word_tokenizer(
    folder: Path | str, words: Sequence[str], *, num_frame_tokens: int = 64
) -> int:
    """Writes a tokenizer of whole words, in any case, with punctuation marks split off.

    Ids: padding is 0, then `<unk>`, `<s>`, `<mask>`, `</s>`, the marks, the words in the given
    order, the game's special tokens, and last `<end>`: CLIP reads its text at the largest id.

    Args:
        folder: Folder to write to; created if it is missing.
        words: Words in lower case, without punctuation; duplicates count once.
        num_frame_tokens: Number of frame tokens, at least the model's number of queries.

    Returns:
        The number of entries, which is the vocabulary size of the networks.

    Raises:
        ValueError: A word is not in lower case, or the tokenizer would split it.
    """
    import tokenizers

    entries = dict.fromkeys((PAD, UNKNOWN, BEGIN, MASK, CLOSE, *PUNCTUATION, *words))
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    model = tokenizers.models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.WhitespaceSplit(), tokenizers.pre_tokenizers.Punctuation()]
    )
    for word in words:
        if tokenizer.encode(word).ids != [vocabulary[word]]:
            raise ValueError(f"{word!r}: expected one lower-case word without punctuation")
    game = (*SPECIAL_TOKENS, *_frame_tokens(num_frame_tokens))
    tokenizer.add_special_tokens([PAD, UNKNOWN, BEGIN, MASK, CLOSE, *game, END])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / FILE))
    return tokenizer.get_vocab_size()


def _from_transformers(folder: Path):
    """Loads the fast tokenizer that transformers makes from a sentencepiece folder.

    Code in the folder is never run, and nobody is asked whether it may.
    """
    from transformers import AutoTokenizer

    with _reading(folder, "the tokenizer cannot be read"):
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        ).backend_tokenizer


@contextlib.contextmanager
def _reading(path: Path, problem: str) -> Iterator[None]:
    """Turns whatever a library raises for a damaged tokenizer into UserError."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise UserError(f"{path}: {problem} ({first_line(error)})") from error


def copy_tokenizer(
    source: Path | str, target: Path | str, *, vocab_size: int, num_queries: int = 226
) -> None:
    """Checks a released tokenizer folder and copies it, with a `tokenizer.json` that loads fast.

    Raises:
        UserError: Special tokens or size differ from the model's.
    """
    source, target = Path(source), Path(target)
    checked = Tokenizer.load(source, vocab_size=vocab_size, num_queries=num_queries)
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file():
            shutil.copyfile(file, target / file.name)
    checked._tokenizer.save(str(target / FILE))
