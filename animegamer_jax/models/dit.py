"""The video diffusion transformer: CogVideoX-2B with an input for motion (paper, section 3.2).

Context tokens (the shot representation) and patch tokens attend to one another; each kind has its
own modulation, which is computed from `time_embed(timestep) + motion_embed(motion)`. (CogVideoX,
arXiv 2408.06072, section 2.2.) With a memory, which is ours, the first frames of past clips are
further patch tokens, without noise: what was shown stays as it was shown.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from animegamer_jax import diffusion
from animegamer_jax.configs import DiTConfig
from animegamer_jax.models.kernels.attend import attend, padded_length, project_heads
from animegamer_jax.models.kernels.flash import is_bounded
from animegamer_jax.models.kernels.masks import padding_mask
from animegamer_jax.models.layer_stack import LayerStack
from animegamer_jax.models.linear import Linear, QKVLinear, fusion_barrier
from animegamer_jax.models.norms import LayerNorm
from animegamer_jax.sharding import axes, constrain

GATES = (2, 5, 8, 11)
"""Indices of the gates among a block's twelve modulation vectors."""


def sinusoid(x: Float[Array, " b"], size: int) -> Float[Array, "b {size}"]:
    """Returns cosines, then sines, of `x` at `size / 2` frequencies from 1 to 1 / 10000; float32.

    The frequencies are computed on the host in the order of the released PyTorch code.
    """
    half = size // 2
    exponents = np.float32(-np.log(10_000.0)) * np.arange(half, dtype=np.float32) / np.float32(half)
    frequencies = jnp.asarray(np.exp(exponents.astype(np.float64)), jnp.float32)
    angles = x.astype(jnp.float32)[:, None] * frequencies[None]
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def position_table(config: DiTConfig) -> np.ndarray:
    """Returns sines and cosines of frame, column and row, [context + patches, width] float32.

    A quarter of the width encodes the frame, three eighths each the column and the row; rows and
    columns are interpolated. (CogVideoX, section 2.2 and released code.) Context tokens have zeros,
    except those of a `context_grid`, whose cells cover the first frame: the encoding of a cell's
    center.

    Raises:
        ValueError: The grid has more cells than there are context tokens.
    """
    num_rows, num_columns = _patches_of_frame(config)
    frames = np.arange(config.latent_frames // config.patch_frames, dtype=np.float64)
    patches = _positions(config, frames, np.arange(num_rows), np.arange(num_columns))
    table = np.zeros((config.num_context_tokens + len(patches), config.hidden_size), np.float32)
    table[config.num_context_tokens :] = patches
    if config.context_grid:
        cells = math.prod(config.context_grid)
        if cells > config.num_context_tokens:
            down, across = config.context_grid
            raise ValueError(
                f"a context grid of {down} x {across}: more than {config.num_context_tokens} tokens"
            )
        first = config.num_context_tokens - cells
        centers = _cell_centers(config, config.context_grid)
        table[first : config.num_context_tokens] = _positions(config, np.zeros(1), *centers)
    return table


def memory_table(config: DiTConfig) -> np.ndarray:
    """Returns the positions of remembered frames' patches, [memory, width] float32.

    They are encoded as frames before the first: the newest, which comes last, as frame -1.

    Raises:
        ValueError: The config has no memory, or its patches have several frames.
    """
    if not config.memory:
        raise ValueError("a decoder without memory")
    if config.patch_frames != 1:
        raise ValueError(f"a memory of frames: a patch has {config.patch_frames} of them")
    num_rows, num_columns = _patches_of_frame(config)
    frames = np.arange(-config.memory, 0, dtype=np.float64)
    return _positions(config, frames, np.arange(num_rows), np.arange(num_columns))


def _patches_of_frame(config: DiTConfig) -> tuple[int, int]:
    return config.latent_height // config.patch_size, config.latent_width // config.patch_size


def _cell_centers(config: DiTConfig, grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows and columns of the centers of a grid's cells, in patches."""
    rows, columns = (
        (np.arange(cells) + 0.5) / cells * patches - 0.5
        for cells, patches in zip(grid, _patches_of_frame(config), strict=True)
    )
    return rows, columns


def _positions(
    config: DiTConfig, frames: np.ndarray, rows: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    """Returns the encodings of all combinations, [frames x rows x columns, width]."""

    def encode(size: int, position: np.ndarray) -> np.ndarray:
        frequencies = 10_000.0 ** -(np.arange(size // 2, dtype=np.float64) / (size / 2))
        angles = position[:, None] * frequencies[None]
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    in_time = config.hidden_size // 4
    in_space = in_time * 3 // 2
    f, r, c = (axis.ravel() for axis in np.meshgrid(frames, rows, columns, indexing="ij"))
    # In float32 as in the released code, whose table this is bit for bit.
    scale = np.float32(config.spatial_interpolation)
    r, c = r.astype(np.float32) / scale, c.astype(np.float32) / scale
    found = [encode(in_time, f), encode(in_space, c), encode(in_space, r)]
    return np.concatenate(found, axis=1).astype(np.float32)


def memory_rows(
    memory: Float[Array, "g m h w c"] | None, rows: int, *, num_given: int = 1
) -> Float[Array, "b m h w c"] | None:
    """Returns the memory of all rows of guidance, in their order.

    The last `num_given` rows are given the memory, those before them, which are unconditional, get
    zeros. Without a memory there is none for any row.
    """
    if memory is None:
        return None
    given, unconditional = [memory] * num_given, [jnp.zeros_like(memory)] * (rows - num_given)
    return jnp.concatenate(unconditional + given)


class Embedding(nnx.Module):
    """Sinusoid, Linear, SiLU, Linear: embeds the timestep or the motion value."""

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        self.width = width = config.hidden_size
        size = config.time_embed_size
        self.input = Linear(width, size, names=("embed", "time_embed"), config=config, rngs=rngs)
        # Square: only one of its two dimensions may be sharded.
        self.output = Linear(size, size, names=("time_embed", "features"), config=config, rngs=rngs)

    def __call__(self, x: Float[Array, " b"]) -> Float[Array, "b e"]:
        return self.output(jax.nn.silu(self.input(sinusoid(x, self.width))))


class Modulation(NamedTuple):
    """Modulation vectors of every layer and of the output; the latents do not affect them."""

    layers: Float[Array, "*s l b m"]
    output: Float[Array, "*s b n"]


class ModulationTable(nnx.Module):
    """The modulation at a few timesteps and motion values, which is looked up, not computed.

    Args:
        timesteps: The timesteps, [s] float32.
        motions: The motion values, [m] float32.
        modulation: Of every pair, the timestep's index first: `s * m` rows. Shapes will do.
    """

    def __init__(self, timesteps: Any, motions: Any, modulation: Modulation):
        self.timesteps = nnx.Param(timesteps, **axes("time_embed"))
        self.motions = nnx.Param(motions, **axes("time_embed"))
        self.layers = nnx.Param(modulation.layers, **axes("layers", "time_embed", "modulation"))
        self.output = nnx.Param(modulation.output, **axes("time_embed", "modulation"))

    def __call__(self, timestep: Float[Array, " b"], motion: Float[Array, " b"]) -> Modulation:
        """Returns the modulation at the nearest timesteps and motion values of the table."""

        def nearest(values: jax.Array, found: jax.Array) -> jax.Array:
            return jnp.abs(values[:, None] - found[None]).argmin(0)

        motions = self.motions[...]
        rows = nearest(self.timesteps[...], timestep) * len(motions) + nearest(motions, motion)
        return Modulation(self.layers[...][:, rows], self.output[...][rows])


class Block(nnx.Module):
    """One layer: attention and an MLP, each with a modulated norm and a gate.

    `modulation` gives 12 vectors: shift, scale and gate of attention, then of the MLP, first for
    patches and then for the context.

    Attributes:
        most_score: Bound of all layers' attention scores, before their factor; None: each layer
            computes its own (`fix_most_score`).
    """

    most_score: float | None = None

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        c, width = config, config.hidden_size
        self.head_size = width // c.num_attention_heads
        self.modulation = Linear(
            c.time_embed_size, 12 * width, names=("time_embed", "modulation"), config=c, rngs=rngs
        )
        self.attention_norm = LayerNorm(width, eps=c.layer_norm_eps, config=c, rngs=rngs)
        self.qkv = QKVLinear(width, config=c, lora=c.lora, rngs=rngs)
        self.query_norm = LayerNorm(self.head_size, eps=1e-6, config=c, rngs=rngs)
        self.key_norm = LayerNorm(self.head_size, eps=1e-6, config=c, rngs=rngs)
        self.out = Linear(width, width, names=("heads", "embed"), config=c, lora=c.lora, rngs=rngs)
        self.mlp_norm = LayerNorm(width, eps=c.layer_norm_eps, config=c, rngs=rngs)
        self.mlp_in = Linear(
            width, c.intermediate_size, names=("embed", "mlp"), config=c, rngs=rngs
        )
        self.mlp_out = Linear(
            c.intermediate_size, width, names=("mlp", "embed"), config=c, rngs=rngs
        )

    def __call__(
        self,
        x: Float[Array, "b t d"],
        num_context: int,
        length: int,
        modulation: Float[Array, "b m"],
    ) -> tuple[Float[Array, "b t d"], None]:
        """Runs the layer.

        Args:
            x: Context tokens, patch tokens, padding.
            num_context: Number of context tokens.
            length: Number of tokens without the padding.
            modulation: Modulation of this layer.
        """
        # float32 island: modulation multiplies the residual stream's norms
        m = rearrange(modulation.astype(jnp.float32), "b (n d) -> n b d", n=12)
        is_context = (jnp.arange(x.shape[1]) < num_context)[None, :, None]

        def per_token(i: int) -> Float[Array, "b t d"]:
            return jnp.where(is_context, m[i + 6][:, None], m[i][:, None])

        def modulate(y: jax.Array, shift: int) -> jax.Array:
            y = y.astype(jnp.float32) * (1 + per_token(shift + 1)) + per_token(shift)
            return fusion_barrier(y.astype(x.dtype))

        y = self.attend(modulate(self.attention_norm(x), 0), length)
        x = (x + per_token(2) * y).astype(x.dtype)
        y = self.mlp_in(modulate(self.mlp_norm(x), 3))
        y = constrain(y, "act_batch", "act_length", "act_mlp")
        y = jax.nn.gelu(y.astype(jnp.float32)).astype(y.dtype)  # float32 island
        y = fusion_barrier(self.mlp_out(fusion_barrier(y)))
        x = (x + per_token(5) * y).astype(x.dtype)
        return constrain(x, "act_batch", "act_length", "act_embed"), None

    def attend(self, x: Float[Array, "b t d"], length: int) -> Float[Array, "b t d"]:
        """Lets every token attend to every token except the padding from `length` on."""
        mask = padding_mask(x.shape[1], length=length)
        q, k, v = project_heads(x, self.qkv.maps(), head_size=self.head_size, mask=mask)
        q, k = self.query_norm.normalize_heads(q), self.key_norm.normalize_heads(k)
        most_score = self.most_score
        if most_score is None:
            most_score = self.query_norm.most_norm() * self.key_norm.most_norm()
        return attend(q, k, v, self.out, mask=mask, most_score=most_score)


def fix_most_score(dit: "DiT") -> None:
    """Stores the bound of all layers' attention scores if no layer needs a running maximum.

    Then only that kernel is compiled (`kernels.flash`); otherwise each layer chooses by its own
    weights when it runs.
    """
    block = cast(Block, dit.layers.blocks)
    most = float((block.query_norm.most_norm() * block.key_norm.most_norm()).max())
    block.most_score = most if is_bounded(most, block.head_size**-0.5) else None


def tabulate_modulation(dit: "DiT", timesteps: Sequence[int], motions: Sequence[float]) -> None:
    """Replaces the weights of the modulation by its values, in place; for playing.

    A decoder that is played with a few timesteps and motion values alone, as a distilled one is,
    needs far less memory for these. Works with shapes in place of arrays, too.

    Args:
        dit: The decoder.
        timesteps: All timesteps with which it is played.
        motions: All motion values with which it is played.
    """
    graphdef, state = nnx.split(dit)

    def compute(state: nnx.State) -> tuple[jax.Array, jax.Array, Modulation]:
        t, m = (jnp.asarray(values, jnp.float32) for values in (timesteps, motions))
        dit = nnx.merge(graphdef, state)
        return t, m, dit.modulation(jnp.repeat(t, len(m)), jnp.tile(m, len(t)))

    is_abstract = isinstance(jax.tree.leaves(state)[0], jax.ShapeDtypeStruct)
    known = jax.eval_shape(compute, state) if is_abstract else jax.jit(compute)(state)
    dit.table = ModulationTable(*known)
    del dit.time_embed, dit.motion_embed, dit.output_modulation
    del cast(Any, dit.layers.blocks).modulation


def make_memory_positions(config: DiTConfig, *, dtype: DTypeLike) -> nnx.Param:
    """Returns the parameter of the remembered frames' positions, new."""
    return nnx.Param(jnp.asarray(memory_table(config), dtype), **axes("positions", "embed"))


class DiT(nnx.Module):
    """Predicts v of noised latents, given timestep, motion value and context.

    `positions` holds `position_table`. It is a parameter because the released files contain it and
    an export must write it back; only `--trained all` and the foundations train it.

    Attributes:
        table: The modulation, where it is not computed any more (`tabulate_modulation`).
    """

    table: ModulationTable | None = None

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        self.config = c = config
        width, patch = c.hidden_size, c.patch_frames * c.patch_size**2 * c.latent_channels
        self.positions = nnx.Param(
            jnp.asarray(position_table(c), c.param_dtype), **axes("positions", "embed")
        )
        if c.memory:
            self.memory_positions = make_memory_positions(c, dtype=c.param_dtype)
        self.patch_in = Linear(patch, width, names=("features", "embed"), config=c, rngs=rngs)
        self.time_embed = Embedding(c, rngs=rngs)
        self.motion_embed = Embedding(c, rngs=rngs)
        self.layers = LayerStack(
            lambda rngs: Block(c, rngs=rngs), c.num_layers, config=c, rngs=rngs
        )
        self.final_norm = LayerNorm(width, eps=c.layer_norm_eps, config=c, rngs=rngs)
        self.output_norm = LayerNorm(width, eps=1e-6, config=c, rngs=rngs)
        self.output_modulation = Linear(
            c.time_embed_size, 2 * width, names=("time_embed", "modulation"), config=c, rngs=rngs
        )
        self.patch_out = Linear(width, patch, names=("embed", "features"), config=c, rngs=rngs)

    def modulation(self, timestep: Float[Array, " b"], motion: Float[Array, " b"]) -> Modulation:
        """Returns the modulation of all layers, computed as one product.

        Args:
            timestep: Noise level as a step of the training schedule, 0..999.
            motion: Motion value: mean magnitude of optical flow, in pixels at 480 x 720.
        """
        if self.table is not None:
            return self.table(timestep, motion)
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
        memory: Float[Array, "b m h w c"] | None = None,
        modulation: Modulation | None = None,
    ) -> Float[Array, "b f h w c"]:
        """Predicts v of noised latents, scaled (`latents.to_decoder`), from shot representations.

        The latents are a whole clip's, or a picture's: one patch of frames. The memory has the
        scaled latents of past clips' first frames, the newest last, zeros where there was none; its
        patches come between the context and those of the latents.

        Timestep and motion are those of `modulation`, whose result may be given if already
        computed.

        Raises:
            ValueError: The latents do not have the frames, height and width of the config.
        """
        if modulation is None:
            modulation = self.modulation(timestep, motion)
        tokens, patches = self._embed(x, context, memory)
        tokens, _ = self.layers(tokens, context.shape[1], patches.stop, per_layer=modulation.layers)
        return self._project(tokens[:, patches], x, timestep, modulation)

    def with_residual(
        self,
        x: Float[Array, "b f h w c"],
        *,
        timestep: Float[Array, " b"],
        context: Float[Array, "b n d"],
        memory: Float[Array, "b m h w c"] | None = None,
        modulation: Modulation,
    ) -> tuple[Float[Array, "b f h w c"], Float[Array, "b t d"]]:
        """Predicts v as a call does; returns also what the layers added to the tokens."""
        start, patches = self._embed(x, context, memory)
        tokens, _ = self.layers(start, context.shape[1], patches.stop, per_layer=modulation.layers)
        return self._project(tokens[:, patches], x, timestep, modulation), tokens - start

    def from_residual(
        self,
        x: Float[Array, "b f h w c"],
        *,
        timestep: Float[Array, " b"],
        context: Float[Array, "b n d"],
        memory: Float[Array, "b m h w c"] | None = None,
        residual: Float[Array, "b t d"],
        modulation: Modulation,
    ) -> Float[Array, "b f h w c"]:
        """Predicts v without the layers, with what they added in another step."""
        start, patches = self._embed(x, context, memory)
        return self._project((start + residual)[:, patches], x, timestep, modulation)

    def no_residual(self, batch: int, *, has_memory: bool = False) -> Float[Array, "b t d"]:
        """Returns zeros in the place of a residual, for the first step."""
        c = self.config
        memory = c.num_memory_tokens if has_memory else 0
        length = padded_length(c.num_context_tokens + memory + c.num_patches)
        zeros = jnp.zeros((batch, length, c.hidden_size), jnp.dtype(c.dtype))
        return constrain(zeros, "act_batch", "act_length", "act_embed")

    def _embed(
        self,
        x: Float[Array, "b f h w c"],
        context: Float[Array, "b n d"],
        memory: Float[Array, "b m h w c"] | None,
    ) -> tuple[Float[Array, "b t d"], slice]:
        """Returns the tokens (context, memory, patches, padding), and the slice of the patches."""
        c, p, g = self.config, self.config.patch_size, self.config.patch_frames
        _, f, h, w, _ = x.shape
        if f not in (g, c.latent_frames) or (h, w) != (c.latent_height, c.latent_width):
            raise ValueError(
                f"latents of {f} x {h} x {w} (frames, height, width): this transformer has "
                f"positions for {c.latent_frames} x {c.latent_height} x {c.latent_width}, "
                f"or for the first {g} of these frames"
            )
        n, positions = c.num_context_tokens, self.positions[...]
        if memory is not None:
            x = jnp.concatenate([memory.astype(x.dtype), x], axis=1)
            remembered = self.memory_positions[...]
            positions = jnp.concatenate([positions[:n], remembered, positions[n:]])
        tokens = rearrange(x, "b (f g) (h p) (w q) c -> b (f h w) (g p q c)", g=g, p=p, q=p)
        first = n if memory is None else n + c.num_memory_tokens
        tokens = jnp.concatenate([context.astype(c.dtype), self.patch_in(tokens)], axis=1)
        length = tokens.shape[1]
        tokens = tokens + positions[:length].astype(c.dtype)[None]
        tokens = jnp.pad(tokens, ((0, 0), (0, padded_length(length) - length), (0, 0)))
        return constrain(tokens, "act_batch", "act_length", "act_embed"), slice(first, length)

    def _project(
        self,
        tokens: Float[Array, "b t d"],
        x: Float[Array, "b f h w c"],
        timestep: Float[Array, " b"],
        modulation: Modulation,
    ) -> Float[Array, "b f h w c"]:
        """Converts the patch tokens after the layers to v."""
        c, p, g = self.config, self.config.patch_size, self.config.patch_frames
        _, f, h, _, _ = x.shape
        tokens = self.output_norm(self.final_norm(tokens))
        # float32 island
        shift, scale = jnp.split(modulation.output.astype(jnp.float32), 2, axis=-1)
        tokens = self.patch_out(tokens * (1 + scale[:, None]) + shift[:, None])
        pattern = "b (f h w) (g c p q) -> b (f g) (h p) (w q) c"
        y = rearrange(tokens, pattern, g=g, p=p, q=p, f=f // g, h=h // p)
        y = fusion_barrier(y)  # rearranges patches in their own number format, not in float32
        if c.output == "v":
            return y
        return diffusion.v_of_clean(diffusion.Schedule(), x, y, timestep, std=c.clean_std)
