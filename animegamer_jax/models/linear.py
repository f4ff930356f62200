"""Layers that several networks share: linear maps with a low-rank update, norms, layer stacks."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Key, UInt32

from animegamer_jax.configs import LoRAConfig, NetworkConfig, Remat
from animegamer_jax.models.kernels.splash import SAVED
from animegamer_jax.sharding import axes, platform, shares

Names = tuple[str | None, ...]

_PRODUCT = "product"
"""The name of linear maps' results for `jax.checkpoint` policies."""

_MANY_TOKENS = 4096
"""From so many on a device a layer's weights are taken out of the stack before products use them.

A product that takes them out itself does so for every tile of its tokens; for few tokens that is
less than to write them first.
"""

_kernel_init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-2, out_axis=-1)
_zeros = nnx.initializers.zeros_init()


def _last_axis(vector: jax.Array, x: jax.Array) -> jax.Array:
    """A parameter of the last axis with as many dimensions as `x`: ranks never grow silently."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


def _matmul(a: Float[Array, "*b k"], b: Float[Array, "k n"]) -> Float[Array, "*b n"]:
    # Sums in float32 and said so: bfloat16 products on a CPU then use its matrix unit where it has
    # one (four times as fast as float32 on a Xeon with AMX; sums in bfloat16 do not).
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


@jax.custom_vjp
def affine(
    x: Float[Array, "*b i"], kernel: Float[Array, "i o"], bias: Float[Array, " o"] | None
) -> Float[Array, "*b o"]:
    """`x @ kernel + bias` with sums in float32, and both gradients as one product over all tokens.

    Left to autodiff, XLA's CPU compiler transposes the gradient that comes in and makes again
    what led to it for each of its elements: a gated MLP of 11,808 tokens took 2.4 times as long.
    """
    y = _matmul(x, kernel)
    if bias is not None:
        y = y + _last_axis(bias.astype(jnp.float32), y)
    return y.astype(x.dtype)


def apart(x: jax.Array) -> jax.Array:
    """On a TPU: what makes `x` and what takes it are compiled apart.

    Norms and activations that XLA draws into a product are computed again for each of its tiles,
    or two products become one: by the compiler's own estimate one and a half to six times as slow.
    """
    return jax.lax.optimization_barrier(x) if platform() == "tpu" else x


def _affine_forward(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> Any:
    return affine(x, kernel, bias), (x, kernel, bias)


def _affine_backward(saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x, kernel, bias = saved
    dx = _matmul(dy, kernel.T).astype(x.dtype)
    if platform() != "cpu":
        tokens = tuple(range(x.ndim - 1))
        dkernel = jax.lax.dot_general(
            x, dy, ((tokens, tokens), ((), ())), preferred_element_type=jnp.float32
        )
        dbias = None if bias is None else dy.sum(tokens, dtype=jnp.float32).astype(bias.dtype)
        return dx, dkernel.astype(kernel.dtype), dbias
    return dx, *_gradients_on_cpu(x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]), *saved)


def _gradients_on_cpu(
    x: Float[Array, "t i"], dy: Float[Array, "t o"], _: Any, kernel: jax.Array, bias: Any
) -> tuple[jax.Array, jax.Array | None]:
    # Two matrices, the narrower one really transposed: a product over two axes of tokens, or over
    # the first axis of both, is two to five times slower. Without a row of ones beneath it, the
    # compiler would see that a matrix was transposed, and would undo it.
    ones = jnp.ones((1, x.shape[0]), x.dtype)
    if x.shape[1] <= dy.shape[1]:
        rows = jax.lax.optimization_barrier(jnp.concatenate([x.T, ones]))
        both = _matmul(rows, dy)
        dkernel, dbias = both[:-1], both[-1]
    else:
        rows = jax.lax.optimization_barrier(jnp.concatenate([dy.T, ones]))
        dkernel = _matmul(rows, x)[:-1].T
        dbias = rows[:-1].astype(jnp.float32).sum(1)
    return dkernel.astype(kernel.dtype), None if bias is None else dbias.astype(bias.dtype)


affine.defvjp(_affine_forward, _affine_backward)


class Dropout(NamedTuple):
    """How much of its input a low-rank update loses in a training pass, and by which key."""

    key: Key[Array, ""]
    rate: float

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b i"]:
        """`x` with a share `rate` of its values zero and the rest as much larger."""
        kept = hashed_bits(self.key, x.shape) >= jnp.uint32(round(self.rate * 2**32))
        return jnp.where(kept, x / (1 - self.rate), 0).astype(x.dtype)


def hashed_bits(key: Key[Array, ""], shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """32 bits for each place of an array, from the key and the place alone.

    Good enough for dropout, and far fewer operations than the rounds of JAX's own generator, which
    the TPU's compiler unrolls for every update of every layer. Each place is mixed as the end of
    MurmurHash3 does (A. Appleby, 2011), with a word of the key before and one after.
    """
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    place = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        place = place * size + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)

    def mix(x: jax.Array) -> jax.Array:
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    return mix(mix(place ^ first) + second)


def _columns(
    x: Float[Array, "b t i"], kernel: Float[Array, "i o"], bias: Float[Array, " o"] | None
) -> Float[Array, "b o t"]:
    """`affine` that leaves tokens last."""
    y = jnp.einsum("bti,io->bot", x, kernel, preferred_element_type=jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)[None, :, None]).astype(x.dtype)


def _of_heads(
    x: Float[Array, "b h t d"], kernel: Float[Array, "i o"], bias: Float[Array, " o"] | None
) -> Float[Array, "b t o"]:
    """`affine` of features that lie head by head."""
    kernel = kernel.reshape(x.shape[1], x.shape[3], -1)
    y = jnp.einsum("bhtd,hdo->bto", x, kernel, preferred_element_type=jnp.float32)
    return (y if bias is None else y + _last_axis(bias.astype(jnp.float32), y)).astype(x.dtype)


def _are_many(batch: int, length: int) -> bool:
    """Whether each device has so many tokens that a layer's weights are cut from the stack."""
    return batch * length >= _MANY_TOKENS * shares("act_batch", "act_length")


