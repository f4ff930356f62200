"""The video diffusion transformer: CogVideoX-2B's 3D attention, and a motion input.

Context tokens (the shot representation) and patch tokens go through full attention together; each
has its own modulation. Motion enters beside the timestep: `time_embed(sin t) + flow_embed(sin m)`
(PAPER section 3.2; CogVideoX, arXiv 2408.06072, section 2.2).
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from animegamer_jax import diffusion
from animegamer_jax.configs import DiTConfig
from animegamer_jax.models.attention import (
    attention,
    columns_attention,
    padded_length,
    padding_mask,
    takes_columns,
)
from animegamer_jax.models.kernels.splash import StaticMask
from animegamer_jax.models.linear import (
    LayerNorm,
    LayerStack,
    Linear,
    QKVLinear,
    apart,
    in_play,
)
from animegamer_jax.sharding import axes, constrain

GATES = (2, 5, 8, 11)
"""Which of a block's twelve modulations are gates."""


def sinusoid(x: Float[Array, " b"], size: int) -> Float[Array, "b {size}"]:
    """Cosines, then sines, of `x` at `size / 2` frequencies from 1 down to 1 / 10000; float32."""
    half = size // 2
    frequencies = jnp.exp(jnp.arange(half, dtype=jnp.float32) * (-np.log(10_000.0) / half))
    angles = x.astype(jnp.float32)[:, None] * frequencies[None]
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def position_table(config: DiTConfig) -> np.ndarray:
    """Sines and cosines of frame, row and column, [context + patches, width] float32.

    A quarter of the width tells the frame, three eighths each the column and the row; height and
    width are interpolated. (CogVideoX, section 2.2 and released code.) Context positions are zero,
    but for those of `context_grid`: they lie over the first frame, in the middle of their cells.

    Raises:
        ValueError: the grid has more cells than there are context tokens.
    """

    def encode(size: int, position: np.ndarray) -> np.ndarray:
        omega = 10_000.0 ** -(np.arange(size // 2, dtype=np.float64) / (size / 2))
        angles = position[:, None] * omega[None]
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    width = config.hidden_size
    in_time, in_space = width // 4, width // 4 * 3 // 2

    def lay_out(frames: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        f, r, c = (axis.ravel() for axis in np.meshgrid(frames, rows, columns, indexing="ij"))
        r, c = r / config.spatial_interpolation, c / config.spatial_interpolation
        return np.concatenate([encode(in_time, f), encode(in_space, c), encode(in_space, r)], 1)

    num_rows = config.latent_height // config.patch_size
    num_columns = config.latent_width // config.patch_size
    frames = np.arange(config.latent_frames // config.patch_frames, dtype=np.float64)
    patches = lay_out(frames, np.arange(num_rows), np.arange(num_columns))
    table = np.zeros((config.num_context_tokens + len(patches), width), np.float32)
    table[config.num_context_tokens :] = patches
    if config.context_grid:
        down, across = config.context_grid
        if down * across > config.num_context_tokens:
            raise ValueError(
                f"a context grid of {down} x {across}: more than {config.num_context_tokens} tokens"
            )
        rows = (np.arange(down) + 0.5) / down * num_rows - 0.5
        columns = (np.arange(across) + 0.5) / across * num_columns - 0.5
        first = config.num_context_tokens - down * across
        table[first : config.num_context_tokens] = lay_out(np.zeros(1), rows, columns)
    return table


class Embedding(nnx.Module):
    """Sinusoid, Linear, SiLU, Linear: of the timestep and of the motion value."""

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        self.size = config.hidden_size
        self.input = Linear(
            config.hidden_size,
            config.time_embed_size,
            names=("embed", "time_embed"),
            config=config,
            rngs=rngs,
        )
        # Square: only one of its two dimensions may be split.
        self.output = Linear(
            config.time_embed_size,
            config.time_embed_size,
            names=("time_embed", "features"),
            config=config,
            rngs=rngs,
        )

    def __call__(self, x: Float[Array, " b"]) -> Float[Array, "b e"]:
        return self.output(jax.nn.silu(self.input(sinusoid(x, self.size))))


class Modulation(NamedTuple):
    """What timestep and motion do to every layer and to the output; they do not depend on `x`."""

    layers: Float[Array, "*s l b m"]
    output: Float[Array, "*s b n"]


class Block(nnx.Module):
    """One layer. `modulation` gives 12 vectors: shift, scale, gate of attention and of the MLP,
    for patches first and for the context after.
    """

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        c, width = config, config.hidden_size
        self.num_heads = c.num_attention_heads
        self.num_context = c.num_context_tokens
        head = width // c.num_attention_heads
        self.modulation = Linear(
            c.time_embed_size,
            12 * width,
            names=("time_embed", "modulation"),
            config=c,
            rngs=rngs,
        )
        self.attention_norm = LayerNorm(width, eps=c.layer_norm_eps, config=c, rngs=rngs)
        self.qkv = QKVLinear(width, config=c, lora=c.lora, rngs=rngs)
        self.query_norm = LayerNorm(head, eps=1e-6, config=c, rngs=rngs)
        self.key_norm = LayerNorm(head, eps=1e-6, config=c, rngs=rngs)
        self.out = Linear(width, width, names=("heads", "embed"), config=c, lora=c.lora, rngs=rngs)
        self.mlp_norm = LayerNorm(width, eps=c.layer_norm_eps, config=c, rngs=rngs)
        self.mlp_in = Linear(
            width, c.intermediate_size, names=("embed", "mlp"), config=c, rngs=rngs
        )
        self.mlp_out = Linear(
            c.intermediate_size, width, names=("mlp", "embed"), config=c, rngs=rngs
        )

    def __call__(
        self, x: Float[Array, "b t d"], length: int, modulation: Float[Array, "b m"]
    ) -> tuple[Float[Array, "b t d"], None]:
        """`length` is that of the sequence without its padding; `modulation` is this layer's."""
        # float32 island: modulation multiplies the residual stream's norms
        m = rearrange(modulation.astype(jnp.float32), "b (n d) -> n b d", n=12)
        is_context = (jnp.arange(x.shape[1]) < self.num_context)[None, :, None]

        def per_token(i: int) -> Float[Array, "b t d"]:
            return jnp.where(is_context, m[i + 6][:, None], m[i][:, None])

        def modulate(y: jax.Array, shift: int) -> jax.Array:
            y = y.astype(jnp.float32) * (1 + per_token(shift + 1)) + per_token(shift)
            return apart(y.astype(x.dtype))

        y = self.attend(modulate(self.attention_norm(x), 0), length)
        x = (x + per_token(2) * y).astype(x.dtype)
        y = self.mlp_in(modulate(self.mlp_norm(x), 3))
        y = constrain(y, "act_batch", "act_length", "act_mlp")
        y = jax.nn.gelu(y.astype(jnp.float32)).astype(y.dtype)  # float32 island
        y = apart(self.mlp_out(apart(y)))
        x = (x + per_token(5) * y).astype(x.dtype)
        return constrain(x, "act_batch", "act_length", "act_embed"), None

    def attend(self, x: Float[Array, "b t d"], length: int) -> Float[Array, "b t d"]:
        """Every token sees every token but the padding from `length` on."""
        if takes_columns(length):
            return self._attend_columns(x, length)
        q, k, v = (rearrange(y, "b t (h d) -> b t h d", h=self.num_heads) for y in self.qkv(x))
        mask = padding_mask(*x.shape[:2], length=length)
        y = attention(self.query_norm(q), self.key_norm(k), v, mask=mask)
        return self.out(rearrange(y, "b t h d -> b t (h d)"))

    def _attend_columns(self, x: Float[Array, "b t d"], length: int) -> Float[Array, "b t d"]:
        q, k, v = (
            apart(rearrange(y, "b (h d) t -> b h d t", h=self.num_heads))
            for y in self.qkv.columns(x)
        )
        q, k = self.query_norm.of_columns(q), self.key_norm.of_columns(k)
        padded = x.shape[1] > length
        mask = StaticMask(causal=False, length=length) if padded else None

        def play(q: Any, k: Any, v: Any, out: Linear) -> jax.Array:
            y = columns_attention(q, k, v, mask=mask, play=True)
            return out.of_columns(rearrange(y, "b h t d -> b (h d) t"))

        def train(q: Any, k: Any, v: Any, out: Linear) -> jax.Array:
            return out.of_heads(columns_attention(q, k, v, mask=mask))

        return in_play(play, train)(q, k, v, self.out)


class DiT(nnx.Module):
    """Predicts v of noised latents, given timestep, motion value and context.

    `positions` is a constant of the released files (`position_table`); it is kept as a parameter
    so that those files come back whole, and no stage trains it.
    """

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        self.config = c = config
        width, patch = c.hidden_size, c.patch_frames * c.patch_size**2 * c.latent_channels
        self.positions = nnx.Param(
            jnp.asarray(position_table(c), c.param_dtype), **axes("positions", "embed")
        )
        self.patch_in = Linear(patch, width, names=("features", "embed"), config=c, rngs=rngs)
        self.time_embed = Embedding(c, rngs=rngs)
        self.motion_embed = Embedding(c, rngs=rngs)
        self.layers = LayerStack(
            lambda rngs: Block(c, rngs=rngs), c.num_layers, config=c, rngs=rngs
        )
        self.final_norm = LayerNorm(width, eps=c.layer_norm_eps, config=c, rngs=rngs)
        self.output_norm = LayerNorm(width, eps=1e-6, config=c, rngs=rngs)
        self.output_modulation = Linear(
            c.time_embed_size,
            2 * width,
            names=("time_embed", "modulation"),
            config=c,
            rngs=rngs,
        )
        self.patch_out = Linear(width, patch, names=("embed", "features"), config=c, rngs=rngs)

    def modulation(self, timestep: Float[Array, " b"], motion: Float[Array, " b"]) -> Modulation:
        """The modulation of all layers at once, as one product.

        Args:
            timestep: training step, 0..999.
            motion: motion value (mean optical-flow magnitude in pixels at 480 x 720).
        """
        emb = jax.nn.silu(self.time_embed(timestep) + self.motion_embed(motion))
        linears = cast(Block, self.layers.blocks).modulation
        layers = jax.vmap(lambda linear: linear(emb))(linears)
        return Modulation(layers, self.output_modulation(emb))

    def __call__(
        self,
        x: Float[Array, "b f h w c"],
        *,
        timestep: Float[Array, " b"],
        motion: Float[Array, " b"],
        context: Float[Array, "b n d"],
        modulation: Modulation | None = None,
    ) -> Float[Array, "b f h w c"]:
        """Predicts v.

        Args:
            x: noised latents, already scaled by the VAE's factor.
            timestep: training step, 0..999.
            motion: as of the method `modulation`.
            context: shot representation, one row a sample.
            modulation: of these timesteps and motions, where it was made before.

        Raises:
            ValueError: frames, height or width differ from those of the position table.
        """
        c, p, g = self.config, self.config.patch_size, self.config.patch_frames
        _, f, h, w, _ = x.shape
        if (f, h, w) != (c.latent_frames, c.latent_height, c.latent_width):
            raise ValueError(
                f"latents of {f} x {h} x {w} (frames, height, width): this transformer has "
                f"positions for {c.latent_frames} x {c.latent_height} x {c.latent_width}"
            )
        made = self.modulation(timestep, motion) if modulation is None else modulation
        tokens = rearrange(x, "b (f g) (h p) (w q) c -> b (f h w) (g p q c)", g=g, p=p, q=p)
        tokens = jnp.concatenate([context.astype(c.dtype), self.patch_in(tokens)], axis=1)
        tokens = tokens + self.positions[...].astype(c.dtype)[None]
        length = tokens.shape[1]
        tokens = jnp.pad(tokens, ((0, 0), (0, padded_length(length) - length), (0, 0)))
        tokens = constrain(tokens, "act_batch", "act_length", "act_embed")
        tokens, _ = self.layers(tokens, length, per_layer=made.layers)
        tokens = self.output_norm(self.final_norm(tokens)[:, c.num_context_tokens : length])
        # float32 island
        shift, scale = jnp.split(made.output.astype(jnp.float32), 2, axis=-1)
        tokens = self.patch_out(tokens * (1 + scale[:, None]) + shift[:, None])
        pattern = "b (f h w) (g c p q) -> b (f g) (h p) (w q) c"
        y = rearrange(tokens, pattern, g=g, p=p, q=p, f=f // g, h=h // p)
        y = apart(y)  # patches are laid out in their own format, not in float32
        if c.output == "v":
            return y
        return diffusion.v_of_clean(diffusion.Schedule(), x, y, timestep, std=c.clean_std)
