"""The networks and inputs to time: a bundle, or random weights of the middle or released size."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Key

from animegamer_jax.bundle.bundle import (
    Bundle,
    BundleWriter,
    NetworkName,
    abstract_network,
    abstract_params,
    flat_params,
)
from animegamer_jax.bundle.config import BundleConfig, with_dtypes
from animegamer_jax.bundle.embedded import ASSETS
from animegamer_jax.bundle.vocabulary import TOKENIZER_FOLDER
from animegamer_jax.configs import (
    DiTConfig,
    Dtype,
    MistralConfig,
    MLLMConfig,
    ModelConfig,
    NetworkConfig,
    ShotEncoderConfig,
    VAEConfig,
    make_full,
)
from animegamer_jax.diffusion import SamplerState, SamplerTable
from animegamer_jax.game import rollout
from animegamer_jax.game.instructions import parse_instructions
from animegamer_jax.game.player import Player
from animegamer_jax.game.saved.turns import TurnRecord
from animegamer_jax.protocol import PAPER, RELEASED, Protocol
from animegamer_jax.tokenizer import write_word_tokenizer

PLAYING: tuple[NetworkName, ...] = ("mllm", "encoder", "dit", "vae")
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


def random_leaves(
    name: NetworkName, config: NetworkConfig, seed: int = 0
) -> Iterator[tuple[str, Float[np.ndarray, "..."]]]:
    """Yields random values for every parameter of a network, without compiling anything.

    Scales are near one and everything else is small and not zero, so that no zero or one hides a
    mistake.
    """
    random = np.random.default_rng(seed)
    for path, leaf in abstract_params(name, config).items():
        fan_in = np.prod(leaf.shape[:-1] if name == "vae" else leaf.shape[-2:-1])
        value = random.normal(size=leaf.shape) * (fan_in**-0.5 if leaf.ndim > 1 else 0.1)
        yield path, (value + path.endswith("scale")).astype(np.float32)


def write_random(
    path: Path,
    config: ModelConfig,
    *,
    name: str,
    protocol: Protocol = PAPER,
    tokenizer: Path,
    vocab_size: int,
    seed: int = 0,
) -> Path:
    """Writes a bundle of random weights with a tokenizer and its vocabulary size.

    It has the networks that play by the protocol.
    """
    assert config.mllm is not None
    mistral = dataclasses.replace(config.mllm.mistral, vocab_size=vocab_size)
    config = dataclasses.replace(config, mllm=dataclasses.replace(config.mllm, mistral=mistral))
    with BundleWriter(path, name=name, protocol=protocol) as writer:
        playing = (*PLAYING, "clip") if protocol.sees_frames else PLAYING
        for network in (*playing, "picture"):
            if network == "picture" and config.picture is None:
                continue
            size, own = getattr(config, network), seed + (network == "picture")
            writer.write_network(network, size, random_leaves(network, size, own))
        writer.write_tokenizer(tokenizer)
    return path


def write_middle(folder: Path, config: ModelConfig | None = None) -> Bundle:
    """Writes the middle size with random weights and the embedded model's words."""
    config = config or make_middle()
    assert config.mllm is not None
    tokenizer, count = folder / "tokenizer", config.mllm.num_queries
    size = write_word_tokenizer(tokenizer, _embedded_words(), num_frame_tokens=count)
    return Bundle.open(
        write_random(folder / "model", config, name="middle", tokenizer=tokenizer, vocab_size=size)
    )


def _embedded_words() -> list[str]:
    embedded = json.loads((ASSETS / "toy" / "tokenizer" / "tokenizer.json").read_text())
    return [word for word in embedded["model"]["vocab"] if word.isalpha()]


