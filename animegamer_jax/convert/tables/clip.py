"""OpenCLIP's tensor names. The caller strips any prefix of the file."""

import math
import re
from collections.abc import Mapping

from animegamer_jax.configs import CLIPConfig
from animegamer_jax.convert.rules import CONV2D, QKV, QKV_BIAS, Rule
from animegamer_jax.convert.tables.layers import norm, shape_of, weight_and_bias
from animegamer_jax.errors import UserError


def _tower(source: str, target: str) -> tuple[Rule, ...]:
    """Returns the rules of one tower's layers; `source` is the prefix of its transformer."""
    source, target = f"{source}.resblocks.{{layer}}", f"{target}.layers.blocks"
    return (
        *norm(f"{source}.ln_1", f"{target}.attention_norm"),
        Rule(f"{source}.attn.in_proj_weight", f"{target}.qkv.kernel", QKV),
        Rule(f"{source}.attn.in_proj_bias", f"{target}.qkv.bias", QKV_BIAS),
        *weight_and_bias(f"{source}.attn.out_proj", f"{target}.out"),
        *norm(f"{source}.ln_2", f"{target}.mlp_norm"),
        *weight_and_bias(f"{source}.mlp.c_fc", f"{target}.up"),
        *weight_and_bias(f"{source}.mlp.c_proj", f"{target}.down"),
    )


def rules(config: CLIPConfig) -> tuple[Rule, ...]:
    """Returns the table of OpenCLIP's state dict; a tower without layers has no layer rules."""
    image = (
        Rule("visual.conv1.weight", "image.patch_kernel", CONV2D),
        Rule("visual.class_embedding", "image.class_embedding"),
        Rule("visual.positional_embedding", "image.position_embedding"),
        *norm("visual.ln_pre", "image.pre_norm"),
        *(_tower("visual.transformer", "image") if config.vision_layers else ()),
        *norm("visual.ln_post", "image.post_norm"),
        Rule("visual.proj", "image.projection"),
    )
    text = (
        Rule("token_embedding.weight", "text.embedding"),
        Rule("positional_embedding", "text.position_embedding"),
        *(_tower("transformer", "text") if config.text_layers else ()),
        *norm("ln_final", "text.final_norm"),
        Rule("text_projection", "text.projection"),
    )
    return (*image, *text, Rule("logit_scale", "logit_scale"))


def infer_config(shapes: Mapping[str, tuple[int, ...]], *, head_width: int = 64) -> CLIPConfig:
    """Returns the sizes that a state dict's shapes imply, at `head_width` features a head.

    The released decoder file has no layers of the text tower; neither has its configuration.

    Raises:
        UserError: A tensor that gives a size is missing or of another rank, or the towers do not
            divide into heads of `head_width`.
    """

    def shape(name: str, rank: int) -> tuple[int, ...]:
        return shape_of(shapes, name, rank=rank, model="an OpenCLIP vision transformer")

    def num_layers(transformer: str) -> int:
        pattern = re.compile(rf"{re.escape(transformer)}\.resblocks\.(\d+)\.")
        return max((int(m[1]) + 1 for m in map(pattern.match, shapes) if m), default=0)

    def num_heads(width: int, tower: str) -> int:
        if width % head_width:
            raise UserError(
                f"CLIP weights: the {tower} tower's width {width} is not a multiple of the head "
                f"width {head_width}: pass the head width of this model"
            )
        return width // head_width

    vision_width, _, patch_size, _ = shape("visual.conv1.weight", 4)
    side = math.isqrt(shape("visual.positional_embedding", 2)[0] - 1)
    vocab_size, text_width = shape("token_embedding.weight", 2)
    vision_layers, text_layers = num_layers("visual.transformer"), num_layers("transformer")
    ratios = [
        shape(f"{name}.resblocks.0.mlp.c_fc.weight", 2)[0] / width
        for name, width, layers in (
            ("visual.transformer", vision_width, vision_layers),
            ("transformer", text_width, text_layers),
        )
        if layers
    ]
    if len(set(ratios)) > 1:
        raise UserError(
            f"CLIP weights: feed-forward layers are {ratios[0]:g} times the width in the image "
            f"tower and {ratios[1]:g} times in the text tower: expected one ratio"
        )
    return CLIPConfig(
        image_size=side * patch_size,
        patch_size=patch_size,
        vision_width=vision_width,
        vision_layers=vision_layers,
        vision_heads=num_heads(vision_width, "image"),
        text_width=text_width,
        text_layers=text_layers,
        text_heads=num_heads(text_width, "text") if text_layers else text_width // head_width or 1,
        vocab_size=vocab_size,
        context_length=shape("positional_embedding", 2)[0],
        embed_size=shape("visual.proj", 2)[1],
        mlp_ratio=ratios[0] if ratios else 4.0,
    )
