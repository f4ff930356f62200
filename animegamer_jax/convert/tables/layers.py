"""The rules of one PyTorch layer, which several tables share."""

from animegamer_jax.convert.rules import TRANSPOSE, Rule, Transform


def weight_and_bias(source: str, target: str, transform: Transform = TRANSPOSE) -> list[Rule]:
    """Returns the rules of a linear layer, or with another transform of a convolution."""
    kernel = Rule(f"{source}.weight", f"{target}.kernel", transform)
    return [kernel, Rule(f"{source}.bias", f"{target}.bias")]


def norm(source: str, target: str) -> list[Rule]:
    """Returns the rules of a normalization with scale and bias."""
    return [Rule(f"{source}.weight", f"{target}.scale"), Rule(f"{source}.bias", f"{target}.bias")]
