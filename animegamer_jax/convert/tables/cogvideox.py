"""CogVideoX-2B's transformer in its SwissArmyTransformer release, as a start for the decoder.

Its file is laid out as the released decoder's (`convert/tables/dit.py`), without low-rank updates, motion
input and image projection, and with positions for more frames. Its text projection has no place
here: E_a stands there.
"""

import dataclasses
from collections.abc import Mapping

from animegamer_jax.configs import DiTConfig
from animegamer_jax.convert.rules import Rule
from animegamer_jax.convert.tables import dit

PREFIX = "model.diffusion_model."
_NEW = ("motion_embed.", "positions")  # what starts anew: `convert/initialise.py`


def rules(config: DiTConfig) -> tuple[Rule, ...]:
    """The table of what is taken over."""
    kept = [
        rule
        for rule in dit.rules(dataclasses.replace(config, lora=None))
        if rule.target is not None and not rule.target.startswith(_NEW)
    ]
    return (
        *kept,
        Rule("mixins.pos_embed.*", None),
        Rule("mixins.patch_embed.text_proj.*", None),
    )


def infer_config(shapes: Mapping[str, tuple[int, ...]], *, like: DiTConfig) -> DiTConfig:
    """The transformer's sizes from its file; clip, context and low-rank updates as in `like`.

    Raises:
        ValueError: the position table is not one of frames of this height and width.
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
