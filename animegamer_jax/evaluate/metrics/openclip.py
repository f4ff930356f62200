"""CLIP for CLIP-I and CLIP-T (PAPER section 4.2), of its own and not the model's under test.

A model that was trained on one CLIP's features may please that CLIP more than others, and two
models with different ones have scores of two scales. So scores can be made with any CLIP on disk: a
bundle's, or an OpenCLIP checkpoint as published. Nothing is downloaded.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
from flax import nnx
from jaxtyping import Int

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.configs import CLIPConfig
from animegamer_jax.convert.networks import EMBEDDED, infer
from animegamer_jax.convert.rules import load
from animegamer_jax.convert.sources import Source, open_checkpoint
from animegamer_jax.convert.tables.clip import rules
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder, TextTokenizer
from animegamer_jax.models.clip import CLIP
from animegamer_jax.tokenizer import END, Tokenizer

CONFIG_FILE = "open_clip_config.json"
_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
# Before the names that the table knows: OpenCLIP's training loop, the released decoder.
_PREFIXES = ("module.", EMBEDDED["clip"])
_WIDEST = 1024  # image towers up to this width have heads of 64; the wider ones differ


class BytePairTokenizer:
    """CLIP's byte-pair encoding, from a folder of files as transformers keeps them.

    Raises:
        UserError: the folder holds no such tokenizer.
    """

    def __init__(self, folder: str | Path):
        import transformers

        self.folder = Path(folder)
        if not any((self.folder / name).is_file() for name in _TOKENIZER_FILES):
            raise UserError(
                f"{self.folder}: no tokenizer there: expected CLIP's tokenizer.json, or vocab.json "
                "and merges.txt"
            )
        try:
            found = transformers.CLIPTokenizer.from_pretrained(
                str(self.folder), local_files_only=True
            )
        except Exception as error:  # its libraries raise bare ones for a bad file
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"{self.folder}: the tokenizer cannot be read ({first})") from None
        self._tokenizer: Any = found

    def __len__(self) -> int:
        """Number of entries."""
        return len(self._tokenizer)

    def padded_with_end(self, text: str, length: int) -> Int[np.ndarray, " {length}"]:
        """Ids with the start token and the end token, cut so that both fit; the rest is 0.

        Words that spell a special token (`<|endoftext|>`) do not become one.
        """
        ids = self._tokenizer(text.replace("<|", "< |"), add_special_tokens=False)["input_ids"]
        start, end = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        ids = [start, *ids[: length - 2], end]
        return np.array(ids + [0] * (length - len(ids)), np.int32)


def load_clip_for_scores(
    path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    head_width: int | None = None,
    batch_size: int = 64,
) -> ClipEmbedder:
    """CLIP from a bundle or an OpenCLIP checkpoint, for embeddings of frames and captions.

    Frames are squashed to the tower's square, so that all of a frame counts; OpenCLIP's own
    transform crops its middle, so values differ from those of scripts that crop. The exact GELU is
    computed: weights made with the "quick" one (OpenAI's, and names with `quickgelu`) are refused
    where `open_clip_config.json` tells it, and nothing in the weights themselves does.

    Args:
        path: a bundle's folder; a checkpoint of OpenCLIP's vision transformer in its own names; or
            a folder with `open_clip_model.safetensors` or `open_clip_pytorch_model.bin`, and best
            with `open_clip_config.json` beside it.
        tokenizer: a folder with CLIP's byte-pair encoding. If None: of a bundle its own tokenizer,
            where it is one of whole words; of a checkpoint the files in its folder. Where there is
            none, frames can be embedded, and texts raise a `UserError`.
        head_width: features of an attention head, where `open_clip_config.json` does not tell.
        batch_size: frames or texts that go through a tower together.

    Raises:
        UserError: no such file; not a CLIP, or one that this implementation is not; a tokenizer of
            another vocabulary; or torch, which reads PyTorch's own format, is not installed.
    """
    if _is_bundle(path):
        clip, words = _from_bundle(path, use_tokenizer=tokenizer is None)
    else:
        path = Path(path)
        clip, words = _from_checkpoint(path, head_width=head_width), None
        folder = path if path.is_dir() else path.parent
        if tokenizer is None and any((folder / name).is_file() for name in _TOKENIZER_FILES):
            tokenizer = folder
    if tokenizer is not None:
        words = BytePairTokenizer(tokenizer)
        if len(words) != clip.config.vocab_size:
            raise UserError(
                f"{words.folder}: the tokenizer has {len(words)} entries, the text tower of {path} "
                f"{clip.config.vocab_size}: expected the tokenizer that belongs to it"
            )
    return ClipEmbedder(clip, words, batch_size=batch_size)


def _is_bundle(path: str | Path) -> bool:
    """Told by its config.json: Hugging Face's folders have one as well."""
    if "://" in str(path):
        return True
    if not Path(path).exists():
        raise UserError(f"{path}: no such file or folder: expected a bundle or an OpenCLIP file")
    file = Path(path) / "config.json"
    try:
        return "format_version" in json.loads(file.read_text())
    except (OSError, ValueError, TypeError):
        return False


def _from_bundle(path: str | Path, *, use_tokenizer: bool) -> tuple[CLIP, TextTokenizer | None]:
    bundle = Bundle.open(path)
    clip = cast(CLIP, bundle.load("clip", dtype="float32", param_dtype="float32"))
    if not use_tokenizer or not (bundle.path / "tokenizer").is_dir():
        return clip, None
    encoder = bundle.config.encoder
    num_queries = 0 if encoder is None else encoder.num_tokens
    words = Tokenizer.load(bundle.tokenizer_dir, num_queries=num_queries)
    # The language model's tokenizer is CLIP's as well in worlds of whole words only.
    return clip, words if words.has(END) else None


def _from_checkpoint(path: Path, *, head_width: int | None) -> CLIP:
    file = path
    if path.is_dir():
        file = next((path / name for name in _WEIGHTS if (path / name).is_file()), path)
    source = _named(open_checkpoint(file))
    told = _read_config(path if path.is_dir() else path.parent)
    vision, text = (told.get(key) or {} for key in ("vision_cfg", "text_cfg"))
    if told.get("quick_gelu"):
        raise UserError(
            f"{path}: {CONFIG_FILE} tells of the quick GELU, which these towers do not have: "
            "expected weights made with the exact one, such as laion2b_s34b_b88k"
        )
    config = cast(CLIPConfig, infer("clip", source, head_width=1))
    of_image = vision.get("head_width", 64 if told else head_width)
    if of_image is None and config.vision_width > _WIDEST:
        raise UserError(
            f"{path}: an image tower of width {config.vision_width} has heads that its weights do "
            f"not tell: expected {CONFIG_FILE} beside it, or a head width"
        )
    heads = {
        "vision_heads": _num_heads(path, "image", config.vision_width, of_image or 64),
        "text_heads": text.get("heads")
        or _num_heads(path, "text", config.text_width, head_width or 64),
    }
    config = dataclasses.replace(config, **heads)
    clip = CLIP(config, rngs=nnx.Rngs(0))
    load(rules(config), source, clip)
    return clip


def _num_heads(path: Path, tower: str, width: int, head_width: int) -> int:
    if head_width < 1 or width % head_width:
        raise UserError(
            f"{path}: the {tower} tower's width is {width}: expected a head width that divides it, "
            f"found {head_width}"
        )
    return width // head_width


def _named(source: Source) -> Source:
    """The tensors under the names of the table.

    Raises:
        UserError: they are transformers' names.
    """
    if any(name.startswith("vision_model.") for name in source.tensors):
        raise UserError(
            f"{source.label}: tensors in transformers' names: expected OpenCLIP's own file, "
            f"{' or '.join(_WEIGHTS)}, which is published beside it"
        )
    for prefix in _PREFIXES:
        if source.tensors and all(name.startswith(prefix) for name in source.tensors):
            source = source.under(prefix)
    return source


def _read_config(folder: Path) -> dict[str, Any]:
    """`model_cfg` of the folder's `open_clip_config.json`; empty where there is none."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())["model_cfg"]
        found["vision_cfg"]["width"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file}: expected OpenCLIP's JSON with `model_cfg`") from None
    return found
