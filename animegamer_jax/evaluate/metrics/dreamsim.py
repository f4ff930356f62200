"""DreamSim (PAPER section 4.2): how alike frames look to people, 1 - distance.

Fu et al., "DreamSim: Learning New Dimensions of Human Visual Similarity using Synthetic Data"
(NeurIPS 2023, arXiv 2306.09344). The distance is that of its authors' package `dreamsim` and of
their weights: 1 - cosine of the joined features of three networks, fine-tuned on people's choices.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from animegamer_jax.convert.sources import import_torch
from animegamer_jax.errors import UserError

NEEDED = (
    "dino_vitb16_pretrain.pth",
    "open_clip_vitb16_pretrain.pth.tar",
    "clip_vitb16_pretrain.pth.tar",
    "ensemble_lora",
    "facebookresearch_dino_main",
    "checkpoints/dino_vitbase16_pretrain.pth",
)
"""What version 0.2.1 keeps in its cache folder for its default model, the ensemble.

The last two are DINO's code and weights, which torch.hub puts there. The package downloads what is
missing: so nothing is begun unless all are there.
"""


class DreamSim:
    """The package's ensemble on the CPU.

    Args:
        cache: the folder that `dreamsim(pretrained=True, cache_dir=...)` filled before.
        batch_size: frames that go through the networks together.

    Raises:
        UserError: the package or torch is not installed or cannot be imported, or weights are
            missing in the folder.
    """

    def __init__(self, cache: str | Path, *, batch_size: int = 16):
        self.batch_size = batch_size
        cache = Path(cache)
        if importlib.util.find_spec("dreamsim") is None:
            raise UserError("DreamSim: its package is not installed: pip install dreamsim==0.2.1")
        if missing := [name for name in NEEDED if not (cache / name).exists()]:
            raise UserError(
                f"DreamSim: {cache}: {', '.join(missing)} missing: call its dreamsim(cache_dir=...)"
                " once where it can download"
            )
        import_torch()
        try:
            package: Any = importlib.import_module("dreamsim")
        except Exception as error:  # of torchvision beside another torch, for instance
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"DreamSim: its package cannot be imported ({first})") from None
        found = package.dreamsim(pretrained=True, cache_dir=str(cache), device="cpu")
        self._model, self._preprocess = found

    def similarity(
        self, frames: UInt8[np.ndarray, "*n f h w 3"], references: UInt8[np.ndarray, "*n f h w 3"]
    ) -> Float32[np.ndarray, "*n"]:
        """DreamSim of each clip: the mean over its frames of 1 - distance to the reference's.

        1 for equal frames; no unit. Frames are squashed to 224 x 224 by the package itself.
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
