"""The parts of a turn in PyTorch: the same weights, inputs and noise, the same number of passes.

PyTorch gets the form that suits it: the prompt already assembled and without the empty slots of a
program of fixed shapes, noise already drawn, `scaled_dot_product_attention`, no gradients.
`torch.compile` compiles the transformer, Mistral and the VAE's decoder.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from animegamer_jax.bench import torch_networks
from animegamer_jax.bench.model import Model, RandomBundle
from animegamer_jax.errors import UserError
from animegamer_jax.game import rollout
from animegamer_jax.models.latents import from_decoder
from animegamer_jax.protocol import STATE_NAMES

_MASKED = -1e30  # score of a masked position: finite, also in bfloat16

Call = Callable[[], dict[str, Tensor]]


class _Prompt(NamedTuple):
    """The tokens of one game's prompt, without empty slots."""

    ids: Int[Tensor, "1 t"]
    history_slots: Int[Tensor, " k"]
    history: Float[Tensor, "1 k r"]
    representation_slots: Int[Tensor, " n"]
    masks: dict[str, Float[Tensor, "1 1 t t"]]  # by the protocol's `states_pass`


class _State(NamedTuple):
    representation: Float[Tensor, "1 n r"]
    states: Int[Tensor, "1 4"]
    motion_value: Float[Tensor, " 1"]


