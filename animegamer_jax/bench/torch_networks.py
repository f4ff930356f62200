"""The networks in PyTorch: diffusers' CogVideoX blocks and VAE, transformers' Mistral.

Weights are named as `animegamer export` names them. The motion input, the given position table,
the output of clean latents and the two resamplers are not in these libraries and are written here.
"""

import re
from collections.abc import Mapping
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from diffusers.models.normalization import AdaLayerNorm
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock
from jaxtyping import Float
from torch import Tensor, nn

from animegamer_jax.bench.model import PLAYING
from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.configs import (
    DiTConfig,
    MistralConfig,
    MLLMConfig,
    ModelConfig,
    VAEConfig,
)
from animegamer_jax.convert import rules as tables
from animegamer_jax.convert.export import MISTRAL_FIELDS
from animegamer_jax.convert.networks import lora_of, table_of
from animegamer_jax.diffusion import Schedule
from animegamer_jax.errors import UserError

State = dict[str, Tensor]

diffusers.utils.logging.set_verbosity_error()  # it warns about a cast without effect


# --- weights --------------------------------------------------------------------------------


def released_weights(bundle: Bundle) -> dict[NetworkName, State]:
    """Returns the weights of a turn's networks under their released names."""
    return {name: _read(bundle, name) for name in PLAYING}


def _read(bundle: Bundle, name: NetworkName) -> State:
    config: Any = getattr(bundle.config, name)
    table, stored = table_of(name).rules(config), bundle.leaves(name)
    order = [rule.target for rule in table if rule.target in stored]
    leaves = dict(bundle.read_in_order(name, order))
    tensors = tables.export(table, leaves.__getitem__, stored)
    return {key: torch.from_numpy(np.array(value, np.float32, order="C")) for key, value in tensors}


def _merged(weights: State, name: str, *, scale: float) -> Tensor:
    """Returns a matrix of the decoder or the language model, with its low-rank update added."""
    if f"{name}.weight" in weights:
        return weights[f"{name}.weight"]
    if f"{name}.original.weight" in weights:  # SwissArmyTransformer's: one update a part
        base, parts = weights[f"{name}.original.weight"], []
        while f"{name}.matrix_A.{len(parts)}" in weights:
            a, b = (weights[f"{name}.matrix_{side}.{len(parts)}"] for side in "AB")
            parts.append(b @ a)
        return base + scale * torch.cat(parts)
    a, b = (weights[f"{name}.lora_{side}.default.weight"] for side in "AB")
    return weights[f"{name}.base_layer.weight"] + scale * (b @ a)


