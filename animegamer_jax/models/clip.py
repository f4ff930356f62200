"""OpenCLIP's image and text towers, for a shot's first frame (paper, section 3.1, f_v) and metrics.

The decoder's condition is the patch features of the image tower's last layer but one. Evaluation
uses the pooled embeddings of both towers. Source: OpenCLIP ViT-B/16 (laion2b_s34b_b88k).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from animegamer_jax.configs import CLIPConfig
from animegamer_jax.errors import UserError
from animegamer_jax.models.kernels.attend import attend, project_heads
from animegamer_jax.models.kernels.masks import StaticMask
from animegamer_jax.models.layer_stack import LayerStack
from animegamer_jax.models.linear import Linear, QKVLinear
from animegamer_jax.models.norms import LayerNorm
from animegamer_jax.models.vae import signed
from animegamer_jax.sharding import axes, constrain

PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)  # red, green, blue in [0, 1]
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)
_NORM_EPS = 1e-5
_CUBIC = -0.75  # slope of the cubic kernel at distance 1, PyTorch's value


def _blur_matrix(size: int, sigma: float) -> Float[np.ndarray, "i i"]:
    """Returns a Gaussian blur along one axis, cut off at about two sigma, the border mirrored."""
    width = int(max(4.0 * sigma, 3.0))
    reach = (width + 1 - width % 2) // 2
    taps = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    taps /= taps.sum()
    matrix = np.zeros((size, size))
    for offset, tap in zip(range(-reach, reach + 1), taps, strict=True):
        source = np.abs(np.arange(size) + offset)
        source = size - 1 - np.abs(size - 1 - source)
        np.add.at(matrix, (np.arange(size), source), tap)
    return matrix


def _cubic_matrix(size_in: int, size_out: int) -> Float[np.ndarray, "o i"]:
    """Returns bicubic interpolation along one axis, with the corner pixels' centers aligned."""
    centre = np.arange(size_out) * (size_in - 1) / max(size_out - 1, 1)
    first = np.floor(centre).astype(int) - 1
    matrix = np.zeros((size_out, size_in))
    for tap in range(4):
        x = np.abs(centre - (first + tap))
        near = ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1
        far = ((_CUBIC * x - 5 * _CUBIC) * x + 8 * _CUBIC) * x - 4 * _CUBIC
        weight = np.where(x <= 1, near, np.where(x < 2, far, 0.0))
        source = np.clip(first + tap, 0, size_in - 1)
        np.add.at(matrix, (np.arange(size_out), source), weight)
    return matrix


@functools.lru_cache(maxsize=32)
def resize_matrices(
    height: int, width: int, *, size: int
) -> tuple[Float[np.ndarray, "o h"], Float[np.ndarray, "o w"]]:
    """Returns float64 weights for rows and for columns that resize a frame to `size` x `size`.

    The same function as kornia's `resize` (bicubic, corners aligned, antialiased), which the
    released decoder calls: a Gaussian blur of sigma (factor - 1) / 2 before the interpolation if
    either side shrinks. PyTorch's own antialiasing gives different numbers.
    """

    def one(length: int) -> np.ndarray:
        matrix = _cubic_matrix(length, size)
        if max(height, width) > size and length > 1:
            matrix = matrix @ _blur_matrix(length, max((length / size - 1) / 2, 1e-3))
        return matrix

    return one(height), one(width)


class CLIPBlock(nnx.Module):
    """A transformer layer: norms before attention and before the feed-forward, exact GELU."""

    def __init__(self, width: int, *, num_heads: int, config: CLIPConfig, rngs: nnx.Rngs):
        self.head_size = width // num_heads
        hidden = round(width * config.mlp_ratio)
        self.attention_norm = LayerNorm(width, eps=_NORM_EPS, config=config, rngs=rngs)
        self.qkv = QKVLinear(width, config=config, rngs=rngs)
        self.out = Linear(width, width, names=("heads", "embed"), config=config, rngs=rngs)
        self.mlp_norm = LayerNorm(width, eps=_NORM_EPS, config=config, rngs=rngs)
        self.up = Linear(width, hidden, names=("embed", "mlp"), config=config, rngs=rngs)
        self.down = Linear(hidden, width, names=("mlp", "embed"), config=config, rngs=rngs)

    def __call__(self, x: Float[Array, "b t d"], mask: StaticMask | None) -> Float[Array, "b t d"]:
        y = self.attention_norm(x)
        q, k, v = project_heads(y, self.qkv.maps(), head_size=self.head_size, mask=mask)
        x += attend(q, k, v, self.out, mask=mask)
        y = jax.nn.gelu(self.up(self.mlp_norm(x)), approximate=False)
        return constrain(x + self.down(y), "act_batch", None, "act_embed")