def _as_it_lies(turned: Float[Array, "o i"], *, many: bool) -> Float[Array, "o i"]:
    """A matrix that was turned around, row by row in memory.

    Left alone, the compiler turns the whole stack of layers around before the loop. That is the
    least time, and a copy: among many tokens there is no room for it.
    """
    if platform() != "tpu":
        return turned
    rows = Layout(major_to_minor=(0, 1))
    if many:
        turned = with_layout_constraint(with_layout_constraint(turned.T, rows).T, rows)
    return with_layout_constraint(turned, rows)


def _of_columns(
    x: Float[Array, "b i t"], kernel: Float[Array, "i o"], bias: Float[Array, " o"] | None
) -> Float[Array, "b t o"]:
    """`affine` of features with tokens last; on a TPU the matrix is turned around first."""
    kernel = apart(_as_it_lies(kernel.T, many=_are_many(x.shape[0], x.shape[2])))
    y = jnp.einsum("bit,oi->bto", x, kernel, preferred_element_type=jnp.float32)
    return (y if bias is None else y + _last_axis(bias.astype(jnp.float32), y)).astype(x.dtype)


class _Form(NamedTuple):
    """How a linear map's three products lie: of the matrix, and of its update's two."""

    whole: Callable[..., jax.Array]
    down: Callable[..., jax.Array]
    up: Callable[..., jax.Array]


_ROWS = _Form(affine, affine, affine)
_COLUMNS = _Form(_columns, affine, _columns)
_HEADS = _Form(_of_heads, _of_heads, affine)
_FROM_COLUMNS = _Form(_of_columns, _of_columns, affine)


class _Map(NamedTuple):
    """One linear map's parameters: `x W + b`, and `+ x A B * scale` where there is an update."""

    kernel: Float[Array, "i o"]
    bias: Float[Array, " o"] | None
    update: tuple[Float[Array, "i r"], Float[Array, "r o"]] | None
    scale: float

    def __call__(self, x: jax.Array, form: _Form, dropout: Dropout | None = None) -> jax.Array:
        """In the format of `x`; a dropout acts on the update's input alone."""
        kernel = self.kernel.astype(x.dtype)
        bias = None if self.bias is None else self.bias.astype(x.dtype)
        if self.update is None:
            return checkpoint_name(form.whole(x, kernel, bias), _PRODUCT)
        # The sum goes to the update's narrow product: the large one is slower with it.
        y = apart(form.whole(apart(x), kernel, bias))
        a, b = (matrix.astype(x.dtype) for matrix in self.update)
        down = form.down(x if dropout is None else dropout(x), a, None)
        return checkpoint_name(y + form.up(down, b, None) * self.scale, _PRODUCT)


