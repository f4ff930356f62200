"""CogVideoX-2B's transformer in its SwissArmyTransformer release, as a start for the decoder.

Its file is laid out like the released decoder's (`convert/tables/dit.py`), without low-rank
updates, motion input and image projection, and with positions for more frames. Its text projection
is not used: E_a takes its place.
"""

import dataclasses
from collections.abc import Mapping

from animegamer_jax.configs import DiTConfig
from animegamer_jax.convert.rules import Rule
from animegamer_jax.convert.tables import dit

PREFIX = "model.diffusion_model."
_NEW = ("motion_embed.", "positions")  # made by `convert/initialise.py`


def rules(config: DiTConfig) -> tuple[Rule, ...]:
    """Returns the table of the parameters that are taken from the file."""
    kept = [
        rule
        for rule in dit.rules(dataclasses.replace(config, lora=None))
        if rule.target is not None and not rule.target.startswith(_NEW)
    ]
    return (*kept, Rule("mixins.pos_embed.*", None), Rule("mixins.patch_embed.text_proj.*", None))


def infer_config(shapes: Mapping[str, tuple[int, ...]], *, like: DiTConfig) -> DiTConfig:
    """Returns the file's sizes, with the clip, context and low-rank updates of `like`.

    Raises:
        ValueError: The position table does not hold frames of this height and width.
    """
    found = dit.infer_config(
        shapes,
        latent_height=like.latent_height,
        latent_width=like.latent_width,
        num_context_tokens=like.num_context_tokens,
    )
    return dataclasses.replace(
        found,
        latent_frames=like.latent_frames,
        spatial_interpolation=like.spatial_interpolation,
        lora=like.lora,
    )