def _stack(
    width: int, num_layers: int, num_heads: int, *, config: CLIPConfig, rngs: nnx.Rngs
) -> LayerStack | None:
    """Returns a tower's layers; None if it has none."""
    if num_layers == 0:
        return None

    def make(rngs: nnx.Rngs) -> CLIPBlock:
        return CLIPBlock(width, num_heads=num_heads, config=config, rngs=rngs)

    return LayerStack(make, num_layers, config=config, rngs=rngs)


class ImageTower(nnx.Module):
    """A vision transformer with a class token in front of the patches."""

    def __init__(self, config: CLIPConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, patch = config.vision_width, config.patch_size
        dtype = jnp.dtype(config.param_dtype)

        def normal(*shape: int, std: float = width**-0.5) -> jax.Array:
            return jax.random.normal(rngs.params(), shape, dtype) * std

        self.patch_kernel = nnx.Param(
            normal(patch, patch, 3, width, std=(3 * patch * patch) ** -0.5),
            **axes("kernel", "kernel", "conv_in", "conv_out"),
        )
        self.class_embedding = nnx.Param(normal(width), **axes("embed"))
        self.position_embedding = nnx.Param(
            normal(config.num_patches + 1, width), **axes("positions", "embed")
        )
        self.pre_norm = LayerNorm(width, eps=_NORM_EPS, config=config, rngs=rngs)
        self.layers = _stack(
            width, config.vision_layers, config.vision_heads, config=config, rngs=rngs
        )
        self.post_norm = LayerNorm(width, eps=_NORM_EPS, config=config, rngs=rngs)
        self.projection = nnx.Param(normal(width, config.embed_size), **axes("embed", "features"))

    def tokens(self, pixels: Float[Array, "b s s 3"]) -> Float[Array, "b n d"]:
        """Returns the first layer's input: the class token, then the patches row by row."""
        config = self.config
        patch = config.patch_size
        side = config.image_size // patch
        dtype = jnp.dtype(config.dtype)
        used = side * patch
        x = pixels.astype(dtype)[:, :used, :used]
        x = x.reshape(x.shape[0], side, patch, side, patch, 3)
        x = jnp.einsum("byixjc,ijcd->byxd", x, self.patch_kernel[...].astype(dtype))
        x = x.reshape(x.shape[0], side * side, -1)
        first = jnp.broadcast_to(
            self.class_embedding[...].astype(dtype), (x.shape[0], 1, x.shape[2])
        )
        x = jnp.concatenate([first, x], axis=1)
        x = self.pre_norm(x + self.position_embedding[...].astype(dtype)[None])
        return constrain(x, "act_batch", None, "act_embed")

    def features(self, pixels: Float[Array, "b s s 3"]) -> Float[Array, "b n d"]:
        """Returns `CLIP.image_features`."""
        x = self.tokens(pixels)
        if self.layers is not None:
            all_but_last = jax.tree.map(lambda stacked: stacked[:-1], self.layers)
            x, _ = all_but_last(x, None)
        return x[:, 1:]

    def __call__(self, pixels: Float[Array, "b s s 3"]) -> Float[Array, "b e"]:
        x = self.tokens(pixels)
        if self.layers is not None:
            x, _ = self.layers(x, None)
        return self.post_norm(x[:, 0]) @ self.projection[...].astype(x.dtype)


class TextTower(nnx.Module):
    """A causal transformer, whose result is read at the end-of-text token."""

    def __init__(self, config: CLIPConfig, *, rngs: nnx.Rngs):
        self.config = config
        width = config.text_width
        dtype = jnp.dtype(config.param_dtype)

        def normal(*shape: int, std: float) -> jax.Array:
            return jax.random.normal(rngs.params(), shape, dtype) * std

        self.embedding = nnx.Param(
            normal(config.vocab_size, width, std=0.02), **axes("vocab", "embed")
        )
        self.position_embedding = nnx.Param(
            normal(config.context_length, width, std=0.01), **axes("positions", "embed")
        )
        layers, heads = config.text_layers, config.text_heads
        self.layers = _stack(width, layers, heads, config=config, rngs=rngs)
        self.final_norm = LayerNorm(width, eps=_NORM_EPS, config=config, rngs=rngs)
        self.projection = nnx.Param(
            normal(width, config.embed_size, std=width**-0.5), **axes("embed", "features")
        )

    def __call__(self, tokens: Int[Array, "b n"]) -> Float[Array, "b e"]:
        if self.layers is None:
            raise UserError(
                "this CLIP cannot embed text: it has no text layers (the released decoder file "
                "leaves them out); convert OpenCLIP's own file"
            )
        dtype = jnp.dtype(self.config.dtype)
        x = self.embedding[...].astype(dtype)[tokens]
        x = x + self.position_embedding[...].astype(dtype)[None, : tokens.shape[1]]
        x = constrain(x, "act_batch", None, "act_embed")
        x, _ = self.layers(x, StaticMask())
        last = jnp.take_along_axis(x, tokens.argmax(1)[:, None, None], axis=1)[:, 0]
        return self.final_norm(last) @ self.projection[...].astype(x.dtype)


class CLIP(nnx.Module):
    """Both towers. Embeddings are not normalized: divide by their lengths for a cosine."""

    def __init__(self, config: CLIPConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.image = ImageTower(config, rngs=rngs)
        self.text = TextTower(config, rngs=rngs)
        dtype = jnp.dtype(config.param_dtype)
        # Logarithm of the inverse temperature in the contrastive loss; features do not use it.
        self.logit_scale = nnx.Param(jnp.full((), np.log(1 / 0.07), dtype), **axes())

    def preprocess(self, frames: Float[Array, "b h w 3"]) -> Float[Array, "b s s 3"]:
        """Resizes frames in [-1, 1] to the tower's square and standardizes them; float32.

        See `resize_matrices`. The cubic kernel overshoots at edges; as in the release, nothing is
        clipped.
        """
        rows, columns = resize_matrices(*frames.shape[1:3], size=self.config.image_size)
        x = (frames.astype(jnp.float32) + 1) / 2
        x = jnp.einsum("oh,bhwc->bowc", jnp.asarray(rows, jnp.float32), x)
        x = jnp.einsum("pw,bowc->bopc", jnp.asarray(columns, jnp.float32), x)
        mean = jnp.asarray(PIXEL_MEAN, jnp.float32)[None, None, None]
        std = jnp.asarray(PIXEL_STD, jnp.float32)[None, None, None]
        return (x - mean) / std

    def image_features(self, pixels: Float[Array, "b s s 3"]) -> Float[Array, "b n d"]:
        """Returns the condition f_v of `preprocess`ed frames: patches after the last layer but one.

        Neither normalized nor projected; `n` is `config.num_patches`, row by row.
        """
        return self.image.features(pixels)

    def see(self, frames: UInt8[Array, "b h w 3"]) -> Float[Array, "b n d"]:
        """Returns the condition f_v of frames of any size in 0..255."""
        return self.image_features(self.preprocess(signed(frames)))

    def embed_image(self, pixels: Float[Array, "b s s 3"]) -> Float[Array, "b e"]:
        """Returns the pooled embedding: the class token, normalized and projected."""
        return self.image(pixels)

    def embed_text(self, tokens: Int[Array, "b n"]) -> Float[Array, "b e"]:
        """Returns the pooled embedding: the end-of-text token, normalized and projected.

        Args:
            tokens: Ids, at most `config.context_length` a row. End-of-text is the largest id of a
                row, as in OpenCLIP's vocabulary; ids after it have no effect.

        Raises:
            UserError: The tower has no layers, as in the released decoder file.
        """
        return self.text(tokens)