class Linear(nnx.Module):
    """`y = x W + b`, and `+ x A B * scale` where a LoRA is configured.

    `names` are the logical axes of W. With LoRA, B starts at zero, so that training starts from
    the frozen layer's function. A `dropout` acts on the update's input alone (arXiv 2106.09685).
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
    ):
        dtype = jnp.dtype(config.param_dtype)
        self.dtype = jnp.dtype(config.dtype)
        self.scale = lora.scale if lora else 0.0
        self.kernel = nnx.Param(
            _kernel_init(rngs.params(), (in_features, out_features), dtype), **axes(*names)
        )
        self.bias = (
            nnx.Param(jnp.zeros((out_features,), dtype), **axes(names[1])) if use_bias else None
        )
        if lora is None:
            self.lora_a = self.lora_b = None
        else:
            a = _kernel_init(rngs.params(), (in_features, lora.rank), dtype)
            b = jnp.zeros((lora.rank, out_features), dtype)
            self.lora_a = nnx.LoRAParam(a, **axes(names[0], "lora_rank"))
            self.lora_b = nnx.LoRAParam(b, **axes("lora_rank", names[1]))

    def __call__(
        self, x: Float[Array, "*b i"], dropout: Dropout | None = None
    ) -> Float[Array, "*b o"]:
        return self._map(x.astype(self.dtype), _ROWS, dropout)

    def columns(
        self, x: Float[Array, "b t i"], dropout: Dropout | None = None
    ) -> Float[Array, "b o t"]:
        """The same with tokens last, as a TPU's attention kernel reads them."""
        return self._map(x.astype(self.dtype), _COLUMNS, dropout)

    def of_heads(
        self, x: Float[Array, "b h t d"], dropout: Dropout | None = None
    ) -> Float[Array, "b t o"]:
        """The same of inputs that lie head by head, without moving them first.

        Dropout goes by an input's place, so others are lost here than where heads lie last.
        """
        return self._map(x.astype(self.dtype), _HEADS, dropout)

    def of_columns(self, x: Float[Array, "b i t"]) -> Float[Array, "b t o"]:
        """The same of inputs with tokens last."""
        return self._map(x.astype(self.dtype), _FROM_COLUMNS)

    @property
    def _map(self) -> _Map:
        a, b = self.lora_a, self.lora_b
        update = None if a is None or b is None else (a[...], b[...])
        bias = None if self.bias is None else self.bias[...]
        return _Map(self.kernel[...], bias, update, self.scale)


class Projection(nnx.Module):
    """Linear, exact GELU, square Linear: from one network's features to another's width."""

    def __init__(
        self, in_features: int, out_features: int, *, config: NetworkConfig, rngs: nnx.Rngs
    ):
        # The second is square, and an array may use a mesh axis once: two names for one width.
        self.input = Linear(
            in_features, out_features, names=("features", "embed"), config=config, rngs=rngs
        )
        self.output = Linear(
            out_features, out_features, names=("embed", "features"), config=config, rngs=rngs
        )

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        return self.output(jax.nn.gelu(self.input(x), approximate=False))


class QKVLinear(nnx.Module):
    """Queries, keys and values of one input: kernel [3, in, out], a LoRA pair for each of three."""

    def __init__(
        self,
        features: int,
        *,
        config: NetworkConfig,
        lora: LoRAConfig | None = None,
        rngs: nnx.Rngs,
    ):
        dtype = jnp.dtype(config.param_dtype)
        self.dtype = jnp.dtype(config.dtype)
        self.scale = lora.scale if lora else 0.0
        self.kernel = nnx.Param(
            _kernel_init(rngs.params(), (3, features, features), dtype),
            **axes("parts", "embed", "heads"),
        )
        self.bias = nnx.Param(jnp.zeros((3, features), dtype), **axes("parts", "heads"))
        if lora is None:
            self.lora_a = self.lora_b = None
        else:
            a = _kernel_init(rngs.params(), (3, features, lora.rank), dtype)
            b = jnp.zeros((3, lora.rank, features), dtype)
            self.lora_a = nnx.LoRAParam(a, **axes("parts", "embed", "lora_rank"))
            self.lora_b = nnx.LoRAParam(b, **axes("parts", "lora_rank", "heads"))

    def __call__(
        self, x: Float[Array, "b t i"]
    ) -> tuple[Float[Array, "b t i"], Float[Array, "b t i"], Float[Array, "b t i"]]:
        q, k, v = self._maps(x.astype(self.dtype), _ROWS)
        return q, k, v

    def columns(
        self, x: Float[Array, "b t i"]
    ) -> tuple[Float[Array, "b i t"], Float[Array, "b i t"], Float[Array, "b i t"]]:
        """The same with tokens last, as a TPU's attention kernel takes narrow heads."""
        q, k, v = self._maps(x.astype(self.dtype), _COLUMNS)
        return q, k, v

    def _maps(self, x: Float[Array, "b t i"], form: _Form) -> Iterator[jax.Array]:
        a, b = self.lora_a, self.lora_b
        for i in range(3):
            update = None if a is None or b is None else (a[i], b[i])
            yield _Map(self.kernel[i], self.bias[i], update, self.scale)(x, form)