def _fill(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads all of a module's parameters, and nothing else."""
    module.load_state_dict(dict(state), strict=True)
    module.eval().requires_grad_(False)


def _layer(weights: State, source: str, target: str) -> State:
    return {f"{target}.{kind}": weights[f"{source}.{kind}"] for kind in ("weight", "bias")}


# --- decoder --------------------------------------------------------------------------------


class TorchDiT(nn.Module):
    """The decoder, made of diffusers' blocks."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        c = self.config = config
        width, emb = c.hidden_size, c.time_embed_size
        patch = c.patch_size**2 * c.latent_channels
        self.sinusoid = Timesteps(width, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.time = TimestepEmbedding(width, emb)
        self.motion = TimestepEmbedding(width, emb)
        self.patch_in = nn.Conv2d(c.latent_channels, width, c.patch_size, stride=c.patch_size)
        self.positions = nn.Parameter(torch.empty(1, c.num_context_tokens + c.num_patches, width))
        self.blocks = nn.ModuleList(
            CogVideoXBlock(
                dim=width,
                num_attention_heads=c.num_attention_heads,
                attention_head_dim=width // c.num_attention_heads,
                time_embed_dim=emb,
                norm_eps=c.layer_norm_eps,
                ff_inner_dim=c.intermediate_size,
                attention_bias=True,
            )
            for _ in range(c.num_layers)
        )
        self.final_norm = nn.LayerNorm(width, eps=c.layer_norm_eps)
        self.output_norm = AdaLayerNorm(
            embedding_dim=emb,
            output_dim=2 * width,
            norm_elementwise_affine=True,
            norm_eps=1e-6,
            chunk_dim=1,
        )
        self.patch_out = nn.Linear(width, patch)
        levels = Schedule().signal_levels()
        self.register_buffer("levels", torch.tensor(levels), persistent=False)

    def forward(
        self,
        x: Float[Tensor, "b f c h w"],
        timestep: Float[Tensor, " b"],
        motion: Float[Tensor, " b"],
        context: Float[Tensor, "b n d"],
    ) -> Float[Tensor, "b f c h w"]:
        """Predicts v of noised latents; float32."""
        c, dtype = self.config, self.patch_out.weight.dtype
        b, f, channels, h, w = x.shape
        emb = self.time(self.sinusoid(timestep).to(dtype))
        emb = emb + self.motion(self.sinusoid(motion).to(dtype))
        patches = self.patch_in(x.to(dtype).flatten(0, 1)).flatten(2).transpose(1, 2)
        patches = patches.reshape(b, -1, c.hidden_size)
        count = c.num_context_tokens
        context = context.to(dtype) + self.positions[:, :count]
        patches = patches + self.positions[:, count:]
        for block in self.blocks:
            patches, context = block(patches, context, emb)
        y = self.patch_out(self.output_norm(self.final_norm(patches), temb=emb))
        p = c.patch_size
        y = y.reshape(b, f, h // p, w // p, channels, p, p).permute(0, 1, 4, 2, 5, 3, 6)
        y = y.reshape(x.shape).float()
        return y if c.output == "v" else self._v_of_clean(x, y, timestep)

    def _v_of_clean(self, x: Tensor, clean: Tensor, timestep: Tensor) -> Tensor:
        """Does what `diffusion.v_of_clean` does."""
        signal = self.get_buffer("levels")[timestep.round().long()].reshape(-1, 1, 1, 1, 1)
        noise = (1 - signal**2).sqrt()
        signal, noise, std = signal.float(), noise.float(), self.config.clean_std
        spread = signal**2 * std**2 + noise**2
        return noise * (signal * (1 - std**2) * x - clean) / spread


def make_dit(config: DiTConfig, weights: State) -> TorchDiT:
    """Makes the decoder from weights with the released names.

    Raises:
        UserError: Its patches span several frames, which the released form does not support.
    """
    if config.patch_frames != 1:
        raise UserError(
            f"--against torch: patches of {config.patch_frames} frames: expected patches of one, "
            "as in diffusers' transformer: leave out --against"
        )
    lora = lora_of("dit", config)
    scale = lora.scale if lora else 0.0
    adaln = "mixins.adaln_layer."
    state = {
        "positions": weights["mixins.pos_embed.pos_embedding"],
        **_layer(weights, "mixins.patch_embed.proj", "patch_in"),
        **_layer(weights, "transformer.final_layernorm", "final_norm"),
        **_layer(weights, "mixins.final_layer.norm_final", "output_norm.norm"),
        **_layer(weights, "mixins.final_layer.adaLN_modulation.1", "output_norm.linear"),
        **_layer(weights, "mixins.final_layer.linear", "patch_out"),
    }
    for source, target in (("time_embed", "time"), ("flow_embed", "motion")):
        state |= _layer(weights, f"{source}.0", f"{target}.linear_1")
        state |= _layer(weights, f"{source}.2", f"{target}.linear_2")
    for i in range(config.num_layers):
        ours, theirs = f"transformer.layers.{i}.", f"blocks.{i}."
        attention = f"{ours}attention."
        for kind in ("weight", "bias"):
            vectors = weights[f"{adaln}adaLN_modulations.{i}.1.{kind}"].chunk(4)
            # Released order: attention and MLP of patches, then of context. Diffusers groups by
            # attention and MLP.
            state[f"{theirs}norm1.linear.{kind}"] = torch.cat([vectors[0], vectors[2]])
            state[f"{theirs}norm2.linear.{kind}"] = torch.cat([vectors[1], vectors[3]])
        fused = _merged(weights, f"{attention}query_key_value", scale=scale)
        bias = _bias(weights, f"{attention}query_key_value")
        for part, matrix, vector in zip("qkv", fused.chunk(3), bias.chunk(3), strict=True):
            state[f"{theirs}attn1.to_{part}.weight"] = matrix
            state[f"{theirs}attn1.to_{part}.bias"] = vector
        out = f"{attention}dense"
        state[f"{theirs}attn1.to_out.0.weight"] = _merged(weights, out, scale=scale)
        state[f"{theirs}attn1.to_out.0.bias"] = _bias(weights, out)
        for source, target in (
            (f"{ours}input_layernorm", "norm1.norm"),
            (f"{ours}post_attention_layernorm", "norm2.norm"),
            (f"{adaln}query_layernorm_list.{i}", "attn1.norm_q"),
            (f"{adaln}key_layernorm_list.{i}", "attn1.norm_k"),
            (f"{ours}mlp.dense_h_to_4h", "ff.net.0.proj"),
            (f"{ours}mlp.dense_4h_to_h", "ff.net.2"),
        ):
            state |= _layer(weights, source, f"{theirs}{target}")
    dit = TorchDiT(config)
    _fill(dit, state)
    return dit


def _bias(weights: State, name: str) -> Tensor:
    plain = f"{name}.bias"
    return weights[plain if plain in weights else f"{name}.original.bias"]


def unconditional(weights: State, counts: tuple[int, int]) -> Float[Tensor, "n d"]:
    """Computes E_a of zeros, guidance's unconditional context. `counts`: text, image tokens."""
    home, rows = "mixins.patch_embed.", []
    for source, norm, count in zip(("text_proj", "ip_proj"), ("txt", "ip"), counts, strict=True):
        inside = weights[f"{home}{source}.0.bias"]
        matrix, bias = (weights[f"{home}{source}.2.{kind}"] for kind in ("weight", "bias"))
        y = nn.functional.gelu(inside) @ matrix.T + bias
        scale, shift = (
            weights[f"{home}{norm}_mix_layer_norm.{kind}"] for kind in ("weight", "bias")
        )
        rows.append(nn.functional.layer_norm(y, y.shape, scale, shift).expand(count, -1))
    return torch.cat(rows)


# --- random weights ---------------------------------------------------------------------------


def make_random(
    config: ModelConfig, *, dtype: torch.dtype, device: str
) -> tuple[TorchDiT, "TorchMLLM", Any]:
    """Makes decoder, language model and VAE with random weights, on the device they stay on."""
    assert config.dit is not None
    assert config.mllm is not None
    assert config.vae is not None
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            made = TorchDiT(config.dit), TorchMLLM(config.mllm), empty_vae(config.vae)
    finally:
        torch.set_default_dtype(before)
    for network in made:
        network.eval().requires_grad_(False)
        for name, parameter in network.named_parameters():
            fan_in = parameter[0].numel()
            if parameter.ndim > 1:
                parameter.normal_(std=fan_in**-0.5)
            else:
                parameter.fill_(float(name.endswith("weight")))
    return made


# --- VAE ------------------------------------------------------------------------------------


def _released_name(name: str, num_levels: int) -> str:
    """Converts diffusers' name to the released one, which counts decoder levels from the finest."""

    def level(match: re.Match[str]) -> str:
        return f"up.{num_levels - 1 - int(match[1])}"

    name = re.sub(r"up_blocks\.(\d+)", level, name).replace("down_blocks", "down")
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda match: f"mid.block_{int(match[1]) + 1}", name)
    name = re.sub(r"(down|up)samplers\.0", r"\1sample", name)
    return name.replace("resnets", "block").replace("conv_shortcut", "nin_shortcut")


