"""The stage of the language model: the next game state from the turns before (PAPER section 3.3).

Loss: cross-entropy of this turn's four state tokens, plus `alpha` times the mean squared error of
the predicted shot representation against E_a of the true turn (equation 5). Past turns enter by
their true representations; E_a is frozen and runs inside the step.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, cast

import grain
import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.bundle.config import with_dtypes
from animegamer_jax.configs import MLLMConfig, ModelConfig
from animegamer_jax.data.datasets import open_features
from animegamer_jax.data.samples import (
    Starts,
    Windows,
    game_samples,
)
from animegamer_jax.errors import UserError
from animegamer_jax.models.encoder import ShotEncoder
from animegamer_jax.models.linear import Dropout
from animegamer_jax.models.mllm import MLLM, GameBatch, make_batch
from animegamer_jax.protocol import STATE_NAMES, Layout, Prompt
from animegamer_jax.tokenizer import UNKNOWN, Tokenizer
from animegamer_jax.train.stages.base import (
    DataSource,
    Networks,
    Scalars,
    Stage,
    Watched,
)
from animegamer_jax.train.stages.networks import (
    load_tokenizer,
    matrix_size,
    mixed_samples,
    new_network,
)
from animegamer_jax.train.stages.packing import BranchedLayout, window_ends
from animegamer_jax.train.stages.recipe import OptimizerConfig, Recipe

_TRAINED_ALWAYS = ("mistral.embedding", "mistral.head.kernel")  # beside LoRA, norms, resamplers


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLLMRecipe(Recipe):
    """What the language model's stage needs to know beside.

    Attributes:
        alpha: weight of the representation's error.
        lora_dropout: of the low-rank updates' inputs.
        history_noise: standard deviation of noise on past turns' representations, whose own is
            about one: at play these are the model's own predictions.
        history_swap: share of past turns whose representation is that of another game of the
            batch, so that the words of the turns before count as well as what they looked like.
        word_dropout: share of an instruction's tokens that become `<unk>`, so that words from
            outside its vocabulary get an answer.
        starts: which histories are seen, see `Windows`.
        targets: "last": the turn that ends a window, which may be any turn of a game; "every":
            all turns of a window at once (`train/stages/packing.py`), which then ends with its game, and
            of which `starts` must be "game".
    """

    alpha: float = 1.0
    lora_dropout: float = 0.05
    history_noise: float = 0.0
    history_swap: float = 0.0
    word_dropout: float = 0.0
    starts: Starts = "game"
    targets: Literal["last", "every"] = "last"


RECIPES = {
    "toy": MLLMRecipe(
        steps=1600,
        batch_size=16,
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup_steps=100, decay="cosine", b2=0.98, weight_decay=0.05
        ),
        ema_decay=0.999,
        dtype="bfloat16",
        lora_dropout=0.0,
        history_noise=0.1,
        history_swap=0.5,
        word_dropout=0.02,
        trained="all",
        targets="every",
    ),
    # Steps and learning rate as they are reported of the paper's section 4.1; alpha, dropout and 1
    # to 5 turns, uniformly, of the released files. Optimizer, warm-up, bfloat16 and 16 sequences a
    # process of the code base that it grew from. The number of processes is not published: that it
    # is eight is ours.
    "full": MLLMRecipe(
        steps=15_000,
        batch_size=128,
        optimizer=OptimizerConfig(
            learning_rate=5e-5,
            warmup_steps=500,
            decay="cosine",
            b2=0.98,
            eps=1e-6,
            weight_decay=0.05,
        ),
        dtype="bfloat16",
        remat="full",
        starts="anywhere",
    ),
}


class GamePrompts(NamedTuple):
    """Samples as the language model reads them, and the representations of all their turns."""

    prompt: Prompt
    representations: Float[Array, "b w n r"]

    @property
    def history(self) -> Float[Array, "b k r"]:
        """Of the turns before this one, side by side."""
        b, w, n, r = self.representations.shape
        return self.representations[:, :-1].reshape(b, (w - 1) * n, r)


def lay_out(encoder: ShotEncoder, game: Any, layout: Layout) -> GamePrompts:
    """The prompts of a batch of `GameSample`s; E_a of every turn, float32, without gradients."""
    b, w, n, _ = game.text.shape
    text = game.text.reshape(b * w, n, -1)
    image = game.image.reshape(b * w, game.image.shape[2], -1)
    encoded = jax.lax.stop_gradient(encoder(text, image)).astype(jnp.float32)
    prompt = layout.assemble(
        game.captions, game.caption_lengths, game.states[:, :-1], game.num_history
    )
    return GamePrompts(prompt, encoded.reshape(b, w, *encoded.shape[1:]))


def forget_words(
    captions: Int[Array, "b w c"], key: Key[Array, ""], *, rate: float, unknown: int
) -> Int[Array, "b w c"]:
    """A share `rate` of the tokens becomes `unknown`."""
    return jnp.where(jax.random.bernoulli(key, rate, captions.shape), unknown, captions)


def swap_turns(
    history: Float[Array, "b k r"], key: Key[Array, ""], *, rate: float, count: int
) -> Float[Array, "b k r"]:
    """A share `rate` of the turns, `count` rows each, becomes those of the sample before.

    Whether a turn is there in both games is not asked: the rows of an absent one are masked, and
    one that is there may so get what E_a makes of an absent one's zeros.
    """
    turns = rearrange(history, "b (w n) r -> b w n r", n=count)
    swapped = jax.random.bernoulli(key, rate, (*turns.shape[:2], 1, 1))
    turns = jnp.where(swapped, jnp.roll(turns, 1, axis=0), turns)
    return rearrange(turns, "b w n r -> b (w n) r")


def weight_flops(networks: Mapping[str, int], *, trained: bool) -> float:
    """Multiplications and additions of a pass forward and back, from weights x rows.

    Two a weight and row forward, two for the gradient of the input, two for that of the weight.
    """
    return (6.0 if trained else 4.0) * sum(networks.values())


class MLLMStage(Stage[MLLMRecipe]):
    """Trains the language model to predict the next game state."""

    name: ClassVar[str] = "mllm"
    needs: ClassVar[Mapping[NetworkName, str]] = {"encoder": "decoder"}
    changes: ClassVar[tuple[NetworkName, ...]] = ("mllm",)
    unit: ClassVar[str] = "sequences"

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return load_mllm_tokenizer(self)

    @functools.cached_property
    def layout(self) -> Layout:
        return make_layout(self, self.tokenizer)

    @functools.cached_property
    def branched(self) -> BranchedLayout:
        return BranchedLayout(self.layout)

    @functools.cached_property
    def _unknown(self) -> int:
        """Only asked where words are dropped: not every tokenizer has it."""
        return self.tokenizer.id_of(UNKNOWN)

    def load(self, bundle: Bundle | None, *, mesh: jax.sharding.Mesh) -> Networks:
        """The language model, new if the bundle has none, and E_a.

        Raises:
            UserError: the recipe trains low-rank updates and there are none, or the protocol is
                not one to train by.
        """
        assert bundle is not None, "the command has checked what the stage needs"
        recipe = self.recipe
        check_protocol(self)
        config = with_dtypes(_mllm_config(self), dtype=recipe.dtype, remat=recipe.remat)
        there = bundle.has("mllm")
        if recipe.trained == "recipe" and (not there or _mllm_config(self).mistral.lora is None):
            what = "it has no low-rank updates" if there else "it is new here"
            raise UserError(
                f"stage mllm: --trained recipe trains the low-rank updates of a pre-trained "
                f"language model, but {what}: give --trained all, or a bundle made by "
                "`animegamer initialise --mistral DIR`"
            )
        if there:
            mllm = bundle.load("mllm", mesh=mesh, dtype=recipe.dtype, remat=recipe.remat)
        else:
            mllm = new_network("mllm", config, seed=recipe.seed, mesh=mesh)
        encoder = bundle.load("encoder", mesh=mesh, dtype=recipe.dtype)
        return {"mllm": mllm, "encoder": encoder}

    def is_trained(self, network: str, path: tuple[str, ...], variable: nnx.Variable) -> bool:
        if network != "mllm" or self.recipe.trained == "all":
            return network == "mllm"
        return (
            isinstance(variable, nnx.LoRAParam)
            or ".".join(path) in _TRAINED_ALWAYS
            or path[-2].endswith("norm")
            or path[0].endswith("resampler")
        )

    def samples(self, sources: Sequence[DataSource], *, split: str) -> grain.MapDataset:
        """Windows of turns.

        Raises:
            UserError: of the data, or every turn is a target in windows that start anywhere.
        """
        if self.recipe.targets == "every" and self.recipe.starts != "game":
            raise UserError(
                f"--starts {self.recipe.starts}: expected --starts game with --targets every, of "
                "whose windows every turn has its whole history: leave one of the two out"
            )
        windows = make_windows(self, self.tokenizer, starts=self.recipe.starts)

        def make(path: str) -> grain.MapDataset:
            features = open_features(path)
            # Of the networks that made the features the bundle need have none any more.
            reader = ModelConfig(encoder=self.config.encoder)
            samples = game_samples(features, split=split, windows=windows, config=reader)
            if self.recipe.targets == "last" or split != "train":
                return samples
            turns = features.turns(split)
            ends = window_ends(turns, self.protocol.window)
            return grain.MapDataset.source(ends).random_map(
                lambda number, rng: windows.sample(windows.read(turns, number, rng)[1]),
                seed=windows.seed,
            )

        return mixed_samples(sources, make)

    def make_batch(self, encoder: ShotEncoder, game: Any, key: Key[Array, ""]) -> GameBatch:
        """`GameSample`s as sequences to train on, with the recipe's disturbances."""
        recipe = self.recipe
        words, noise, swap = jax.random.split(key, 3)
        if recipe.word_dropout:
            captions = forget_words(
                game.captions, words, rate=recipe.word_dropout, unknown=self._unknown
            )
            game = game._replace(captions=captions)
        prompts = lay_out(encoder, game, self.layout)
        history = prompts.history
        if recipe.history_swap:
            history = swap_turns(
                history, swap, rate=recipe.history_swap, count=self.layout.num_queries
            )
        if recipe.history_noise:
            history += recipe.history_noise * jax.random.normal(noise, history.shape)
        states, targets = game.states[:, -1], prompts.representations
        if recipe.targets == "every":
            return self.branched.batch(prompts.prompt, states, history=history, targets=targets)
        return make_batch(
            self.layout, prompts.prompt, states, history=history, target=targets[:, -1]
        )

    def loss(
        self, networks: Networks, batch: Any, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Scalars]:
        """Equation 5, a mean over the samples' targets; `states` and `representation` are parts."""
        recipe, layout = self.recipe, self.layout
        mllm, encoder = cast(MLLM, networks["mllm"]), cast(ShotEncoder, networks["encoder"])
        disturb, drop = jax.random.split(key)
        sequences = self.make_batch(encoder, batch, disturb)
        dropout = Dropout(drop, recipe.lora_dropout) if recipe.lora_dropout else None
        every = recipe.targets == "every"
        slots = self.branched.answers.ravel() if every else layout.answers
        entropy, square = mllm.errors(sequences, label_slots=slots, dropout=dropout)
        b = entropy.shape[0]
        weights = jnp.ones((b, 1))
        if every:
            present = self.branched.present(batch.num_history).astype(jnp.float32)
            weights = present / present.sum(axis=1, keepdims=True)

        def mean(errors: jax.Array) -> jax.Array:
            return (weights * errors.reshape(b, weights.shape[1], -1).mean(axis=-1)).sum() / b

        states, representation = mean(entropy), mean(square)
        parts = {"states": states, "representation": representation}
        return states + recipe.alpha * representation, parts

    def sample_flops(self, networks: Networks) -> float:
        """By matrices (6 or 4 operations a weight and token) and scores, causality not counted."""
        mllm = cast(MLLM, networks["mllm"])
        c, layout = mllm.config.mistral, self.layout
        length, targets, queries = layout.length + len(layout.answer), 1, layout.num_queries
        if self.recipe.targets == "every":
            length, targets = self.branched.length, layout.window
        layers = matrix_size(mllm.mistral.layers) * length
        scores = 12.0 * length**2 * c.num_attention_heads * c.head_dim * c.num_hidden_layers
        rest = {
            "head": matrix_size(mllm.mistral.head) * len(STATE_NAMES) * targets,
            "input": matrix_size(mllm.input_resampler) * queries * (layout.window - 1),
            "output": matrix_size(mllm.output_resampler) * queries * targets,
        }
        in_layers = weight_flops({"layers": layers}, trained=self.recipe.trained == "all")
        return in_layers + weight_flops(rest, trained=True) + scores

    @functools.cached_property
    def _answer(self) -> Callable[..., Any]:
        def answer(networks: Networks, game: Any) -> tuple[jax.Array, jax.Array]:
            mllm, encoder = cast(MLLM, networks["mllm"]), cast(ShotEncoder, networks["encoder"])
            prompts = lay_out(encoder, game, self.layout)
            found, states = mllm.predict(prompts.prompt, prompts.history, self.layout)
            target = prompts.representations[:, -1]
            error = jnp.square(found - target).mean()
            right = (states == game.states[:, -1]).mean(axis=0)
            return 1 - error / jnp.square(target - target.mean()).mean(), right

        return jax.jit(answer)

    def watch(self, networks: Networks, batch: Any, key: Key[Array, ""]) -> Watched:
        """Accuracies of the states as they are decoded at play, from true histories.

        `accuracy` is over the character's three states (ACC-S); `explained` is the share of the
        representation's variance that is predicted.
        """
        del key
        explained, right = self._answer(networks, batch)
        scalars = {"accuracy": float(right[1:].mean()), "explained": float(explained)}
        each = zip(STATE_NAMES, right, strict=True)
        return Watched(scalars | {f"accuracy_{name}": float(value) for name, value in each}, {})


