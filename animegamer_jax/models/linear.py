"""Linear maps with low-rank updates (LoRA, arXiv 2106.09685), in the layouts of attention.

Products are written so that XLA compiles them well: `docs/decisions/matmuls.md`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int8, Key, UInt32

from animegamer_jax.configs import LoRAConfig, NetworkConfig
from animegamer_jax.sharding import axes, platform, shares

Names = tuple[str | None, ...]

PRODUCT = "product"
"""Name of the results of linear maps in `jax.checkpoint` policies."""

_MANY_TOKENS = 4096

_kernel_init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-2, out_axis=-1)


def along_last_axis(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Reshapes a vector to as many dimensions as `x`, so that no rank is promoted silently."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


def fusion_barrier(arrays: Any) -> Any:
    """Keeps XLA from fusing what computes arrays (a pytree) with what reads them, on a TPU.

    All of them are computed first. Without it, XLA recomputes fused norms and activations for each
    tile of a product, or fuses two products: by the compiler's own estimate one and a half to six
    times as slow.
    """
    return jax.lax.optimization_barrier(arrays) if platform() == "tpu" else arrays


def has_many_tokens(batch: int, length: int, *, least: int = _MANY_TOKENS) -> bool:
    """Returns whether a device has `least` tokens or more.

    By default that is enough to cut weights from the stack of layers first. A product that cuts
    them out itself does so for every tile of its tokens; for few tokens that takes less time than
    writing them first.
    """
    return batch * length >= least * shares("act_batch", "act_length")


# The product of tokens and a matrix


def _matmul(a: Float[Array, "*b k"], b: Float[Array, "k n"]) -> Float[Array, "*b n"]:
    # With float32 sums, bfloat16 products on a CPU use its matrix unit if it has one (four times as
    # fast as float32 on a Xeon with AMX); with bfloat16 sums they do not.
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


@jax.custom_vjp
def affine(
    x: Float[Array, "*b i"], kernel: Float[Array, "i o"], bias: Float[Array, " o"] | None
) -> Float[Array, "*b o"]:
    """Returns `x @ kernel + bias`, summed in float32; each gradient is one product over all tokens.

    Left to autodiff, XLA's CPU compiler transposes the incoming gradient and recomputes what it
    depends on for each of its elements: a gated MLP of 11,808 tokens took 2.4 times as long.
    """
    return _add_bias(_matmul(x, kernel), bias).astype(x.dtype)


def _add_bias(y: Float[Array, "*b o"], bias: Float[Array, " o"] | None) -> Float[Array, "*b o"]:
    return y if bias is None else y + along_last_axis(bias.astype(jnp.float32), y)


def _affine_forward(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> Any:
    return affine(x, kernel, bias), (x, kernel, bias)


def _affine_backward(saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x, kernel, bias = saved
    dx = _matmul(dy, kernel.T).astype(x.dtype)
    if platform() == "cpu":
        x, dy = (y.reshape(-1, y.shape[-1]) for y in (x, dy))
        dkernel, dbias = _kernel_gradients_on_cpu(x, dy)
    else:
        tokens = tuple(range(x.ndim - 1))
        dkernel = jax.lax.dot_general(
            x, dy, ((tokens, tokens), ((), ())), preferred_element_type=jnp.float32
        )
        dbias = dy.sum(tokens, dtype=jnp.float32)
    return dx, dkernel.astype(kernel.dtype), None if bias is None else dbias.astype(bias.dtype)


def _kernel_gradients_on_cpu(
    x: Float[Array, "t i"], dy: Float[Array, "t o"]
) -> tuple[Float[Array, "i o"], Float[Array, " o"]]:
    # A product of two matrices, the narrower one actually transposed: a product over the first axis
    # of both, or over two axes of tokens, is two to five times slower. Without the row of ones the
    # compiler would recognize the transposition and undo it.
    ones = jnp.ones((1, x.shape[0]), x.dtype)
    if x.shape[1] <= dy.shape[1]:
        rows = jax.lax.optimization_barrier(jnp.concatenate([x.T, ones]))
        both = _matmul(rows, dy)
        return both[:-1], both[-1]
    rows = jax.lax.optimization_barrier(jnp.concatenate([dy.T, ones]))
    return _matmul(rows, x)[:-1].T, rows[:-1].astype(jnp.float32).sum(1)


affine.defvjp(_affine_forward, _affine_backward)


# The same product in the layouts of attention


def _to_tokens_last(
    x: Float[Array, "b t i"], kernel: Float[Array, "i o"], bias: Float[Array, " o"] | None
) -> Float[Array, "b o t"]:
    y = jnp.einsum("bti,io->bot", x, kernel, preferred_element_type=jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)[None, :, None]).astype(x.dtype)


def _from_heads(
    x: Float[Array, "b h t d"], kernel: Float[Array, "i o"], bias: Float[Array, " o"] | None
) -> Float[Array, "b t o"]:
    kernel = kernel.reshape(x.shape[1], x.shape[3], -1)
    y = jnp.einsum("bhtd,hdo->bto", x, kernel, preferred_element_type=jnp.float32)
    return _add_bias(y, bias).astype(x.dtype)


def _from_tokens_last(
    x: Float[Array, "b i t"], kernel: Float[Array, "i o"], bias: Float[Array, " o"] | None
) -> Float[Array, "b t o"]:
    many = has_many_tokens(x.shape[0], x.shape[2])
    kernel = fusion_barrier(_store_transposed(kernel.T, many=many))
    y = jnp.einsum("bit,oi->bto", x, kernel, preferred_element_type=jnp.float32)
    return _add_bias(y, bias).astype(x.dtype)


def _store_transposed(transposed: Float[Array, "o i"], *, many: bool) -> Float[Array, "o i"]:
    """Stores a transposed matrix row by row in memory, on a TPU.

    Left alone, the compiler transposes the whole stack of layers before the loop. That is fastest
    but takes a copy of the stack, for which there is no room next to many tokens.
    """
    if platform() != "tpu":
        return transposed
    rows = Layout(major_to_minor=(0, 1))
    if many:
        transposed = with_layout_constraint(with_layout_constraint(transposed.T, rows).T, rows)
    return with_layout_constraint(transposed, rows)


# Low-rank updates


class Dropout(NamedTuple):
    """Dropout on the input of a low-rank update: its key, and the share that is set to zero."""

    key: Key[Array, ""]
    rate: float

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b i"]:
        """Sets a share `rate` of the values to zero and scales up the others."""
        kept = hashed_bits(self.key, x.shape) >= jnp.uint32(round(self.rate * 2**32))
        return jnp.where(kept, x / (1 - self.rate), 0).astype(x.dtype)


def hashed_bits(key: Key[Array, ""], shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Returns 32 random bits for each element, a hash of the key and the element's index.

    Good enough for dropout, and far fewer operations than the rounds of JAX's own generator, which
    the TPU's compiler unrolls for every update of every layer. Each index is mixed as at the end of
    MurmurHash3 (A. Appleby, 2011), with one word of the key added before and one after.
    """
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * size + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)

    def mix(x: jax.Array) -> jax.Array:
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    return mix(mix(index ^ first) + second)


