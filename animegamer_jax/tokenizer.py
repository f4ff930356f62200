"""The tokenizer of a bundle: instructions to ids, and a check that its special tokens are there."""

import json
import shutil
from pathlib import Path

import numpy as np

from animegamer_jax.errors import UserError
from animegamer_jax.protocol import SPECIAL_TOKENS, TokenIds

FILE = "tokenizer.json"
MAX_CHARACTERS = 2000  # of an instruction: far beyond any caption length, cheap to refuse


class Tokenizer:
    """Wraps a `tokenizers` tokenizer that was checked to hold the game's special tokens.

    Raises:
        UserError: tokens are missing, or the number of entries is not the model's vocabulary.
    """

    def __init__(self, tokenizer, *, name: str, vocab_size: int | None, num_queries: int = 226):
        self._tokenizer = tokenizer
        frames = tuple(f"<frame_{i:05d}>" for i in range(num_queries))
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

    def encode(self, instruction: str) -> list[int]:
        """Ids of an instruction as it stands between `<TURN>` and `<img>`.

        Text that spells a special token (`<img>`) is told apart by a space after its bracket, so
        that a player's words never become one.
        """
        for token in self._added:
            if token in instruction:
                instruction = instruction.replace(token, f"{token[0]} {token[1:]}")
        text = f"<TURN>{instruction}<img>"
        return self._tokenizer.encode(text, add_special_tokens=False).ids[1:-1]

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
