"""Tables that say which PyTorch tensor becomes which parameter, and the one function that applies
them, in both directions. PyTorch names live in these tables only.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Transform:
    """How one source tensor becomes (its slice of) the parameter, and back, bit for bit."""

    name: str
    forward: Callable[[Array], Array]
    inverse: Callable[[Array], Array]


IDENTITY = Transform("identity", lambda x: x, lambda x: x)
TRANSPOSE = Transform("transpose", lambda x: x.T, lambda x: x.T)  # Linear [out, in] -> [in, out]
CONV2D = Transform(
    "conv2d", lambda x: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1)
)  # [out, in, h, w] -> [h, w, in, out]
CONV3D = Transform(
    "conv3d", lambda x: x.transpose(2, 3, 4, 1, 0), lambda x: x.transpose(4, 3, 0, 1, 2)
)  # [out, in, t, h, w] -> [t, h, w, in, out]
QKV = Transform(
    "qkv",
    lambda x: x.reshape(3, x.shape[0] // 3, x.shape[1]).transpose(0, 2, 1),
    lambda x: x.transpose(0, 2, 1).reshape(3 * x.shape[2], x.shape[1]),
)  # fused projection [3 out, in] -> [3, in, out]
QKV_BIAS = Transform(
    "qkv_bias", lambda x: x.reshape(3, x.shape[0] // 3), lambda x: x.reshape(-1)
)


@dataclasses.dataclass(frozen=True)
class Rule:
    """`source` in the PyTorch checkpoint becomes `target`, a dotted path of the module.

    Each `{...}` in `source` is expanded: `{layer}` over the parameter's leading axis and, after it,
    `{part}` over the next; the transformed tensors are stacked there. `target` None: the tensor is
    known and not used; `copy_of` then names the source whose value an export writes in its place.
    """

    source: str
    target: str | None
    transform: Transform = IDENTITY
    copy_of: str | None = None
