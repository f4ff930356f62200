"""LPIPS with AlexNet: the names in its two published PyTorch files.

The backbone is torchvision's `alexnet` state dict, of which the classifier is not used; the linear
weights are the `lpips` package's `alex.pth` (version 0.1).
"""

from animegamer_jax.convert.rules import CONV2D, Rule, Transform

_LAYERS = (0, 3, 6, 8, 10)  # places of the convolutions in torchvision's `features`

_CHANNELS = Transform(
    "channels", lambda x: x.reshape(-1), lambda x: x.reshape(1, -1, 1, 1)
)  # [1, c, 1, 1] -> [c]


def backbone_rules() -> tuple[Rule, ...]:
    """The table of torchvision's `alexnet`."""
    rules = [Rule("classifier.*", None)]
    for i, layer in enumerate(_LAYERS):
        rules.append(Rule(f"features.{layer}.weight", f"convolutions.{i}.kernel", CONV2D))
        rules.append(Rule(f"features.{layer}.bias", f"convolutions.{i}.bias"))
    return tuple(rules)


def linear_rules() -> tuple[Rule, ...]:
    """The table of `alex.pth`: one weight a channel of each layer."""
    return tuple(
        Rule(f"lin{i}.model.1.weight", f"weights.{i}", _CHANNELS) for i in range(len(_LAYERS))
    )
