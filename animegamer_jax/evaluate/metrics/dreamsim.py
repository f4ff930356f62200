"""DreamSim (paper, section 4.2): the similarity of frames as people see it, 1 - distance.

Fu et al., "DreamSim: Learning New Dimensions of Human Visual Similarity using Synthetic Data"
(NeurIPS 2023, arXiv 2306.09344). The authors' package `dreamsim` and their weights compute the
distance: 1 - cosine of the joint features of three networks, fine-tuned on people's choices.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from animegamer_jax.convert.sources import import_torch
from animegamer_jax.errors import UserError, first_line

NEEDED = (
    "dino_vitb16_pretrain.pth",
    "open_clip_vitb16_pretrain.pth.tar",
    "clip_vitb16_pretrain.pth.tar",
    "ensemble_lora",
    "facebookresearch_dino_main",
    "checkpoints/dino_vitbase16_pretrain.pth",
)
"""Files of version 0.2.1 in its cache folder, for its default model, the ensemble.

The last two are DINO's code and weights from torch.hub. The package would download missing files,
so it is called only if all of them exist.
"""


class DreamSim:
    """The package's ensemble on the CPU.

    Args:
        cache: Folder that `dreamsim(pretrained=True, cache_dir=...)` has filled.
        batch_size: Number of frames that go through the networks together.

    Raises:
        UserError: The package or torch is not installed or cannot be imported, or the folder lacks
            weights.
    """

    def __init__(self, cache: str | Path, *, batch_size: int = 16):
        self.batch_size = batch_size
        cache = Path(cache)
        if importlib.util.find_spec("dreamsim") is None:
            raise UserError("DreamSim: its package is not installed: pip install dreamsim==0.2.1")
        if missing := [name for name in NEEDED if not (cache / name).exists()]:
            raise UserError(
                f"DreamSim: {cache}: {', '.join(missing)} missing: call dreamsim(cache_dir=...) "
                "once on a machine that can download"
            )
        import_torch()
        try:
            package: Any = importlib.import_module("dreamsim")
        except Exception as error:  # for instance if torchvision does not match torch
            reason = first_line(error)
            raise UserError(f"DreamSim: its package cannot be imported ({reason})") from None
        found = package.dreamsim(pretrained=True, cache_dir=str(cache), device="cpu")
        self._model, self._preprocess = found

    def similarity(
        self, frames: UInt8[np.ndarray, "*n f h w 3"], references: UInt8[np.ndarray, "*n f h w 3"]
    ) -> Float32[np.ndarray, "*n"]:
        """Returns DreamSim of each clip: the mean over frames of 1 - distance to the reference.

        Equal frames give 1; no unit. The package resizes frames to 224 x 224 itself.
        """
        torch = import_torch()
        lead, count = frames.shape[:-4], frames.shape[-4]
        pair = [part.reshape(-1, *part.shape[-3:]) for part in (frames, references)]
        distances = [np.zeros(0, np.float32)]
        for start in range(0, len(pair[0]), self.batch_size):
            a, b = (self._pixels(part[start : start + self.batch_size]) for part in pair)
            with torch.inference_mode():
                found = self._model(a, b)
            distances.append(np.asarray(found.float().numpy()).reshape(-1))
        return (1 - np.concatenate(distances).reshape(*lead, count)).mean(-1)

    def _pixels(self, frames: UInt8[np.ndarray, "b h w 3"]) -> Any:
        torch = import_torch()
        return torch.cat([self._preprocess(Image.fromarray(frame)) for frame in frames])
