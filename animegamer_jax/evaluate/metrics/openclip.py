"""CLIP for CLIP-I and CLIP-T (paper, section 4.2), which need not be the model's own.

A model that was trained on one CLIP's features may please that CLIP more than others, and scores by
two CLIPs are on two scales. So any CLIP on disk can score: a bundle's, or an OpenCLIP checkpoint as
published. Nothing is downloaded.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from annotated_types import Ge
from jaxtyping import Int

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.bundle.networks import abstract_network
from animegamer_jax.configs import CLIPConfig
from animegamer_jax.convert.networks import EMBEDDED, infer
from animegamer_jax.convert.rules import load
from animegamer_jax.convert.sources import Source, open_checkpoint
from animegamer_jax.convert.tables.clip import rules
from animegamer_jax.errors import UserError, first_line
from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder, TextTokenizer
from animegamer_jax.models.clip import CLIP
from animegamer_jax.storage.serialization import from_json, parse_json, read_json
from animegamer_jax.storage.untrusted import read_file
from animegamer_jax.tokenizer import END, Tokenizer

CONFIG_FILE = "open_clip_config.json"
_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
# Prefixes of the table's names: in OpenCLIP's training loop and in the released decoder.
_PREFIXES = ("module.", EMBEDDED["clip"])
_Size = Annotated[int, Ge(1)]
_WIDEST = 1024  # image towers up to this width have heads of 64; wider ones differ


class BytePairTokenizer:
    """CLIP's byte-pair tokenizer, from a folder of files in transformers' format.

    Raises:
        UserError: The folder holds no such tokenizer.
    """

    def __init__(self, folder: str | Path):
        import transformers

        self.folder = Path(folder)
        if not any((self.folder / name).is_file() for name in _TOKENIZER_FILES):
            raise UserError(
                f"{self.folder}: no tokenizer: expected CLIP's tokenizer.json, or vocab.json "
                "and merges.txt"
            )
        try:
            found = transformers.CLIPTokenizer.from_pretrained(
                str(self.folder), local_files_only=True
            )
        except Exception as error:  # its libraries raise bare ones for a bad file
            reason = first_line(error)
            raise UserError(f"{self.folder}: the tokenizer cannot be read ({reason})") from None
        self._tokenizer: Any = found

    def __len__(self) -> int:
        """Returns the number of entries."""
        return len(self._tokenizer)

    def padded_with_end(self, text: str, length: int) -> Int[np.ndarray, " {length}"]:
        """Returns ids with start and end token, cut so that both fit, padded with 0.

        Text that spells a special token (`<|endoftext|>`) does not become one.
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
    """Loads CLIP from a bundle or an OpenCLIP checkpoint.

    Frames are resized to the tower's square, so that the whole frame counts; OpenCLIP's own
    transform crops the middle, so values differ from those of scripts that crop. The exact GELU is
    computed. Weights made with the "quick" GELU (OpenAI's, and names with `quickgelu`) are refused
    if `open_clip_config.json` says so; nothing in the weights themselves shows it.

    Args:
        path: A bundle's folder; a checkpoint of OpenCLIP's vision transformer with its own names;
            or a folder with `open_clip_model.safetensors` or `open_clip_pytorch_model.bin`,
            preferably with `open_clip_config.json`.
        tokenizer: Folder with CLIP's byte-pair tokenizer. None: a bundle's own tokenizer, if it is
            one of whole words, or the files in a checkpoint's folder. Without any, only frames can
            be embedded.
        head_width: Features of an attention head, if there is no `open_clip_config.json`.
        batch_size: Number of frames or texts that go through a tower together.

    Raises:
        UserError: The file is missing, not a CLIP or not one that this code implements; the
            tokenizer has another vocabulary; or torch, which reads PyTorch's format, is missing.
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
    """Returns whether a folder is a bundle; Hugging Face's folders have a config.json, too."""
    if "://" in str(path):
        return True
    if not Path(path).exists():
        raise UserError(f"{path}: no such file or folder: expected a bundle or an OpenCLIP file")
    file = Path(path) / "config.json"
    try:
        return "format_version" in parse_json(read_file(file), str(file), hint="")
    except (OSError, TypeError, UserError):
        return False


def _from_bundle(path: str | Path, *, use_tokenizer: bool) -> tuple[CLIP, TextTokenizer | None]:
    bundle = Bundle.open(path)
    clip = bundle.load("clip", dtype="float32", param_dtype="float32")
    if not use_tokenizer or not (bundle.path / "tokenizer").is_dir():
        return clip, None
    encoder = bundle.config.encoder
    num_queries = 0 if encoder is None else encoder.num_tokens
    words = Tokenizer.load(bundle.tokenizer_dir, num_queries=num_queries)
    # Only a tokenizer of whole words serves both the language model and CLIP.
    return clip, words if words.has(END) else None


def _from_checkpoint(path: Path, *, head_width: int | None) -> CLIP:
    file = path
    if path.is_dir():
        file = next((path / name for name in _WEIGHTS if (path / name).is_file()), path)
    source = _named(open_checkpoint(file))
    content = _read_config(path if path.is_dir() else path.parent)
    vision, text = (content.get(key) or {} for key in ("vision_cfg", "text_cfg"))
    if content.get("quick_gelu"):
        raise UserError(
            f"{path}: {CONFIG_FILE} sets the quick GELU, which is not implemented: give "
            "weights made with the exact GELU, such as laion2b_s34b_b88k"
        )
    config = cast(CLIPConfig, infer("clip", source, head_width=1))
    of_image = vision.get("head_width", 64 if content else head_width)
    if of_image is None and config.vision_width > _WIDEST:
        raise UserError(
            f"{path}: the weights do not show the heads of an image tower of width "
            f"{config.vision_width}: give {CONFIG_FILE} in the same folder, or a head width"
        )
    heads = {
        "vision_heads": _num_heads(path, "image", config.vision_width, of_image or 64),
        "text_heads": text.get("heads")
        or _num_heads(path, "text", config.text_width, head_width or 64),
    }
    config = dataclasses.replace(config, **heads)
    clip = cast(CLIP, abstract_network("clip", config))
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
    """Returns the tensors under the names of the table.

    Raises:
        UserError: The names are transformers'.
    """
    if any(name.startswith("vision_model.") for name in source.tensors):
        raise UserError(
            f"{source.label}: tensors in transformers' names: expected OpenCLIP's own file, "
            f"{' or '.join(_WEIGHTS)}, from the same repository"
        )
    for prefix in _PREFIXES:
        if source.tensors and all(name.startswith(prefix) for name in source.tensors):
            source = source.under(prefix)
    return source


def _read_config(folder: Path) -> dict[str, Any]:
    """Returns `model_cfg` of the folder's `open_clip_config.json`; empty if there is no file."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        return {}
    hint = "expected OpenCLIP's JSON with `model_cfg`"
    content = read_json(file, dict[str, Any], hint=hint)
    found = from_json(dict[str, Any], content.get("model_cfg"), f"{file}: model_cfg", hint=hint)
    for tower, sizes in {"vision_cfg": ("width", "head_width"), "text_cfg": ("heads",)}.items():
        where = f"{file}: model_cfg.{tower}"
        table = from_json(dict[str, Any] | None, found.get(tower), where, hint=hint) or {}
        if tower == "vision_cfg" and "width" not in table:
            raise UserError(f"{where}.width: missing: {hint}")
        for name in sizes:
            if table.get(name) is not None:
                from_json(_Size, table[name], f"{where}.{name}", hint=hint)
    return found