class LinearMap(NamedTuple):
    """The arrays of one linear map: `x W + b`, and `+ dropout(x) A B * scale` with an update.

    With `steps`, W holds whole numbers of these steps, one step an output (`quantize_weights`).
    """

    kernel: Float[Array, "i o"]
    bias: Float[Array, " o"] | None
    update: tuple[Float[Array, "i r"], Float[Array, "r o"]] | None
    scale: float
    dropout: Dropout | None
    steps: Float[Array, " o"] | None = None

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        return self._apply(x, affine, affine, affine)

    def tokens_last(self, x: Float[Array, "b t i"]) -> Float[Array, "b o t"]:
        """Returns the map's result with tokens last, as TPU attention kernels read it."""
        if self.steps is not None:
            return self._whole_numbers(x, _to_tokens_last, axis=1)
        return self._apply(x, _to_tokens_last, affine, _to_tokens_last)

    def from_heads(self, x: Float[Array, "b h t d"]) -> Float[Array, "b t o"]:
        """Maps the features of all heads without moving them next to each other first.

        Dropout depends on an element's index, so it drops others than after moving them.
        """
        return self._apply(x, _from_heads, _from_heads, affine)

    def from_tokens_last(self, x: Float[Array, "b i t"]) -> Float[Array, "b t o"]:
        """Maps features with tokens last."""
        return self._apply(x, _from_tokens_last, _from_tokens_last, affine)

    def _apply(self, x: jax.Array, whole: Any, down: Any, up: Any) -> jax.Array:
        """Computes W by `whole`, A by `down` and B by `up`, in the number format of W."""
        x = x.astype(self.kernel.dtype)
        if self.steps is not None:
            return self._whole_numbers(x, whole)
        if self.update is None:
            return checkpoint_name(whole(x, self.kernel, self.bias), PRODUCT)
        # The sum is fused into the update's narrow product: the large one would be slower with it.
        y = fusion_barrier(whole(fusion_barrier(x), self.kernel, self.bias))
        a, b = self.update
        x = down(x if self.dropout is None else self.dropout(x), a, None)
        return checkpoint_name(y + up(x, b, None) * self.scale, PRODUCT)

    def _whole_numbers(self, x: jax.Array, whole: Any, *, axis: int = -1) -> jax.Array:
        """Computes W by `whole` and multiplies the sums by the steps; `axis` has the outputs."""
        assert self.steps is not None
        y = whole(x.astype(self.kernel.dtype), self.kernel, None).astype(jnp.float32)
        shape = [1] * y.ndim
        shape[axis] = -1
        y = y * self.steps.reshape(shape)
        if self.bias is not None:
            y = y + self.bias.astype(jnp.float32).reshape(shape)
        return y.astype(self.kernel.dtype)