STAGE = MLLMStage


# What the adaptation stage shares


def _mllm_config(stage: Stage[Any]) -> MLLMConfig:
    assert stage.config.mllm is not None
    return stage.config.mllm


def check_protocol(stage: Stage[Any]) -> None:
    """Whether a model that plays by this protocol can be trained.

    Raises:
        UserError: its states come from another pass, or its representation from other positions,
            than the training has.
    """
    protocol = stage.protocol
    if protocol.representation_shift or protocol.states_pass != "same":
        raise UserError(
            f"stage {stage.name}: expected a model of protocol paper, found {protocol.name}, whose "
            "answers are read at other positions than the training's: convert it again with "
            "--protocol paper"
        )


def load_mllm_tokenizer(stage: Stage[Any]) -> Tokenizer:
    """The model's, checked against its language model."""
    config = _mllm_config(stage)
    return load_tokenizer(
        stage, vocab_size=config.mistral.vocab_size, num_queries=config.num_queries
    )


def make_layout(stage: Stage[Any], tokenizer: Tokenizer) -> Layout:
    """The layout of the protocol's own window."""
    return Layout(
        stage.protocol,
        tokenizer.ids,
        num_queries=_mllm_config(stage).num_queries,
        window=stage.protocol.window,
    )


def make_windows(stage: Stage[Any], tokenizer: Tokenizer, *, starts: Starts) -> Windows:
    """Windows as the stage's recipe draws them."""
    return Windows(
        tokenizer=tokenizer, protocol=stage.protocol, starts=starts, seed=stage.recipe.seed
    )
