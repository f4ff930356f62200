"""The shot encoder inside the released decoder file (names after `model.diffusion_model.`)."""

from collections.abc import Mapping

from animegamer_jax.configs import ShotEncoderConfig
from animegamer_jax.convert.rules import Rule
from animegamer_jax.convert.tables.layers import norm, weight_and_bias

_PREFIX = "mixins.patch_embed."


def rules(config: ShotEncoderConfig) -> tuple[Rule, ...]:
    """Returns the table: E_a's four linear maps and three norms."""
    del config
    table: list[Rule] = []
    for source, target in (("text_proj", "text"), ("ip_proj", "image")):
        for index, layer in ((0, "input"), (2, "output")):
            table += weight_and_bias(f"{_PREFIX}{source}.{index}", f"{target}.{layer}")
    for source, target in (("txt", "text"), ("ip", "image"), ("output", "output")):
        table += norm(f"{_PREFIX}{source}_mix_layer_norm", f"{target}_norm")
    return tuple(table)


def infer_config(
    shapes: Mapping[str, tuple[int, ...]], *, num_text_tokens: int = 30, num_image_tokens: int = 196
) -> ShotEncoderConfig:
    """Returns the widths that the shapes imply; they do not give the numbers of tokens."""
    width, text_size = shapes[f"{_PREFIX}text_proj.0.weight"]
    return ShotEncoderConfig(
        num_text_tokens=num_text_tokens,
        num_image_tokens=num_image_tokens,
        text_size=text_size,
        image_size=shapes[f"{_PREFIX}ip_proj.0.weight"][1],
        representation_size=width,
    )