class RandomBundle(Bundle):
    """A model of random weights, made on the device when a network is loaded; nothing is stored.

    Low-rank updates are left out, as play merges them into the weights. The vocabulary has the
    configuration's size: the embedded model's words, and words that nobody uses.

    Args:
        folder: Folder for the tokenizer.
        config: Configuration of each network.
        protocol: Game protocol.
        name: Name of the model.
    """

    def __init__(
        self, folder: Path, config: ModelConfig, *, protocol: Protocol = PAPER, name: str
    ) -> None:
        mllm, dit = config.mllm, config.dit
        assert mllm is not None
        assert dit is not None
        mistral = dataclasses.replace(mllm.mistral, lora=None)
        networks = ModelConfig(
            mllm=dataclasses.replace(mllm, mistral=mistral),
            encoder=config.encoder,
            dit=dataclasses.replace(dit, lora=None),
            vae=config.vae,
        )
        write = functools.partial(
            write_word_tokenizer,
            Path(folder) / TOKENIZER_FOLDER,
            num_frame_tokens=mllm.num_queries,
        )
        words = _embedded_words()
        spare = mistral.vocab_size - write(words)
        if write(words + [_spare_word(number) for number in range(spare)]) != mistral.vocab_size:
            raise ValueError(f"{mistral.vocab_size} entries are too few for the tokenizer")
        info = BundleConfig(
            name=name, date="", protocol=protocol, networks=networks, weights={}, released={}
        )
        super().__init__(epath.Path(folder), info)

    def load(self, name: NetworkName, **options: Any) -> Any:
        """Makes a network of random weights on the first device, in the given number formats."""
        formats = {key: options.get(key) for key in ("dtype", "param_dtype")}
        config = with_dtypes(self._network_config(name), **formats)
        graphdef, params, rest = nnx.split(abstract_network(name, config), nnx.Param, ...)
        for number, (path, leaf) in enumerate(flat_params(params).items()):
            fan_in = np.prod(leaf.shape[:-1] if name == "vae" else leaf.shape[-2:-1])
            scale = float(fan_in**-0.5) if len(leaf.shape) > 1 else 0.1
            shift = float(path.endswith("scale"))
            key = jax.random.fold_in(jax.random.key(PLAYING.index(name)), number)
            leaf.set_value(_normal(key, scale, shift, leaf.shape, leaf.dtype))
        return nnx.merge(graphdef, params, rest)


def _spare_word(number: int) -> str:
    """Returns a word of letters for a number."""
    letters = "".join(chr(ord("a") + number // 26**place % 26) for place in range(4))
    return f"spare{letters}"


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(
    key: jax.Array, scale: ArrayLike, shift: ArrayLike, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Draws normal numbers, one layer of a stack at a time: the generator's bits take memory."""

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return (jax.random.normal(key, shape) * scale + shift).astype(dtype)

    if len(shape) < 3:
        return draw(key, shape)
    return jax.lax.map(lambda key: draw(key, shape[1:]), jax.random.split(key, shape[0]))


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


class Model:
    """The networks of a bundle, ready to play, and the inputs of all programs.

    Args:
        bundle: The bundle that has them.
        dtype: Number format of weights and computation; the bundle's own if None.
        window: Turns of context; the protocol's if None.
        steps: Denoising steps; the protocol's if None.
        skip: File of skipped steps; None: every step is computed.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        dtype: Dtype | None,
        window: int | None,
        steps: int | None,
        skip: Path | None = None,
    ) -> None:
        self.bundle = bundle
        self.player = Player.from_bundle(bundle, window=window, steps=steps, dtype=dtype, skip=skip)
        self.networks = self.player.networks
        self.table = self.player.table
        self.layout = self.player.layout
        self.inputs = self._make_inputs()

    @property
    def num_rows(self) -> int:
        """Number of rows of the step that is timed: two with guidance."""
        return rollout.num_rows(self.inputs.row, self.player.clip_guidance)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the transformer attends to in the step that is timed."""
        dit = self.networks.dit.config
        memory = 0 if self.inputs.state.memory is None else dit.num_memory_tokens
        return dit.num_context_tokens + memory + dit.num_patches

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
        dit, first = self.networks.dit, self.networks.first_dit.config.first_shape
        turns = [
            TurnRecord(
                text,
                normal(c.num_queries, c.representation_size),
                states,
                normal(*first) if first else None,
            )
            for text in texts[:-1]
        ]
        games = rollout.game_keys([0])
        turn = jnp.asarray(count, jnp.int32)
        shape = (1, *rollout.latent_shape(dit))
        motion = protocol.motion_values[len(protocol.motion_values) // 2]
        middle = player.steps // 2
        x, denoised = jnp.asarray(normal(*shape)), jnp.asarray(normal(*shape))
        keys, window = rollout.turn_keys(games, turn), player.restore([turns])
        state = rollout.GameState(
            jnp.asarray(normal(1, c.num_queries, c.representation_size)),
            jnp.asarray(states[None]),
            jnp.full((1,), motion, jnp.float32),
        )
        if not protocol.picture_first:  # otherwise only the picture has the memory
            state = rollout.with_memory(state, window, dit.config)
        count, has_memory = rollout.num_residuals(self.table, player.clip_guidance), state.memory
        start = rollout.start_clip(dit, keys, rows=count, has_memory=has_memory is not None)
        return Inputs(
            window=window,
            instruction=player.read(texts[-1:]),
            games=games,
            turn=turn,
            keys=keys,
            state=state,
            sampler=SamplerState(x, denoised, jnp.full((1,), -1, jnp.int32), start.residual),
            row=self.table.steps()[middle],
            latents=jnp.asarray(normal(*shape)),
        )


def open_model(model: str, folder: Path) -> Bundle:
    """Opens a bundle by its folder or the name `toy`; makes `middle` and `full` in `folder`."""
    if model == "middle":
        return write_middle(folder)
    if model == "full":
        return RandomBundle(folder, make_full(), protocol=RELEASED, name="full")
    return Bundle.open(model)