class _WithUpdate(nnx.Module):
    """Parameters of linear maps: kernels [*parts, in, out], and a LoRA pair for each if configured.

    B of a pair starts at zero, so that training starts from the frozen layer's function. New
    kernels keep the variance of their inputs, times the square of `gain`.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        names: Names,
        *,
        config: NetworkConfig,
        use_bias: bool,
        lora: LoRAConfig | None,
        rngs: nnx.Rngs,
        gain: float = 1.0,
    ):
        dtype = jnp.dtype(config.param_dtype)
        *parts, in_features, out_features = shape
        *part_names, in_name, out_name = names
        self.dtype = jnp.dtype(config.dtype)
        self.scale = lora.scale if lora else 0.0
        kernel = gain * _kernel_init(rngs.params(), shape, dtype)
        self.kernel = nnx.Param(kernel, **axes(*names))
        bias = jnp.zeros((*parts, out_features), dtype)
        self.bias = nnx.Param(bias, **axes(*part_names, out_name)) if use_bias else None
        self.steps: nnx.Param | None = None  # of a kernel of whole numbers
        if lora is None:
            self.lora_a = self.lora_b = None
        else:
            a = _kernel_init(rngs.params(), (*parts, in_features, lora.rank), dtype)
            b = jnp.zeros((*parts, lora.rank, out_features), dtype)
            self.lora_a = nnx.LoRAParam(a, **axes(*part_names, in_name, "lora_rank"))
            self.lora_b = nnx.LoRAParam(b, **axes(*part_names, "lora_rank", out_name))

    def _map(self, part: Any, dropout: Dropout | None = None) -> LinearMap:
        def read(parameter: nnx.Param | None) -> Any:
            return None if parameter is None else parameter[part].astype(self.dtype)

        a, b = read(self.lora_a), read(self.lora_b)
        update = None if a is None else (a, b)
        steps = None if self.steps is None else self.steps[part]
        return LinearMap(read(self.kernel), read(self.bias), update, self.scale, dropout, steps)


class Linear(_WithUpdate):
    """`y = x W + b`, and `+ x A B * scale` where a LoRA is configured.

    `names` are the logical axes of W.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        names: Names,
        config: NetworkConfig,
        use_bias: bool = True,
        lora: LoRAConfig | None = None,
        rngs: nnx.Rngs,
        gain: float = 1.0,
    ):
        shape = in_features, out_features
        super().__init__(
            shape, names, config=config, use_bias=use_bias, lora=lora, rngs=rngs, gain=gain
        )

    def map(self, dropout: Dropout | None = None) -> LinearMap:
        """Returns the map's arrays; `dropout` acts on the input of the low-rank update alone."""
        return self._map(..., dropout)

    def __call__(
        self, x: Float[Array, "*b i"], dropout: Dropout | None = None
    ) -> Float[Array, "*b o"]:
        return self.map(dropout)(x)