class LayerNorm(nnx.Module):
    """Layer norm over one axis, in float32."""

    def __init__(self, features: int, *, eps: float, config: NetworkConfig, rngs: nnx.Rngs):
        del rngs
        self.eps = eps
        dtype = jnp.dtype(config.param_dtype)
        self.scale = nnx.Param(jnp.ones((features,), dtype), **axes("norm"))
        self.bias = nnx.Param(jnp.zeros((features,), dtype), **axes("norm"))

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        y = x.astype(jnp.float32)  # float32 island: a norm of bf16 sums loses the mean
        center = y.mean(-1, keepdims=True)
        if platform() == "tpu" and x.dtype == jnp.bfloat16:
            # Both sums in one pass: of squares of so few digits float32 loses nothing that counts.
            variance = jnp.square(y).mean(-1, keepdims=True) - jnp.square(center)
            y = (y - center) * jax.lax.rsqrt(jnp.maximum(variance, 0) + self.eps)
        else:
            y = y - center
            y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        scale, bias = (_last_axis(p[...].astype(jnp.float32), y) for p in (self.scale, self.bias))
        return (y * scale + bias).astype(x.dtype)

    def of_columns(self, x: Float[Array, "b h d t"]) -> Float[Array, "b h d t"]:
        """The norm of each head's features, tokens last.

        Sums over features are products with ones: on a TPU a tenth of the time of reductions
        across registers' rows.
        """
        b, heads, size, t = x.shape
        ones = jnp.repeat(jnp.eye(heads, dtype=x.dtype), size, axis=0)

        def mean(x: jax.Array) -> Float[Array, "b h 1 t"]:
            flat = x.reshape(b, heads * size, t)
            total = jnp.einsum("bct,ch->bht", flat, ones, preferred_element_type=jnp.float32)
            return total[:, :, None] / size

        # A square of bfloat16 is two such numbers: the difference of means of squares is then as
        # good as float32, and nothing is written between the sums and the result.
        square = jnp.square(x.astype(jnp.float32))
        most = jax.lax.stop_gradient(square.astype(x.dtype))
        rest = (square - most.astype(jnp.float32)).astype(x.dtype)
        center = mean(x)
        variance = jnp.maximum(mean(most) + mean(rest) - jnp.square(center), 0)
        y = (x.astype(jnp.float32) - center) * jax.lax.rsqrt(variance + self.eps)
        scale, bias = (
            p[...].astype(jnp.float32).reshape(1, 1, size, 1) for p in (self.scale, self.bias)
        )
        return (y * scale + bias).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32 (Mistral's and T5's)."""

    def __init__(self, features: int, *, eps: float, config: NetworkConfig, rngs: nnx.Rngs):
        del rngs
        self.eps = eps
        dtype = jnp.dtype(config.param_dtype)
        self.scale = nnx.Param(jnp.ones((features,), dtype), **axes("norm"))

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        y = x.astype(jnp.float32)  # float32 island
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        return (y * _last_axis(self.scale[...].astype(jnp.float32), y)).astype(x.dtype)


def in_play(play: Callable[..., Any], train: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays that is `play` where nothing is differentiated, else `train`.

    The two give the same; `play` may take ways that have no gradient.
    """
    either = jax.custom_vjp(play)
    either.defvjp(lambda *args: jax.vjp(train, *args), lambda backward, dout: backward(dout))
    return either


def remat(function: Callable[..., Any], policy: Remat) -> Callable[..., Any]:
    """Wraps a layer so that its backward pass recomputes what `policy` does not save."""
    if policy == "none":
        return function
    if policy == "full":
        return jax.checkpoint(function)
    # By name: a rule for all products would keep them as they are summed, in float32.
    kept = jax.checkpoint_policies.save_only_these_names(_PRODUCT, SAVED)
    return jax.checkpoint(function, policy=kept)


