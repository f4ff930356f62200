"""Sizes of the networks: frozen dataclasses, and the named sizes `full` and `toy`.

`full` is the released model: CogVideoX-2B, Mistral-7B, T5-v1.1-XXL, OpenCLIP ViT-B/16 and the
3D VAE of CogVideoX (paper, section 3 and 4.1; names and shapes as in the released files). `toy` has
the same networks at sizes that can be trained and played on two CPU cores. Field names follow
Hugging Face's configuration of the network if there is one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

from annotated_types import Interval

Dtype = Literal["float32", "bfloat16", "float16"]
Remat = Literal["none", "full", "dots"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Fields of every network's configuration.

    Softmax, norms, modulation, timestep embedding and rotary angles are always in float32.

    Attributes:
        dtype: Number format of activations and matrix products.
        param_dtype: Number format of the stored weights.
        remat: Activations that are saved for the backward pass: "none": all; "full": only the
            layers' inputs; "dots": also the results of matrix products.
    """

    dtype: Dtype = "float32"
    param_dtype: Dtype = "float32"
    remat: Remat = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """A low-rank update `x A B * alpha / rank` that is added to a frozen linear layer."""

    rank: Annotated[int, Interval(ge=1, le=1 << 16)]
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(NetworkConfig):
    """The decoder-only language model (Mistral-7B-Instruct-v0.1 with an enlarged vocabulary).

    `rotary_dtype` is the format to which the rotary cosines and sines are rounded. The released
    code keeps these tables in the checkpoint's format even if it computes in float32.
    """

    vocab_size: int = 32_284
    hidden_size: int = 4096
    intermediate_size: int = 14_336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    sliding_window: int | None = 4096
    rotary_dtype: Dtype = "float32"
    lora: LoRAConfig | None = LoRAConfig(rank=32, alpha=32.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLLMConfig(NetworkConfig):
    """The language model, with resamplers to and from shot representations."""

    mistral: MistralConfig = MistralConfig()
    num_queries: int = 226
    representation_size: int = 1920


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShotEncoderConfig(NetworkConfig):
    """E_a, from text features and first-frame features to a shot representation."""

    num_text_tokens: int = 30
    num_image_tokens: int = 196
    text_size: int = 4096
    image_size: int = 768
    representation_size: int = 1920

    @property
    def num_tokens(self) -> int:
        return self.num_text_tokens + self.num_image_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiTConfig(NetworkConfig):
    """The 3D-attention diffusion transformer (CogVideoX-2B with a motion input).

    `latent_frames`, `latent_height` and `latent_width` are the size of the position table, in
    latents. A patch is `patch_frames` x `patch_size` x `patch_size` latents. The last layer's
    `output` is v, or an estimate of the clean latents with an error of `clean_std`, from which v is
    computed (`diffusion.v_of_clean`), because a small network is too narrow for the noise of a
    large patch (docs/decisions/training-the-toy.md). With a `context_grid` the last rows x columns
    context tokens are those of a picture and have positions over the first frame; without one, no
    context token has a position. With a `memory`, the decoder can also be given the first frames of
    that many past clips: their latents, without noise, as frames before the first (ours).
    """

    hidden_size: int = 1920
    intermediate_size: int = 7680
    num_layers: int = 30
    num_attention_heads: int = 30
    patch_size: int = 2
    patch_frames: int = 1
    output: Literal["v", "clean"] = "v"
    clean_std: float = 0.0
    latent_channels: int = 16
    latent_frames: int = 5
    latent_height: int = 60
    latent_width: int = 90
    num_context_tokens: int = 226
    context_grid: tuple[int, int] | None = None
    memory: int = dataclasses.field(default=0, metadata={"omit_default": True})
    time_embed_size: int = 512
    spatial_interpolation: float = 1.875
    layer_norm_eps: float = 1e-5
    lora: LoRAConfig | None = LoRAConfig(rank=64, alpha=1.0)

    @property
    def memory_shape(self) -> tuple[int, int, int, int] | None:
        """Clips, height, width and channels of a game's memory; None without one."""
        return None if self.first_shape is None else (self.memory, *self.first_shape)

    @property
    def first_shape(self) -> tuple[int, int, int] | None:
        """Height, width and channels of a clip's first latents; None without a memory."""
        if not self.memory:
            return None
        return self.latent_height, self.latent_width, self.latent_channels

    @property
    def num_memory_tokens(self) -> int:
        """Number of the memory's patch tokens; they come before those of the clip."""
        return self.memory * self._patches_of_frame

    @property
    def num_patches(self) -> int:
        """Number of a clip's patch tokens, without those of the memory."""
        return self.latent_frames // self.patch_frames * self._patches_of_frame

    @property
    def _patches_of_frame(self) -> int:
        return (self.latent_height // self.patch_size) * (self.latent_width // self.patch_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VAEConfig(NetworkConfig):
    """The causal 3D VAE.

    A level has `channels` times its multiplier channels; the finest level comes first. The decoder
    receives latents times `scaling_factor`. If there are `frequency_scales`, one per latent frame,
    each cosine frequency over time is multiplied by its scale as well (`latents.to_decoder`;
    docs/decisions/training-the-toy.md); the released VAE has none. A causal kernel sees
    `kernel_frames` frames, this one and those before it; with one frame the VAE is an autoencoder
    of pictures.
    """

    channels: int = 128
    multipliers: tuple[int, ...] = (1, 2, 2, 4)
    num_res_blocks: int = 3
    latent_channels: int = 16
    image_channels: int = 3
    temporal_compression: int = 4
    kernel_frames: int = dataclasses.field(default=3, metadata={"omit_default": True})
    norm_groups: int = 32
    scaling_factor: float = 1.15258426
    frequency_scales: tuple[float, ...] = ()

    @property
    def spatial_compression(self) -> int:
        return 2 ** (len(self.multipliers) - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPConfig(NetworkConfig):
    """The two towers of OpenCLIP."""

    image_size: int = 224
    patch_size: int = 16
    vision_width: int = 768
    vision_layers: int = 12
    vision_heads: int = 12
    text_width: int = 512
    text_layers: int = 12
    text_heads: int = 8
    vocab_size: int = 49_408
    context_length: int = 77
    embed_size: int = 512
    mlp_ratio: float = 4.0

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(NetworkConfig):
    """The encoder of T5 v1.1 (gated GELU, no biases)."""

    vocab_size: int = 32_128
    d_model: int = 4096
    d_kv: int = 64
    d_ff: int = 10_240
    num_layers: int = 24
    num_heads: int = 64
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6


NetworkName = Literal["mllm", "encoder", "dit", "vae", "clip", "t5", "picture"]
"""The networks of a model, the fields of `ModelConfig`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The networks of one AnimeGamer model; None for a network that it lacks.

    The first four are needed to play, `clip` and `t5` also to train and for players' pictures.
    `picture` is a decoder that only draws the picture that comes first (`Protocol.picture_first`;
    ours); without one, `dit` draws it too.
    """

    mllm: MLLMConfig | None = None
    encoder: ShotEncoderConfig | None = None
    dit: DiTConfig | None = None
    vae: VAEConfig | None = None
    clip: CLIPConfig | None = None
    t5: T5Config | None = None
    picture: DiTConfig | None = dataclasses.field(default=None, metadata={"omit_default": True})

    @property
    def first_dit(self) -> DiTConfig | None:
        """The decoder that runs first in a turn; only this one sees the memory."""
        return self.dit if self.picture is None else self.picture


# Sizes that several networks of a model share, and the field of each network.
_SHARED_SIZES = {
    "representation size": {
        "mllm": "representation_size",
        "encoder": "representation_size",
        "dit": "hidden_size",
        "picture": "hidden_size",
    },
    "representation tokens": {
        "mllm": "num_queries",
        "encoder": "num_tokens",
        "dit": "num_context_tokens",
        "picture": "num_context_tokens",
    },
    "latent channels": {
        "dit": "latent_channels",
        "vae": "latent_channels",
        "picture": "latent_channels",
    },
    "latent height": {"dit": "latent_height", "picture": "latent_height"},
    "latent width": {"dit": "latent_width", "picture": "latent_width"},
    "frames of a patch": {"dit": "patch_frames", "picture": "patch_frames"},
}
# The same, of the features that the shot encoder reads.
_FEATURE_SIZES = {
    "image tokens": {"encoder": "num_image_tokens", "clip": "num_patches"},
    "width of image features": {"encoder": "image_size", "clip": "vision_width"},
    "width of text features": {"encoder": "text_size", "t5": "d_model"},
}


def disagreements(config: ModelConfig) -> dict[str, str]:
    """Returns the shared sizes that differ between networks, each with the networks' values."""
    return {
        size: ", ".join(f"{name} {value}" for name, value in found.items())
        for size, found in _differing(config, _SHARED_SIZES).items()
    }


def feature_disagreements(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns sizes of features that differ: what the encoder reads, and what CLIP or T5 make."""
    found = _differing(config, _FEATURE_SIZES)
    pairs = ((size, tuple(values.values())) for size, values in found.items())
    return {size: (read, made) for size, (read, made) in pairs}


def _differing(
    config: ModelConfig, sizes: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, int]]:
    found = {}
    for size, fields in sizes.items():
        networks = {name: getattr(config, name) for name in fields}
        values = {n: getattr(c, fields[n]) for n, c in networks.items() if c is not None}
        if len(set(values.values())) > 1:
            found[size] = values
    return found


def clip_size(dit: DiTConfig, vae: VAEConfig) -> tuple[int, int, int]:
    """Returns frames, rows and columns of the clips that the two networks make."""
    frames = 1 + (dit.latent_frames - 1) * vae.temporal_compression
    space = vae.spatial_compression
    return frames, dit.latent_height * space, dit.latent_width * space


def make_full() -> ModelConfig:
    """Returns the released sizes, with exactly the tensors of the released files."""
    return ModelConfig(
        mllm=MLLMConfig(),
        encoder=ShotEncoderConfig(),
        dit=DiTConfig(),
        vae=VAEConfig(),
        clip=CLIPConfig(text_layers=0),  # the released file holds the image tower only
        t5=T5Config(),
    )


def make_toy() -> ModelConfig:
    """Returns the sizes of the toy: 17 frames of 96 x 144, and 9 latent frames of 12 x 18.

    Every drawing has its own latent frame, and a patch of the transformer is 2 x 2 latents of one
    (docs/decisions/training-the-toy.md). There are no low-rank updates, because there are no
    pre-trained weights. Vocabularies get the tokenizer's size when weights are made.
    """
    width, vocab_size = 256, 512
    return ModelConfig(
        mllm=MLLMConfig(
            mistral=MistralConfig(
                vocab_size=vocab_size,
                hidden_size=256,
                intermediate_size=640,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=64,
                lora=None,
            ),
            num_queries=44,
            representation_size=width,
        ),
        encoder=ShotEncoderConfig(
            num_text_tokens=8,
            num_image_tokens=36,
            text_size=96,
            image_size=192,
            representation_size=width,
        ),
        dit=DiTConfig(
            hidden_size=width,
            intermediate_size=3 * width,
            num_layers=6,
            num_attention_heads=4,
            patch_size=2,
            output="clean",
            clean_std=0.05,
            latent_channels=24,
            latent_frames=9,
            latent_height=12,
            latent_width=18,
            num_context_tokens=44,
            context_grid=(6, 6),
            time_embed_size=64,
            spatial_interpolation=1.0,
            lora=None,
        ),
        vae=VAEConfig(
            channels=8,
            multipliers=(1, 3, 6, 8),
            num_res_blocks=1,
            latent_channels=24,
            temporal_compression=2,
            kernel_frames=1,
            norm_groups=4,
            scaling_factor=1.0,
        ),
        clip=CLIPConfig(
            image_size=96,
            patch_size=16,
            vision_width=192,
            vision_layers=4,
            vision_heads=4,
            text_width=96,
            text_layers=2,
            text_heads=4,
            vocab_size=vocab_size,
            context_length=32,
            embed_size=96,
        ),
        t5=T5Config(
            vocab_size=vocab_size, d_model=96, d_kv=24, d_ff=192, num_layers=2, num_heads=4
        ),
    )


SIZES = {"full": make_full, "toy": make_toy}