class TorchModel:
    """The networks of a model in PyTorch, and its inputs.

    Args:
        model: The model in JAX.
        dtype: Number format of weights and computation.
        device: PyTorch's name of the device.

    Attributes:
        has_same_weights: Whether its weights are those of the model in JAX. A `RandomBundle` makes
            its own on the device, and so does this.

    Raises:
        UserError: The decoder has a form that diffusers' blocks do not support, or its clips see a
            memory.
    """

    def __init__(self, model: Model, *, dtype: str, device: str = "cpu"):
        self._model, self.device = model, device
        self.dtype = getattr(torch, dtype)
        self.has_same_weights = not isinstance(model.bundle, RandomBundle)
        self._dit: Any
        self._mllm: Any
        self._vae: Any
        self._unconditional = None
        if model.inputs.state.memory is not None:
            raise UserError(
                "--against torch: this decoder's clips see a memory of past first frames, which "
                "the PyTorch decoder lacks: leave out --against"
            )
        if self.has_same_weights:
            self._read_networks()
        else:
            self._make_networks()
        self._mistral = self._mllm.mistral.model
        taken = inspect.signature(type(self._mistral).forward).parameters
        self._cache_name = "cache" if "cache" in taken else "past_key_values"  # since 5.24
        self._decoder = self._vae.decoder
        self._prompt = self._make_prompt()
        self._read_inputs()

    def _read_networks(self) -> None:
        """Makes the networks with the weights of the model's bundle."""
        config: Any = self._model.bundle.config
        weights = torch_networks.released_weights(self._model.bundle)
        place = {"dtype": self.dtype, "device": self.device}
        self._dit = torch_networks.make_dit(config.dit, weights["dit"]).to(**place)
        self._mllm = torch_networks.make_mllm(config.mllm, weights["mllm"]).to(**place)
        self._vae = torch_networks.make_vae(config.vae, weights["vae"]).to(**place)
        if self._model.player.clip_guidance is not None:
            counts = config.encoder.num_text_tokens, config.encoder.num_image_tokens
            row = torch_networks.unconditional(weights["encoder"], counts)
            self._unconditional = row.to(**place)

    def _make_networks(self) -> None:
        """Makes the networks with random weights, on the device and in their number format."""
        config: Any = self._model.bundle.config
        made = torch_networks.make_random(config, dtype=self.dtype, device=self.device)
        self._dit, self._mllm, self._vae = made
        row = self._model.player.clip_guidance
        if row is not None:
            self._unconditional = torch.randn(row.shape, dtype=self.dtype, device=self.device)

    def compiled(self) -> "TorchModel":
        """Returns this model with networks that `torch.compile` compiles at their first call."""
        other = copy.copy(self)
        other._dit = torch.compile(self._dit, dynamic=False)
        other._mistral = torch.compile(self._mistral, dynamic=False)
        other._decoder = torch.compile(self._vae.decoder, dynamic=False)
        return other

    def calls(self) -> dict[str, Call]:
        """Returns the calls of a turn and its parts, by the names of the programs in JAX.

        There is no call of a whole turn that draws a picture first: CLIP is not among the networks.
        """
        parts: dict[str, Call] = {
            "mllm": lambda: _outputs(self._predict()),
            "step": self._step_call,
            "sampler": lambda: {"latents": self._sample(self._state).movedim(2, -1)},
            "vae": lambda: {"frames": self._decode(self._latents)},
            "turn": self._turn_call,
        }
        if self._model.player.protocol.picture_first:
            del parts["turn"]
        return {name: torch.inference_mode()(self._finished(part)) for name, part in parts.items()}

    def _finished(self, part: Call) -> Call:
        """Returns a call that ends when the device has done its work."""

        def call() -> dict[str, Tensor]:
            outputs = part()
            if self.device == "cuda":
                torch.cuda.synchronize()
            return outputs

        return call

    # --- inputs -----------------------------------------------------------------------------

    def _make_prompt(self) -> _Prompt:
        model, inputs = self._model, self._model.inputs
        layout, window = model.layout, inputs.window
        prompt = layout.assemble(
            jnp.concatenate([window.captions, inputs.instruction.captions[:, None]], 1),
            jnp.concatenate([window.caption_lengths, inputs.instruction.lengths[:, None]], 1),
            window.states,
            window.num_turns,
        )
        valid = np.asarray(prompt.valid)[0]
        position = np.cumsum(valid) - 1  # of a slot among those that hold a token
        history = np.flatnonzero(layout.history & valid)
        shown = valid[layout.history]
        size = window.representations.shape[-1]
        rows = np.asarray(window.representations).reshape(-1, size)[shown]
        order = np.arange(valid.sum())
        near = order[:, None] - order[None] < (self._mllm_config.sliding_window or len(order) + 1)
        causal = (order[:, None] >= order[None]) & near
        block = np.isin(order, position[layout.queries])
        masks = {"same": causal | (block[:, None] & block[None]), "causal": causal}
        return _Prompt(
            ids=self._tensor(np.asarray(prompt.ids)[:, valid].astype(np.int64)),
            history_slots=self._tensor(position[history]),
            history=self._tensor(rows[None].copy()).to(self.dtype),
            representation_slots=self._tensor(position[layout.representation]),
            masks={name: self._bias(mask) for name, mask in masks.items()},
        )

    def _bias(self, seen: np.ndarray) -> Float[Tensor, "1 1 t s"]:
        return self._tensor(np.where(seen, 0.0, _MASKED)[None, None]).to(self.dtype)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _frames_first(self, x: Any) -> Float[Tensor, "b f c h w"]:
        """Moves channels to where PyTorch has them."""
        return self._tensor(np.moveaxis(np.array(x, np.float32), -1, 2).copy())

    @property
    def _mllm_config(self) -> Any:
        config: Any = self._model.bundle.config
        return config.mllm.mistral

    def _read_inputs(self) -> None:
        inputs, networks = self._model.inputs, self._model.networks
        shape = rollout.latent_shape(networks.dit)
        steps = len(self._model.table.step)
        self._noise = [  # by step; the sampler starts from the last one, at index -1
            self._frames_first(rollout._noise(inputs.keys, jnp.asarray(i), shape))
            for i in (*range(steps), -1)
        ]
        row = int(inputs.row.step[0])
        table = self._model.table
        columns = [column for column in table.plain() if column is not None]
        self._rows = [[float(column[i]) for column in columns] for i in range(steps)]
        self._motion_scales, self._still = [1.0] * steps, 0.0
        if table.motion_guidance is not None and table.still_motion is not None:
            self._motion_scales = table.motion_guidance.tolist()
            self._still = float(table.still_motion[0])
        self._row = self._rows[row]
        self._x, self._before = map(self._frames_first, inputs.sampler[:2])
        state = [self._tensor(np.array(value)) for value in jax.tree.leaves(inputs.state)]
        self._state = _State(*state)
        self._latents = self._frames_first(inputs.latents)
        config: Any = self._model.bundle.config
        count = shape[0]
        unit = jnp.eye(count).reshape(count, count, 1, 1, 1)
        gain = np.asarray(from_decoder(unit, config.vae))[..., 0, 0, 0]
        plain = not config.vae.frequency_scales
        self._gain = float(gain[0, 0]) if plain else self._tensor(gain.copy())

    # --- calls ------------------------------------------------------------------------------

    def _step_call(self) -> dict[str, Tensor]:
        x, denoised = self._step(self._x, self._before, self._row, self._state)
        return {"latents": x.movedim(2, -1), "clean latents": denoised.movedim(2, -1)}

    def _turn_call(self) -> dict[str, Tensor]:
        state = self._predict()
        return _outputs(state) | {"frames": self._decode(self._sample(state))}

    # --- parts ------------------------------------------------------------------------------

    def _pass(self, x: Tensor, cache: DynamicCache, mask: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, start + x.shape[1], device=self.device)[None]
        return self._mistral(
            inputs_embeds=x,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_name: cache},
        ).last_hidden_state

    def _predict(self) -> _State:
        """Predicts the game state, in as many passes as the JAX code."""
        prompt, protocol = self._prompt, self._model.layout.protocol
        x = self._mllm.mistral.model.embed_tokens(prompt.ids).clone()
        x[:, prompt.history_slots] = self._mllm.input_resampler(prompt.history)
        cache = DynamicCache()
        hidden = self._pass(x, cache, prompt.masks["same"], 0)
        found = self._mllm.output_resampler(hidden[:, prompt.representation_slots])
        if protocol.states_pass == "causal":
            cache = DynamicCache()
            hidden = self._pass(x, cache, prompt.masks["causal"], 0)
        states = self._decode_states(hidden[:, -1], cache)
        level = protocol.motion_levels.index(int(states[0]))
        value = torch.tensor([protocol.motion_values[level]], device=self.device)
        return _State(found.float(), torch.tensor([states]), value)

    def _decode_states(self, last: Float[Tensor, "1 d"], cache: DynamicCache) -> list[int]:
        layout, found = self._model.layout, []
        for number, values in enumerate(layout.protocol.state_values):
            allowed = self._tensor(layout.allowed[number, : len(values)].astype(np.int64))
            best = int(self._mllm.mistral.lm_head(last)[0, allowed].float().argmax())
            found.append(values[best])
            if number == len(STATE_NAMES) - 1:
                break
            forced = layout.between[number].tolist()
            ids = torch.tensor([[int(allowed[best]), *forced]], device=self.device)
            length = cache.get_seq_length()
            mask = self._extension_mask(ids.shape[1], length)
            x = self._mllm.mistral.model.embed_tokens(ids)
            last = self._pass(x, cache, mask, length)[:, -1]
        return found

    def _extension_mask(self, count: int, length: int) -> Float[Tensor, "1 1 t s"]:
        place: Any = {"dtype": self.dtype, "device": self.device}
        mask = torch.zeros(count, length + count, **place)
        mask[:, length:] = torch.full((count, count), _MASKED, **place).triu(1)
        window = self._mllm_config.sliding_window
        if window is not None:
            order = torch.arange(length + count, device=self.device)
            back = order[length:, None] - order
            mask.masked_fill_(back >= window, _MASKED)
        return mask[None, None]

    def _step(
        self, x: Tensor, before: Tensor, row: list[float], state: _State
    ) -> tuple[Tensor, Tensor]:
        """Runs one row of the sampler's table (`diffusion.sample`)."""
        step, timestep, guidance, signal, noise_level, on_x, on_denoised, on_before, on_noise = row
        context, motion, twice = state.representation, state.motion_value, x
        without, still = self._unconditional, motion
        if (scale := self._motion_scales[int(step)]) != 1:
            without, guidance, still = context[0], scale, torch.full_like(motion, self._still)
        if without is not None:
            context = torch.cat([without[None].to(self.dtype), context.to(self.dtype)])
            motion, twice = torch.cat([still, motion]), torch.cat([x, x])
        times = torch.full((len(twice),), timestep, device=self.device)
        v = self._dit(twice, times, motion, context)
        if without is not None:
            without, v = v.chunk(2)
            v = without + guidance * (v - without)
        denoised = signal * x - noise_level * v
        x = on_x * x + on_denoised * denoised + on_before * before
        return x + on_noise * self._noise[int(step)], denoised

    def _sample(self, state: _State) -> Tensor:
        x = self._noise[-1]
        before = torch.zeros_like(x)
        for row in self._rows:
            x, before = self._step(x, before, row, state)
        return x

    def _decode(self, latents: Float[Tensor, "b f c h w"]) -> Tensor:
        """Decodes frames, uint8 [b f h w 3]."""
        if isinstance(self._gain, float):
            latents = latents * self._gain
        else:
            latents = torch.einsum("ef,bechw->bfchw", self._gain, latents)
        self._vae.decoder = self._decoder
        frames = self._vae.decode(latents.transpose(1, 2).to(self.dtype)).sample
        levels = ((frames.float() + 1) * 0.5).clamp(0, 1) * 255
        return levels.round().to(torch.uint8).permute(0, 2, 3, 4, 1)


def _outputs(state: _State) -> dict[str, Tensor]:
    return {"representation": state.representation, "states": state.states}
