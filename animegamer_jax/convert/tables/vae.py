"""The 3D VAE's tensor names in the released file (`state_dict` of `3d-vae.pt`)."""

from collections.abc import Iterator, Mapping

from animegamer_jax.configs import VAEConfig
from animegamer_jax.convert.rules import CONV2D, CONV3D, Rule
from animegamer_jax.convert.tables.layers import norm, shape_of, weight_and_bias
from animegamer_jax.errors import UserError


def _conv(source: str, target: str) -> list[Rule]:
    return weight_and_bias(source, target, CONV3D)


def _spatial_norm(source: str, target: str) -> list[Rule]:
    return [
        *norm(f"{source}.norm_layer", f"{target}.norm"),
        *_conv(f"{source}.conv_y.conv", f"{target}.conv_y"),
        *_conv(f"{source}.conv_b.conv", f"{target}.conv_b"),
    ]


_NORMS = {"encoder": norm, "decoder": _spatial_norm}


def _block(source: str, target: str, *, has_shortcut: bool = False) -> Iterator[Rule]:
    norm_of_half = _NORMS[target.split(".")[0]]
    for i in (1, 2):
        yield from norm_of_half(f"{source}.norm{i}", f"{target}.norm{i}")
        yield from _conv(f"{source}.conv{i}.conv", f"{target}.conv{i}")
    if has_shortcut:
        yield from _conv(f"{source}.nin_shortcut", f"{target}.shortcut")


def _half(name: str) -> Iterator[Rule]:
    """Yields the rules that the encoder and the decoder share."""
    yield from _conv(f"{name}.conv_in.conv", f"{name}.conv_in")
    for i in (0, 1):
        yield from _block(f"{name}.mid.block_{i + 1}", f"{name}.mid.{i}")
    yield from _NORMS[name](f"{name}.norm_out", f"{name}.norm_out")
    yield from _conv(f"{name}.conv_out.conv", f"{name}.conv_out")


def rules(config: VAEConfig) -> tuple[Rule, ...]:
    """Returns the table of the released file; the training loss's tensors are allowed, not used."""
    multipliers, last = config.multipliers, len(config.multipliers) - 1
    table = [*_half("encoder"), *_half("decoder")]
    for level, width in enumerate(multipliers):
        down, up = f"encoder.down.{level}", f"decoder.up.{level}"
        finer = multipliers[level - 1] if level else 1
        coarser = multipliers[min(level + 1, last)]
        for i in range(config.num_res_blocks):
            changes = i == 0 and width != finer
            table += _block(f"{down}.block.{i}", f"{down}.blocks.{i}", has_shortcut=changes)
        for i in range(config.num_res_blocks + 1):
            changes = i == 0 and width != coarser
            table += _block(f"{up}.block.{i}", f"{up}.blocks.{i}", has_shortcut=changes)
        if level != last:
            table += weight_and_bias(f"{down}.downsample.conv", f"{down}.downsample", CONV2D)
        if level != 0:
            table += weight_and_bias(f"{up}.upsample.conv", f"{up}.upsample", CONV2D)
    return (*table, Rule("loss.*", None))


def infer_config(shapes: Mapping[str, tuple[int, ...]]) -> VAEConfig:
    """Returns the sizes that a released file's names and PyTorch shapes imply.

    Shapes do not give the number of norm groups, the temporal compression and the scaling factor:
    these are the released model's (with fewer levels, time is compressed in all of them).

    Raises:
        UserError: A tensor that gives a size is missing, or a width is not a multiple of the first.
    """

    def out_channels(name: str) -> int:
        return shape_of(shapes, name, rank=5, model="a CogVideoX 3D VAE (`3d-vae.pt`)")[0]

    def count(pattern: str) -> int:
        number = 0
        while pattern.format(number) in shapes:
            number += 1
        return number

    channels = out_channels("encoder.conv_in.conv.weight")
    first_of_level = "encoder.down.{}.block.0.conv1.conv.weight"
    out_channels(first_of_level.format(0))
    widths = [out_channels(first_of_level.format(i)) for i in range(count(first_of_level))]
    if uneven := [width for width in widths if width % channels]:
        raise UserError(
            f"VAE checkpoint: a level of {uneven[0]} channels: expected a multiple of the "
            f"{channels} channels of encoder.conv_in: check that the file is a CogVideoX 3D VAE"
        )
    return VAEConfig(
        channels=channels,
        multipliers=tuple(width // channels for width in widths),
        num_res_blocks=count("encoder.down.0.block.{}.conv1.conv.weight"),
        latent_channels=out_channels("encoder.conv_out.conv.weight") // 2,
        image_channels=out_channels("decoder.conv_out.conv.weight"),
        temporal_compression=min(4, 2 ** (len(widths) - 1)),
    )