def merge_low_rank(network: nnx.Module) -> None:
    """Adds each low-rank update to the matrix that it updates, and leaves it out from then on.

    For playing: the same function up to rounding, without the update's two products a layer.
    """
    for _, module in nnx.iter_graph(network):
        if not isinstance(module, Linear | QKVLinear):
            continue
        if module.lora_a is None or module.lora_b is None:
            continue
        a, b, kernel = module.lora_a[...], module.lora_b[...], module.kernel[...]
        merge = _merge_each if a.ndim > 2 + isinstance(module, QKVLinear) else _merge
        module.kernel.set_value(merge(kernel, a, b, module.scale))
        module.lora_a = module.lora_b = None


@functools.partial(jax.jit, donate_argnums=0)
def _merge(
    kernel: Float[Array, "*b i o"], a: Float[Array, "*b i r"], b: Float[Array, "*b r o"], scale: Any
) -> Float[Array, "*b i o"]:
    update = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32)) * scale
    return (kernel.astype(jnp.float32) + update).astype(kernel.dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _merge_each(
    kernel: Float[Array, "l *b i o"],
    a: Float[Array, "l *b i r"],
    b: Float[Array, "l *b r o"],
    scale: Any,
) -> Float[Array, "l *b i o"]:
    """Layer by layer, in place: float32 of one layer at a time."""

    def one(i: jax.Array, kernel: jax.Array) -> jax.Array:
        return kernel.at[i].set(_merge(kernel[i], a[i], b[i], scale))

    return jax.lax.fori_loop(0, kernel.shape[0], one, kernel)


class LayerStack(nnx.Module):
    """One block repeated: parameters hold a leading `layers` axis, `lax.scan` walks it."""

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], nnx.Module],
        num_layers: int,
        *,
        config: NetworkConfig,
        rngs: nnx.Rngs,
    ):
        self.remat: Remat = config.remat
        make = nnx.transform_metadata(in_axes=0, out_axes=0, partition="layers")(make_block)
        self.blocks = jax.vmap(make)(rngs.split(num_layers))

    def __call__(self, x: jax.Array, *args: Any, per_layer: Any = None) -> tuple[jax.Array, Any]:
        """Runs `x, y = block(x, *args, per_layer[layer])`; `y` comes back stacked over layers.

        `per_layer` is a pytree with a leading layers axis (a KV cache), or None: then the block is
        called without it, and returns `x` alone.
        """
        many = _are_many(math.prod(x.shape[:-2]), x.shape[-2])
        num_layers = jax.tree.leaves(self.blocks)[0].shape[0]

        def body(x: jax.Array, step: Any) -> tuple[jax.Array, Any]:
            layer, block, extra = step
            if many:
                block = jax.tree.map(apart, block)
            elif platform() == "tpu":
                block = _take_parts(block, self.blocks, layer)
            return (block(x, *args), None) if extra is None else block(x, *args, extra)

        steps = (jnp.arange(num_layers), self.blocks, per_layer)
        return jax.lax.scan(remat(body, self.remat), x, steps)


def _take_parts(block: nnx.Module, stack: nnx.Module, layer: jax.Array) -> nnx.Module:
    """A layer whose kernels in parts are cut from the stack part by part.

    A product then reads its part from the stack itself; of all three at once a copy is made first.
    The gradient of such a kernel would be added up over the layers: this is for play.
    """

    def take(one: nnx.Variable, every: nnx.Variable) -> nnx.Variable:
        names = every.get_metadata().get("out_sharding") or ()
        if names[1:2] != ("parts",):
            return one
        stacked = every[...]
        rows = stacked.reshape(-1, *stacked.shape[2:])
        first, parts = layer * stacked.shape[1], range(stacked.shape[1])
        return one.replace(
            jnp.stack([jax.lax.dynamic_index_in_dim(rows, first + i, 0, False) for i in parts])
        )

    return jax.tree.map(take, block, stack, is_leaf=lambda x: isinstance(x, nnx.Variable))


def count_params(module: nnx.Module) -> int:
    """Number of scalars in all parameters of a (possibly abstract) module."""
    leaves = jax.tree.leaves(nnx.state(module, nnx.Param))
    return sum(int(leaf.size) for leaf in leaves)
