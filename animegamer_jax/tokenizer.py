"""The tokenizer of a bundle: instructions to ids, and a check that its special tokens are there.

`write_word_tokenizer` makes one of whole words, for worlds whose vocabulary is known.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from animegamer_jax.errors import UserError
from animegamer_jax.protocol import SPECIAL_TOKENS, TokenIds

FILE = "tokenizer.json"
PUNCTUATION = tuple(".,;:!?'-")
PAD, UNKNOWN, BEGIN, MASK, CLOSE, END = "<pad>", "<unk>", "<s>", "<mask>", "</s>", "<end>"
MAX_CHARACTERS = 2000  # of an instruction: far beyond any caption length, cheap to refuse


class Tokenizer:
    """Wraps a `tokenizers` tokenizer that was checked to hold the game's special tokens.

    Raises:
        UserError: tokens are missing, or the number of entries is not the model's vocabulary.
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
        self.ids = TokenIds(
            bos=known["<s>"],
            special={token: known[token] for token in SPECIAL_TOKENS},
            frames=tuple(known[token] for token in frames),
        )
        self._added = sorted(
            (token.content for token in tokenizer.get_added_tokens_decoder().values()),
            key=len,
            reverse=True,
        )

    @classmethod
    def load(
        cls, folder: Path | str, *, vocab_size: int | None = None, num_queries: int = 226
    ) -> "Tokenizer":
        """Reads a bundle's `tokenizer.json`, or a folder that only transformers can read.

        Raises:
            UserError: the folder holds no tokenizer, or not this game's.
        """
        folder = Path(folder)
        if (folder / FILE).is_file():
            import tokenizers

            try:
                tokenizer = tokenizers.Tokenizer.from_file(str(folder / FILE))
            except Exception as error:  # the library raises a bare Exception for a bad file
                raise UserError(f"{folder / FILE}: not a tokenizer file ({error})") from error
        elif (folder / "tokenizer.model").is_file():
            tokenizer = _from_transformers(folder)
        else:
            raise UserError(
                f"{folder}: no tokenizer there; expected a folder with tokenizer.json or "
                "tokenizer.model"
            )
        return cls(tokenizer, name=str(folder), vocab_size=vocab_size, num_queries=num_queries)

    def __len__(self) -> int:
        """Number of entries, special ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def has(self, token: str) -> bool:
        """Whether there is such an entry."""
        return self._tokenizer.token_to_id(token) is not None

    def id_of(self, token: str) -> int:
        """The id of one entry.

        Raises:
            UserError: there is no such entry.
        """
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise UserError(
                f"tokenizer {self._name}: it has no {token}: use a tokenizer of whole words, as "
                "`animegamer data toyworld` writes it"
            )
        return found

    def _apart(self, text: str) -> str:
        """Text that spells a special token (`<img>`) gets a space after its bracket."""
        for token in self._added:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def encode(self, instruction: str) -> list[int]:
        """Ids of an instruction as it stands between `<TURN>` and `<img>`.

        A player's words never become a special token, whatever they spell.
        """
        text = f"<TURN>{self._apart(instruction)}<img>"
        return self._tokenizer.encode(text, add_special_tokens=False).ids[1:-1]

    def padded(self, text: str, length: int) -> Int[np.ndarray, " {length}"]:
        """Ids as T5 reads them here: cut at `length`, the rest is padding, id 0."""
        ids = self.encode(text)[:length]
        return np.array(ids + [0] * (length - len(ids)), np.int32)

    def padded_with_end(self, text: str, length: int) -> Int[np.ndarray, " {length}"]:
        """Ids as CLIP reads them: cut so that the end token follows, the rest is padding.

        Raises:
            UserError: the tokenizer has no end token.
        """
        ids = [*self.encode(text)[: length - 1], self.id_of(END)]
        return np.array(ids + [0] * (length - len(ids)), np.int32)

    def unknown_words(self, text: str) -> tuple[str, ...]:
        """The words of a text that the tokenizer does not know, in order, each once.

        None where every letter has an id, as in the released tokenizer.
        """
        text = self._apart(text)
        unknown = self._tokenizer.token_to_id(UNKNOWN)
        found = self._tokenizer.encode(text, add_special_tokens=False)
        pairs = zip(found.ids, found.offsets, strict=True)
        return tuple(dict.fromkeys(text[slice(*span)] for i, span in pairs if i == unknown))

    def caption(self, instruction: str, length: int) -> tuple[np.ndarray, int]:
        """Ids padded to `length`, and how many of them count.

        Raises:
            UserError: the instruction is empty or too long.
        """
        instruction = " ".join(instruction.split())
        if not instruction:
            raise UserError("the instruction is empty: say what the character does")
        if len(instruction) > MAX_CHARACTERS:
            raise UserError(
                f"the instruction has {len(instruction)} characters: at most {MAX_CHARACTERS} "
                "are read; say it shorter"
            )
        ids = self.encode(instruction)
        if len(ids) > length:
            raise UserError(
                f"the instruction has {len(ids)} tokens, the model reads {length}: say it shorter "
                f"({instruction[:40]!r}...)"
            )
        padded = np.zeros(length, np.int32)
        padded[: len(ids)] = ids
        return padded, len(ids)


def _frame_tokens(count: int) -> tuple[str, ...]:
    return tuple(f"<frame_{i:05d}>" for i in range(count))


def write_word_tokenizer(
    folder: Path | str, words: Sequence[str], *, num_frame_tokens: int = 64
) -> int:
    """Writes a tokenizer of whole words, capital or not, with punctuation marks split off.

    Ids: padding is 0, then `<unk>`, `<s>`, `<mask>`, `</s>`, the marks, the words as they come,
    the game's special tokens, and last of all `<end>`: CLIP reads its text at the largest id.

    Args:
        folder: made if it is not there.
        words: lower case, without punctuation; doubles count once.
        num_frame_tokens: at least the model's number of queries.

    Returns:
        The number of entries, which is the vocabulary size of the networks.

    Raises:
        ValueError: a word would be split, or changed to lower case, before it is looked up.
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
    """The fast tokenizer that transformers makes of a sentencepiece folder.

    A `tokenizer_config.json` of another kind of file is refused in one line.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
    except (OSError, ValueError, json.JSONDecodeError, RuntimeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{folder}: the tokenizer cannot be read ({first})") from error


def copy_tokenizer(
    source: Path | str, target: Path | str, *, vocab_size: int, num_queries: int = 226
) -> None:
    """Checks a released tokenizer folder and copies it, with a `tokenizer.json` that loads fast.

    Raises:
        UserError: special tokens or size differ from the model's.
    """
    source, target = Path(source), Path(target)
    checked = Tokenizer.load(source, vocab_size=vocab_size, num_queries=num_queries)
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file():
            shutil.copyfile(file, target / file.name)
    checked._tokenizer.save(str(target / FILE))
