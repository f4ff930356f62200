"""The networks and inputs to time: a bundle, or random weights of a middle size."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from animegamer_jax.bundle.bundle import (
    Bundle,
    BundleWriter,
    NetworkName,
    abstract_params,
)
from animegamer_jax.bundle.embedded import ASSETS, model_folder
from animegamer_jax.configs import (
    DiTConfig,
    Dtype,
    MistralConfig,
    MLLMConfig,
    ModelConfig,
    NetworkConfig,
    ShotEncoderConfig,
    VAEConfig,
)
from animegamer_jax.diffusion import SamplerState, SamplerTable
from animegamer_jax.game import rollout
from animegamer_jax.game.instructions import parse_instructions
from animegamer_jax.game.player import Player
from animegamer_jax.protocol import PAPER
from animegamer_jax.tokenizer import write_word_tokenizer

_PLAYING: tuple[NetworkName, ...] = ("mllm", "encoder", "dit", "vae")
_NUM_QUERIES = 80


def make_middle() -> ModelConfig:
    """Returns a size between the embedded and the released one, in the released form.

    17 frames of 128 x 192 (5 latent frames of 32 x 48); the transformer predicts v with guidance
    and has 1,920 patch tokens and 80 context tokens.
    """
    width = 480
    return ModelConfig(
        mllm=MLLMConfig(
            mistral=MistralConfig(
                vocab_size=0,  # set from the tokenizer
                hidden_size=512,
                intermediate_size=1408,
                num_hidden_layers=8,
                num_attention_heads=8,
                num_key_value_heads=2,
                head_dim=64,
                lora=None,
            ),
            num_queries=_NUM_QUERIES,
            representation_size=width,
        ),
        encoder=ShotEncoderConfig(
            num_text_tokens=16,
            num_image_tokens=_NUM_QUERIES - 16,
            text_size=512,
            image_size=256,
            representation_size=width,
        ),
        dit=DiTConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_layers=8,
            num_attention_heads=10,
            latent_frames=5,
            latent_height=32,
            latent_width=48,
            num_context_tokens=_NUM_QUERIES,
            time_embed_size=256,
            lora=None,
        ),
        vae=VAEConfig(channels=32, multipliers=(1, 2, 4)),
    )


def _random_leaves(
    name: NetworkName, config: NetworkConfig
) -> Iterator[tuple[str, Float[np.ndarray, "..."]]]:
    """Yields the same random values every time; scales are near one, biases near zero."""
    random = np.random.default_rng(0)
    for path, leaf in abstract_params(name, config).items():
        fan_in = np.prod(leaf.shape[:-1] if name == "vae" else leaf.shape[-2:-1])
        value = random.normal(size=leaf.shape) * (fan_in**-0.5 if leaf.ndim > 1 else 0.1)
        yield path, (value + path.endswith("scale")).astype(np.float32)


def write_random(folder: Path, config: ModelConfig, *, name: str) -> Bundle:
    """Writes a bundle with random weights, the embedded model's words and the paper's protocol."""
    assert config.mllm is not None
    tokenizer = folder / "tokenizer"
    count = config.mllm.num_queries
    size = write_word_tokenizer(tokenizer, _embedded_words(), num_frame_tokens=count)
    mistral = dataclasses.replace(config.mllm.mistral, vocab_size=size)
    config = dataclasses.replace(config, mllm=dataclasses.replace(config.mllm, mistral=mistral))
    with BundleWriter(folder / "model", name=name, protocol=PAPER) as writer:
        for network in _PLAYING:
            size = getattr(config, network)
            writer.write_network(network, size, _random_leaves(network, size))
        writer.write_tokenizer(tokenizer)
    return Bundle.open(folder / "model")


def _embedded_words() -> list[str]:
    file = ASSETS / "toy" / "tokenizer" / "tokenizer.json"
    return [word for word in json.loads(file.read_text())["model"]["vocab"] if word.isalpha()]


class Inputs(NamedTuple):
    """One turn of one game with a full window: the inputs of all its parts."""

    window: rollout.Window
    instruction: rollout.Instruction
    games: Key[Array, " g"]
    turn: Int[Array, ""]
    keys: Key[Array, " g"]
    state: rollout.GameState
    sampler: SamplerState
    row: SamplerTable
    latents: Float[Array, "g f h w c"]


class _PastTurn(NamedTuple):
    instruction: str
    representation: Float[np.ndarray, "n r"]
    states: Int[np.ndarray, " 4"]


class Model:
    """The networks of a bundle, ready to play, and the inputs of all programs.

    Args:
        bundle: The bundle that has them.
        dtype: Number format of weights and computation; the bundle's own if None.
        window: Turns of context; the protocol's if None.
        steps: Denoising steps; the protocol's if None.
    """

    def __init__(
        self, bundle: Bundle, *, dtype: Dtype | None, window: int | None, steps: int | None
    ) -> None:
        self.bundle = bundle
        self.player = Player.from_bundle(bundle, window=window, steps=steps, dtype=dtype)
        self.networks = self.player.networks
        self.table = self.player.table
        self.layout = self.player.layout
        self.inputs = self._make_inputs()

    @property
    def num_rows(self) -> int:
        """Number of rows of a denoising step: two with guidance."""
        return 1 if self.networks.unconditional is None else 2

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the transformer attends to."""
        dit = self.networks.dit.config
        return dit.num_context_tokens + dit.num_patches

    def _make_inputs(self) -> Inputs:
        player, protocol = self.player, self.player.protocol
        random = np.random.default_rng(1)

        def normal(*shape: int) -> Float[np.ndarray, "..."]:
            return random.normal(size=shape).astype(np.float32)

        file = ASSETS / "instructions" / "toy.txt"
        lines = [line.text for line in parse_instructions(file.read_bytes(), file.name)]
        c = self.networks.mllm.config
        count = player.window
        texts = [lines[number % len(lines)] for number in range(count)]
        states = np.array([values[-1] for values in protocol.state_values], np.int32)
        turns = [
            _PastTurn(text, normal(c.num_queries, c.representation_size), states)
            for text in texts[:-1]
        ]
        games = rollout.game_keys([0])
        turn = jnp.asarray(count, jnp.int32)
        shape = (1, *rollout.latent_shape(self.networks.dit))
        motion = protocol.motion_values[len(protocol.motion_values) // 2]
        middle = player.steps // 2
        sampler = SamplerState(
            jnp.asarray(normal(*shape)),
            jnp.asarray(normal(*shape)),
            jnp.full((1,), -1, jnp.int32),
        )
        return Inputs(
            window=player.restore([turns]),
            instruction=player.read(texts[-1:]),
            games=games,
            turn=turn,
            keys=rollout.turn_keys(games, turn),
            state=rollout.GameState(
                jnp.asarray(normal(1, c.num_queries, c.representation_size)),
                jnp.asarray(states[None]),
                jnp.full((1,), motion, jnp.float32),
            ),
            sampler=sampler,
            row=SamplerTable(*(column[middle : middle + 1] for column in self.table)),
            latents=jnp.asarray(normal(*shape)),
        )


def open_model(model: str, folder: Path) -> Bundle:
    """Opens a bundle by its folder or the name `toy`; writes `middle` to `folder` first."""
    if model == "middle":
        return write_random(folder, make_middle(), name="middle")
    return Bundle.open(model_folder(model))
