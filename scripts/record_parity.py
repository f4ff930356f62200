"""Records numbers of the PyTorch release's VAE, from a checkout of it, for `animegamer parity`.

    python scripts/record_parity.py CHECKOUT 3d-vae.pt DIR
    animegamer parity DIR

CHECKOUT is a clone of https://github.com/TencentARC/AnimeGamer. Its own modules compute everything,
on the CPU in float32, from random inputs of a small size; the sizes of the network follow from the
checkpoint. It needs PyTorch, einops, beartype, fsspec, safetensors and Pillow, which the release's
environment has, and nothing of animegamer_jax. The other networks: docs/compare-with-pytorch.md.
"""

import argparse
import importlib
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

_CHUNKS = ((0, 3), (3, 5))  # latent frames, as inference_Decoder.py decodes five


def import_vae(checkout: Path) -> Any:
    """Imports the module with the release's encoder and decoder.

    Its packages import all of the release when they are imported, which these two do not need; so
    they stand in as empty packages.
    """
    root = checkout / "VDM_Decoder"
    if not (root / "vae_modules" / "cp_enc_dec.py").is_file():
        raise SystemExit(f"{checkout}: expected a clone of AnimeGamer with VDM_Decoder/vae_modules")
    for name in ("VDM_Decoder", "VDM_Decoder.sgm", "VDM_Decoder.vae_modules"):
        package = types.ModuleType(name)
        package.__path__ = [str(checkout / name.replace(".", "/"))]
        sys.modules[name] = package
    util = importlib.import_module("VDM_Decoder.sgm.util")
    store = torch.distributed.HashStore()  # a group of this process alone; no port is opened
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    util.initialize_context_parallel(1)
    return importlib.import_module("VDM_Decoder.vae_modules.cp_enc_dec")


def sizes_of(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns the constructor's arguments of encoder and decoder, from shapes in the checkpoint."""
    first = state["encoder.conv_in.conv.weight"]
    found: dict[int, tuple[int, int]] = {}
    for name, tensor in state.items():
        match = re.fullmatch(r"encoder\.down\.(\d+)\.block\.(\d+)\.conv1\.conv\.weight", name)
        if match:
            level, block = int(match[1]), int(match[2])
            most = found.get(level, (0, 0))[1]
            found[level] = len(tensor), max(most, block + 1)
    widths = [found[level][0] for level in sorted(found)]
    return {
        "ch": len(first),
        "ch_mult": [width // len(first) for width in widths],
        "num_res_blocks": found[0][1],
        "z_channels": state["decoder.conv_in.conv.weight"].shape[1],
        "in_channels": first.shape[1],
        "out_ch": first.shape[1],
        "attn_resolutions": [],
        "resolution": 256,
        "double_z": True,
        "dropout": 0.0,
    }


def record(checkout: Path, checkpoint: Path, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns inputs and results of the release's VAE."""
    module = import_vae(checkout)
    stored = torch.load(checkpoint, map_location="cpu", weights_only=True)
    state = {
        name: tensor.float()
        for name, tensor in stored.get("state_dict", stored).items()
        if name.startswith(("encoder.", "decoder."))
    }
    sizes = sizes_of(state)
    encoder = module.ContextParallelEncoder3D(**sizes, gather_norm=True)
    decoder = module.ContextParallelDecoder3D(**sizes, gather_norm=False)
    for part, network in (("encoder", encoder), ("decoder", decoder)):
        own = {n.removeprefix(f"{part}."): x for n, x in state.items() if n.startswith(part)}
        network.load_state_dict(own, strict=True)
        network.eval()
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.normal(size=shape).astype(np.float32))

    space = 2 ** (len(sizes["ch_mult"]) - 1)
    video = torch.tanh(normal(1, sizes["in_channels"], 17, 4 * space, 6 * space))
    latents = normal(1, sizes["z_channels"], 5, 4, 6)
    with torch.no_grad():
        chunks = [
            decoder(latents[:, :, start:stop].contiguous(), clear_fake_cp_cache=stop == 5)
            for start, stop in _CHUNKS
        ]
        arrays = {
            "video": video,
            "moments": encoder(video),
            "image_moments": encoder(video[:, :, :1].contiguous()),
            "latents": latents,
            "decoded_in_chunks": torch.cat(chunks, dim=2),
        }
    found = {name: tensor.numpy() for name, tensor in arrays.items()}
    return found | {"chunk_bounds": np.array(_CHUNKS)}


def main() -> None:
    """Parses the command line and writes the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="clone of the PyTorch release")
    parser.add_argument("vae", type=Path, help="3d-vae.pt")
    parser.add_argument("out", type=Path, help="folder for `animegamer parity`")
    options = parser.parse_args()
    arrays = record(options.checkout, options.vae)
    folder = options.out / "vae"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "3d-vae.pt").exists():
        shutil.copyfile(options.vae, folder / "3d-vae.pt")
    np.savez_compressed(folder / "vae.npz", **arrays)
    print(f"{folder}: {', '.join(arrays)}")


if __name__ == "__main__":
    main()