def empty_vae(config: VAEConfig) -> Any:
    """Makes diffusers' `AutoencoderKLCogVideoX` of a size, with the weights that it starts with."""
    levels = len(config.multipliers)
    make: Any = diffusers.AutoencoderKLCogVideoX  # its annotations allow tuples of length one only
    return make(
        in_channels=config.image_channels,
        out_channels=config.image_channels,
        down_block_types=("CogVideoXDownBlock3D",) * levels,
        up_block_types=("CogVideoXUpBlock3D",) * levels,
        block_out_channels=tuple(config.channels * m for m in config.multipliers),
        latent_channels=config.latent_channels,
        layers_per_block=config.num_res_blocks,
        norm_num_groups=config.norm_groups,
        temporal_compression_ratio=config.temporal_compression,
    )


def make_vae(config: VAEConfig, weights: State) -> Any:
    """Makes the VAE from weights with the released names.

    diffusers' kernels have three planes; those of one plane get zeros for the frames before.
    """
    levels, vae, state = len(config.multipliers), empty_vae(config), {}
    for name, empty in vae.state_dict().items():
        weight = weights[_released_name(name, levels)]
        if empty.ndim == 5:
            past = empty.shape[2] - weight.shape[2]
            weight = nn.functional.pad(weight, (0, 0, 0, 0, past, 0))
        state[name] = weight
    _fill(vae, state)
    return vae


# --- language model -------------------------------------------------------------------------


class _RoundedRotary(nn.Module):
    """Rounds rotary tables to a checkpoint's number format, as the released code does."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.inner(x.float(), position_ids=position_ids)
        return cos.to(self.dtype).to(x.dtype), sin.to(self.dtype).to(x.dtype)


class TorchMLLM(nn.Module):
    """Mistral of transformers between the two resamplers."""

    def __init__(self, config: MLLMConfig):
        super().__init__()
        m, size = config.mistral, config.representation_size
        self.mistral = transformers.MistralForCausalLM(_mistral_config(m))
        if m.rotary_dtype != "float32":
            model: Any = self.mistral.model
            model.rotary_emb = _RoundedRotary(model.rotary_emb, getattr(torch, m.rotary_dtype))
        self.input_resampler = _resampler(size, m.hidden_size)
        self.output_resampler = _resampler(m.hidden_size, size)


def _mistral_config(m: MistralConfig) -> Any:
    make: Any = transformers.MistralConfig  # some of its fields are not annotated
    same = {name: getattr(m, name) for name in ("vocab_size", *MISTRAL_FIELDS)}
    # The caller's mask includes the sliding window.
    return make(**{**same, "sliding_window": None}, attn_implementation="sdpa")


def _resampler(size: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, out), nn.GELU(), nn.Linear(out, out))


def make_mllm(config: MLLMConfig, weights: State) -> TorchMLLM:
    """Makes the language model from weights with the released names."""
    lora = lora_of("mllm", config)
    scale, agent = lora.scale if lora else 0.0, "llm.base_model.model."
    mllm, state = TorchMLLM(config), {}
    for name in mllm.state_dict():
        if not name.startswith("mistral."):
            resampler, rest = name.split(".", 1)
            state[name] = weights[f"{resampler}.proj.{rest}"]
            continue
        source = agent + name.removeprefix("mistral.").removesuffix(".weight")
        trained = f"{source}.modules_to_save.default.weight"
        state[name] = (
            weights[trained] if trained in weights else _merged(weights, source, scale=scale)
        )
    _fill(mllm, state)
    return mllm
