"""The rules of one PyTorch layer, and how sizes are read, which several tables share."""

from collections.abc import Mapping

from animegamer_jax.convert.rules import TRANSPOSE, Rule, Transform
from animegamer_jax.errors import UserError


def weight_and_bias(source: str, target: str, transform: Transform = TRANSPOSE) -> list[Rule]:
    """Returns the rules of a linear layer, or with another transform of a convolution."""
    kernel = Rule(f"{source}.weight", f"{target}.kernel", transform)
    return [kernel, Rule(f"{source}.bias", f"{target}.bias")]


def norm(source: str, target: str) -> list[Rule]:
    """Returns the rules of a normalization with scale and bias."""
    return [Rule(f"{source}.weight", f"{target}.scale"), Rule(f"{source}.bias", f"{target}.bias")]


def shape_of(
    shapes: Mapping[str, tuple[int, ...]], name: str, *, rank: int, model: str
) -> tuple[int, ...]:
    """Returns the shape of a tensor that gives a size; `model` is what the file should hold.

    Raises:
        UserError: The tensor is missing or of another rank.
    """
    found = shapes.get(name, "no such tensor")
    if isinstance(found, str) or len(found) != rank:
        raise UserError(
            f"expected {name!r} with {rank} dimensions, found {found} among {len(shapes)} tensors: "
            f"pass {model}, its names without prefix"
        )
    return tuple(found)