class QKVLinear(_WithUpdate):
    """Queries, keys and values of one input: kernel [3, in, out], a LoRA pair for each of three."""

    def __init__(
        self,
        features: int,
        *,
        config: NetworkConfig,
        lora: LoRAConfig | None = None,
        rngs: nnx.Rngs,
    ):
        shape, names = (3, features, features), ("parts", "embed", "heads")
        super().__init__(shape, names, config=config, use_bias=True, lora=lora, rngs=rngs)

    def maps(self) -> tuple[LinearMap, LinearMap, LinearMap]:
        """Returns the linear maps to queries, to keys and to values."""
        return self._map(0), self._map(1), self._map(2)


class Projection(nnx.Module):
    """Linear, exact GELU, square Linear: from one network's features to another's width."""

    def __init__(
        self, in_features: int, out_features: int, *, config: NetworkConfig, rngs: nnx.Rngs
    ):
        # The second kernel is square, and an array may use a mesh axis once: two names for a width.
        self.input = Linear(
            in_features, out_features, names=("features", "embed"), config=config, rngs=rngs
        )
        self.output = Linear(
            out_features, out_features, names=("embed", "features"), config=config, rngs=rngs
        )

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        return self.output(jax.nn.gelu(self.input(x), approximate=False))


def merge_low_rank(network: nnx.Module) -> None:
    """Adds each low-rank update of a network to its kernel and removes it, in place.

    For playing: the same function up to rounding, without the update's two products a layer.
    """
    for _, module in nnx.iter_graph(network):
        if not isinstance(module, Linear | QKVLinear):
            continue
        if module.lora_a is None or module.lora_b is None:
            continue
        a, b, kernel = module.lora_a[...], module.lora_b[...], module.kernel[...]
        merge = _merge_layers if a.ndim > 2 + isinstance(module, QKVLinear) else _merge
        module.kernel.set_value(merge(kernel, a, b, module.scale))
        module.lora_a = module.lora_b = None


@functools.partial(jax.jit, donate_argnums=0)
def _merge(
    kernel: Float[Array, "*b i o"], a: Float[Array, "*b i r"], b: Float[Array, "*b r o"], scale: Any
) -> Float[Array, "*b i o"]:
    update = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32)) * scale
    return (kernel.astype(jnp.float32) + update).astype(kernel.dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _merge_layers(
    kernel: Float[Array, "l *b i o"],
    a: Float[Array, "l *b i r"],
    b: Float[Array, "l *b r o"],
    scale: Any,
) -> Float[Array, "l *b i o"]:
    """Merges layer by layer in place, so that only one layer is float32 at a time."""

    def one(i: jax.Array, kernel: jax.Array) -> jax.Array:
        return kernel.at[i].set(_merge(kernel[i], a[i], b[i], scale))

    return jax.lax.fori_loop(0, kernel.shape[0], one, kernel)


# Eight bits a weight


def quantize_weights(network: nnx.Module) -> None:
    """Rounds the kernels of a network's linear maps to eight bits, in place; for playing.

    Each output of a map has a step of its own: its largest weight is 127 steps. Activations,
    embeddings and norms stay as they are. Works with shapes in place of arrays, too.

    Raises:
        ValueError: A map has a low-rank update (`merge_low_rank` first).
    """
    for _, module in nnx.iter_graph(network):
        if not isinstance(module, Linear | QKVLinear) or module.steps is not None:
            continue
        if module.lora_a is not None:
            raise ValueError("a low-rank update with whole numbers: merge it first")
        kernel = module.kernel
        names = tuple(kernel.get_metadata().get("out_sharding") or ())
        value = kernel.get_value()
        is_abstract = isinstance(value, jax.ShapeDtypeStruct)
        numbers, steps = jax.eval_shape(_round, value) if is_abstract else _round(value)
        whole: Any = module
        whole.kernel = kernel.replace(numbers)
        whole.steps = nnx.data(nnx.Param(steps, **axes(*names[:-2], *names[-1:])))


@jax.jit
def _round(kernel: Float[Array, "*b i o"]) -> tuple[Int8[Array, "*b i o"], Float[Array, "*b o"]]:
    weights = kernel.astype(jnp.float32)
    steps = jnp.maximum(jnp.abs(weights).max(-2), 1e-30) / 127
    return jnp.round(weights / steps[..., None, :]).astype(jnp.int8), steps
