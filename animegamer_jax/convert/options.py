"""Options of `animegamer convert` and `animegamer initialise`."""

import dataclasses
from pathlib import Path
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleOptions:
    """The bundle to write, and the files that both commands read.

    Attributes:
        out: Bundle to write: a folder, or a gs:// address.
        mistral: Folder of the base language model, Mistral-7B-Instruct-v0.1.
        vae: File of CogVideoX's 3D VAE (3d-vae.pt).
        clip: File of OpenCLIP ViT-B/16; its image tower is enough.
        t5: Folder or file of T5 v1.1 XXL; its encoder is enough.
        tokenizer: Folder of the tokenizer, with the game's special tokens.
        t5_tokenizer: Folder of T5's own tokenizer (tokenizer.json or spiece.model). Without it the
            bundle cannot read texts by T5, for features and for players' pictures, unless T5 shares
            the vocabulary of the tokenizer.
        overwrite: Replace a bundle that already exists.
    """

    out: str
    mistral: Path | None = None
    vae: Path | None = None
    clip: Path | None = None
    t5: Path | None = None
    tokenizer: Path | None = None
    t5_tokenizer: Path | None = None
    overwrite: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions(BundleOptions):
    """The released files, and how to read them.

    Attributes:
        mistral: Folder of the base language model. Its config.json gives sizes; its weights are
            read only if the file of --agent lacks them.
        agent: File of the language model (pytorch_model.bin).
        decoder: Folder of the decoder (with a file `latest`), or its mp_rank_00_model_states.pt.
            Pass --vae, --clip and --t5 only for networks that this file does not hold.
        reference: Folder with mllm/, vdm/, vae/, clip/, t5/, tokenizer/ and t5_tokenizer/, as
            `animegamer export` writes it. Replaces the options for single files; an option given
            as well takes precedence.
        protocol: Rules by which the model plays: those that an export recorded, unless given, or
            else `released`.
        merge: Fold the low-rank updates into the weights.
        latent_height: Rows of the decoder's latents; 60 if --reference does not give them.
        latent_width: Columns of the decoder's latents; 90 if --reference does not give them.
        clip_head_width: Features of one attention head of OpenCLIP; 64 if --reference does not give
            them.
    """

    agent: Path | None = None
    decoder: Path | None = None
    reference: Path | None = None
    protocol: Literal["released", "paper"] | None = None
    merge: bool = False
    latent_height: int | None = None
    latent_width: int | None = None
    clip_head_width: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitialiseOptions(BundleOptions):
    """The pre-trained files, and what they do not determine.

    Attributes:
        cogvideox: Transformer of CogVideoX-2B in its SAT release: a folder (with a file `latest`),
            or its mp_rank_00_model_states.pt.
        size: Model size that determines what the files do not: clip size, token counts, low-rank
            updates.
        seed: Seed of the new parameters.
    """

    cogvideox: Path | None = None
    size: Literal["toy", "full"] = "full"
    seed: int = 0
