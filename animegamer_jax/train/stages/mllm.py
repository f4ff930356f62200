"""The stage of the language model: the next game state from past turns (paper, section 3.3).

The loss is the cross-entropy of this turn's four state tokens, plus `alpha` times the mean squared
error of the predicted shot representation against E_a of the true turn (equation 5).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import grain
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.configs import ModelConfig
from animegamer_jax.data.datasets import open_features
from animegamer_jax.data.windows import (
    GameSample,
    Windows,
    common_captions,
    game_samples,
    game_spec,
)
from animegamer_jax.errors import UserError
from animegamer_jax.models.encoder import ShotEncoder
from animegamer_jax.models.linear import Dropout
from animegamer_jax.models.mllm import GameBatch, make_batch
from animegamer_jax.protocol import STATE_NAMES, Layout, Protocol
from animegamer_jax.tokenizer import UNKNOWN
from animegamer_jax.train.stages.base import DataSource, Evaluation, Scalars, StageNetworks
from animegamer_jax.train.stages.caption_heads import (
    HEADS,
    NAMING,
    RATE,
    CaptionNaming,
    Targets,
    layers_of_heads,
    make_heads,
)
from animegamer_jax.train.stages.games import (
    GameRecipe,
    GameStage,
    choose_turns,
    encode_turns,
    lay_out,
)
from animegamer_jax.train.stages.networks import load_or_make, matrix_size
from animegamer_jax.train.stages.packing import PackedLayout, window_ends
from animegamer_jax.train.stages.recipe import BelowOne, NotNegative, OptimizerConfig, Share

_TRAINED_ALWAYS = ("mistral.embedding", "mistral.head.kernel")  # besides LoRA, norms, resamplers


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLLMRecipe(GameRecipe):
    """The recipe of the language model's stage.

    Attributes:
        alpha: Weight of the representation's error in the loss.
        lora_dropout: Dropout rate of the low-rank updates' inputs.
        history_noise: Standard deviation of the noise added to the representations of past turns,
            which have a deviation of about one and are the model's own predictions in play.
        history_swap: Share of past turns whose representation is replaced by that of another game
            in the batch, so that the model also learns from the words of past turns.
        word_dropout: Share of an instruction's tokens replaced by `<unk>`, so that the model can
            handle words outside its vocabulary.
        caption_weight: Weight of a second error of the representations, which are also predicted
            from complete captions without a history, so that the model does not forget what it has
            learned from captions. It multiplies `alpha`.
        naming_weight: Weight of the errors of heads that name the captions of past turns, of the
            turns to be predicted and of the predictions (`caption_heads`), so that the model reads
            in pictures what no instruction says and predicts it. For models that are trained from
            scratch.
        targets: Turns of a window to train on. "last" is the turn that ends it, which may be any
            turn of a game; "every" trains on all turns of windows that end with their games, as
            packed sequences, and needs --starts game. "captions" trains on the representation of
            single turns, all with captions, so that a new model first learns what its words look
            like.
    """

    alpha: NotNegative = 1.0
    lora_dropout: BelowOne = 0.05
    history_noise: NotNegative = 0.0
    history_swap: Share = 0.0
    word_dropout: Share = 0.0
    caption_weight: NotNegative = 0.0
    naming_weight: NotNegative = 0.0
    targets: Targets = "last"


RECIPES = {
    "toy": MLLMRecipe(
        steps=4000,
        batch_size=16,
        optimizer=OptimizerConfig(
            learning_rate=2e-3,
            warmup_steps=100,
            decay="cosine",
            b2=0.98,
            weight_decay=0.05,
            kind="muon",
        ),
        ema_decay=0.999,
        dtype="bfloat16",
        lora_dropout=0.0,
        history_noise=0.1,
        word_dropout=0.02,
        trained="all",
        targets="every",
    ),
    # Steps and learning rate as reported in the paper's section 4.1; alpha, dropout and 1 to 5
    # turns, uniformly, from the released files. Optimizer, warm-up, bfloat16 and 16 sequences a
    # process from the code base that the release grew from. The number of processes is not
    # published: eight is our choice.
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


def forget_words(
    captions: Int[Array, "b w c"], key: Key[Array, ""], *, rate: float, unknown: int
) -> Int[Array, "b w c"]:
    """Replaces a share `rate` of the tokens by `unknown`."""
    return jnp.where(jax.random.bernoulli(key, rate, captions.shape), unknown, captions)


class MLLMStage(GameStage[MLLMRecipe]):
    """Train the language model to predict the next game state."""

    recipes = RECIPES
    name: ClassVar[str] = "mllm"
    needs: ClassVar[Mapping[NetworkName, str]] = {"encoder": "decoder"}
    changes: ClassVar[tuple[NetworkName, ...]] = ("mllm",)
    unit: ClassVar[str] = "sequences"
    _classes: dict[str, int] | None = None

    @property
    def _only_captions(self) -> bool:
        return self.recipe.targets == "captions"

    @property
    def _also_captions(self) -> bool:
        return not self._only_captions and self.recipe.caption_weight > 0

    @property
    def _names_captions(self) -> bool:
        return self.recipe.naming_weight > 0

    @property
    def _heads(self) -> tuple[str, ...]:
        """Names of the heads; targets "captions" have no past turn, so "turn_end" is left out."""
        if not self._names_captions:
            return ()
        return tuple(name for name in HEADS if not (self._only_captions and name == "turn_end"))

    @property
    def window(self) -> int:
        return 1 if self._only_captions else super().window

    @property
    def _windowed(self) -> Protocol:
        """The protocol with the window of the samples."""
        return dataclasses.replace(self.protocol, window=self.window)

    def windows(self) -> Windows:
        return dataclasses.replace(
            super().windows(),
            protocol=self._windowed,
            captions=self._only_captions,
            complete=self._also_captions,
            classes=self._classes if self._names_captions else None,
        )

    def samples(self, sources: Sequence[DataSource], *, split: str) -> grain.MapDataset:
        if self._names_captions and self._classes is None:
            self._classes = common_captions([open_features(source.path) for source in sources])
            if not self._classes:
                raise UserError(
                    f"--naming-weight {self.recipe.naming_weight:g}: no caption of the data "
                    "describes a thousandth of the training turns, so there is nothing to name: "
                    "leave it out"
                )
        return super().samples(sources, split=split)

    def rate_factors(self) -> Mapping[str, float]:
        return {"mllm": 1.0} | dict.fromkeys(self._heads, RATE) if self._heads else {}

    @functools.cached_property
    def _alone(self) -> Layout:
        """The layout of a turn without history."""
        return Layout(
            dataclasses.replace(self.protocol, window=1),
            self.tokenizer.ids,
            num_queries=self.mllm_config.num_queries,
            window=1,
        )

    @functools.cached_property
    def packed_layout(self) -> PackedLayout:
        return PackedLayout(self.layout)

    @functools.cached_property
    def _naming(self) -> CaptionNaming:
        return CaptionNaming(
            config=self.mllm_config.mistral,
            layout=self.layout,
            packed=self.packed_layout,
            targets=self.recipe.targets,
            query_start=int(self._alone.queries[0]),
        )

    @functools.cached_property
    def _unknown(self) -> int:
        """Only used with word dropout, since not every tokenizer has it."""
        return self.tokenizer.id_of(UNKNOWN)

    def load(self, bundle: Bundle | None, *, mesh: jax.sharding.Mesh) -> StageNetworks:
        """Returns the language model, a new one if the bundle has none, and E_a.

        Raises:
            UserError: The recipe trains low-rank updates and there are none, or a model cannot be
                trained for the protocol.
        """
        assert bundle is not None, "the command has checked what the stage needs"
        recipe = self.recipe
        self.check_protocol()
        exists = bundle.has("mllm")
        if recipe.trained == "recipe" and (not exists or self.mllm_config.mistral.lora is None):
            problem = "has no low-rank updates" if exists else "is new"
            raise UserError(
                f"stage mllm: --trained recipe trains the low-rank updates of a pre-trained "
                f"language model, but this one {problem}: give --trained all, or a bundle made by "
                "`animegamer initialise --mistral DIR`"
            )
        mllm = load_or_make("mllm", self, bundle, mesh=mesh)
        encoder = bundle.load("encoder", mesh=mesh, dtype=recipe.dtype)
        networks = make_heads(self.mllm_config.mistral, self._heads, seed=recipe.seed)
        networks |= {"mllm": mllm, "encoder": encoder}
        return networks

    def is_trained(self, network: str, path: tuple[str, ...], variable: nnx.Variable) -> bool:
        if network != "mllm" or self.recipe.trained == "all":
            return network in ("mllm", *self._heads)
        return (
            isinstance(variable, nnx.LoRAParam)
            or ".".join(path) in _TRAINED_ALWAYS
            or path[-2].endswith("norm")
            or path[0].endswith("resampler")
        )

    def read_samples(self, path: str, *, split: str) -> grain.MapDataset:
        if self.recipe.targets == "every" and self.recipe.starts != "game":
            raise UserError(
                f"--starts {self.recipe.starts}: expected --starts game with --targets every, "
                "which needs the whole history of every turn: leave one of the two out"
            )
        features, windows = open_features(path), self.windows()
        # The bundle may lack the networks that have made the features.
        reader = ModelConfig(encoder=self.config.encoder)
        trains = split == "train"
        ends = None
        if self.recipe.targets == "every" and trains:
            ends = window_ends(features.turns(split), self.protocol.window)
        return game_samples(
            features,
            split=split,
            windows=windows,
            config=reader,
            numbers=ends,
            shown=self.reads_shown(split),
        )

    def sample_spec(self) -> GameSample:
        return game_spec(
            self.config,
            self._windowed,
            shown=self.reads_shown(),
            complete=self._also_captions,
            classes=self._names_captions,
        )

    def make_batch(self, encoder: ShotEncoder, game: Any, key: Key[Array, ""]) -> GameBatch:
        """Returns `GameSample`s as training sequences, with the recipe's augmentation."""
        recipe = self.recipe
        words, noise, swap = jax.random.split(key, 3)
        show = jax.random.fold_in(key, 3)
        if recipe.word_dropout:
            captions = forget_words(
                game.captions, words, rate=recipe.word_dropout, unknown=self._unknown
            )
            game = game._replace(captions=captions)
        prompts = lay_out(encoder, game, self.layout)
        history = self.history(encoder, game, prompts, show)
        if recipe.history_swap:
            history = choose_turns(
                history,
                jnp.roll(history, 1, axis=0),
                swap,
                rate=recipe.history_swap,
                count=self.layout.num_queries,
            )
        if recipe.history_noise:
            history += recipe.history_noise * jax.random.normal(noise, history.shape)
        states, targets = game.states[:, -1], prompts.representations
        if recipe.targets == "every":
            packed = self.packed_layout
            return packed.batch(prompts.prompt, states, history=history, targets=targets)
        return make_batch(
            self.layout, prompts.prompt, states, history=history, target=targets[:, -1]
        )

    def loss(
        self, networks: StageNetworks, batch: Any, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Scalars]:
        """Returns equation 5, a mean over the samples' targets, and its terms as parts.

        `caption_weight` adds the error of representations predicted from captions alone, and
        `naming_weight` the errors of the heads. With targets "captions" the states are left out,
        because captions do not include them.
        """
        recipe, layout = self.recipe, self.layout
        mllm, encoder = networks["mllm"], networks["encoder"]
        augment, drop = jax.random.split(key)
        sequences = self.make_batch(encoder, batch, augment)
        dropout = Dropout(drop, recipe.lora_dropout) if recipe.lora_dropout else None
        every = recipe.targets == "every"
        slots = self.packed_layout.answers.ravel() if every else layout.answers
        cross_entropy, squared_error, found, hidden = mllm.answer_losses(
            sequences, label_slots=slots, dropout=dropout, with_hidden_states=self._names_captions
        )
        b = cross_entropy.shape[0]
        weights = jnp.ones((b, 1))
        if every:
            present = self.packed_layout.present(batch.num_history).astype(jnp.float32)
            weights = present / present.sum(axis=1, keepdims=True)

        def mean(errors: jax.Array) -> jax.Array:
            return (weights * errors.reshape(b, weights.shape[1], -1).mean(axis=-1)).sum() / b

        states, representation = mean(cross_entropy), mean(squared_error)
        parts, loss = {"representation": representation}, recipe.alpha * representation
        shots = encode_turns(encoder, batch)
        if not self._only_captions:
            parts["states"] = states
            loss += states
        if self._also_captions:
            parts |= self._caption_errors(networks, batch, shots)
            loss += recipe.alpha * recipe.caption_weight * parts["captions"]
        if hidden is not None:
            parts |= self._naming.of_sequences(networks, batch, hidden)
            parts |= self._naming.of_shots(networks, batch, shots, found)
            loss += recipe.naming_weight * sum(parts[name] for name in parts if name in NAMING)
        return loss, parts

    def _caption_errors(
        self, networks: StageNetworks, game: Any, shots: Float[Array, "b t n r"]
    ) -> Scalars:
        """Returns the error of representations from captions alone, a mean over the turns.

        With heads also the errors of naming the captions (`CaptionNaming.of_captions`).
        """
        layout = self._alone
        ids = game.complete.reshape(-1, 1, game.complete.shape[-1])
        none = jnp.zeros((len(ids), 0, len(STATE_NAMES)), jnp.int32)
        prompt = layout.assemble(
            jnp.maximum(ids, 0), (ids >= 0).sum(axis=-1), none, jnp.zeros(len(ids), jnp.int32)
        )
        history = jnp.zeros((len(ids), 0, shots.shape[-1]))
        present = self.packed_layout.present(game.num_history).astype(jnp.float32)
        errors: Scalars = {}
        if self._names_captions:
            found, hidden = networks["mllm"].represent_with_hidden_states(prompt, history, layout)
            errors |= self._naming.of_captions(networks, game, hidden, found)
        else:
            found = networks["mllm"].represent(prompt, history, layout)
        error = jnp.square(found.reshape(shots.shape) - shots).mean(axis=(2, 3))
        return errors | {"captions": (present * error).sum() / present.sum()}

    def sample_flops(self, networks: StageNetworks) -> float:
        """Returns FLOPs from the matrices' sizes and attention's products, without causality."""
        mllm = networks["mllm"]
        c, layout = mllm.config.mistral, self.layout
        length, targets, queries = layout.length + len(layout.answer), 1, layout.num_queries
        if self.recipe.targets == "every":
            length, targets = self.packed_layout.length, layout.window
        lengths = [length]
        if self._also_captions:
            lengths += [self._alone.length] * layout.window
        layers = matrix_size(mllm.mistral.layers) * sum(lengths)
        squares = sum(length**2 for length in lengths)
        scores = 12.0 * squares * c.num_attention_heads * c.head_dim * c.num_hidden_layers
        rest = matrix_size(mllm.mistral.head) * len(STATE_NAMES) * targets
        rest += matrix_size(mllm.input_resampler) * queries * (layout.window - 1)
        rest += matrix_size(mllm.output_resampler) * queries * targets
        if self._names_captions:
            captions = layout.window if self._also_captions else 0
            alone = layout.window + targets + captions  # shots, true ones and predictions
            share = layers_of_heads(c)["history"] / c.num_hidden_layers
            read = matrix_size(mllm.input_resampler) + share * matrix_size(mllm.mistral.layers)
            turns = layout.window - 1 + targets + captions
            rest += (matrix_size(networks["history"]) * (turns + alone) + read * alone) * queries
        # A weight and row takes two forward, two for the gradient of the input and, if trained, two
        # for the gradient of the weight.
        return (6.0 if self.recipe.trained == "all" else 4.0) * layers + 6.0 * rest + scores

    @functools.cached_property
    def _answer(self) -> Callable[..., Any]:
        def answer(networks: StageNetworks, game: Any) -> tuple[jax.Array, jax.Array]:
            mllm, encoder = networks["mllm"], networks["encoder"]
            prompts = lay_out(encoder, game, self.layout)
            found, states = mllm.predict(prompts.prompt, prompts.history, self.layout)
            target = prompts.representations[:, -1]
            error = jnp.square(found - target).mean()
            right = (states == game.states[:, -1]).mean(axis=0)
            return 1 - error / target.var(axis=0, ddof=1).mean(), right

        return jax.jit(answer)

    def evaluate(self, networks: StageNetworks, batch: Any, key: Key[Array, ""]) -> Evaluation:
        """Scores the states, decoded as in play from true histories, and the representation.

        `accuracy` is over the character's three states (ACC-S); `explained` is the explained share
        of what differs between the batch's representations, a mean of which has 0.
        """
        del key
        explained, right = self._answer(networks, batch)
        if self._only_captions:
            return Evaluation({"explained": float(explained)}, {})
        scalars = {"accuracy": float(right[1:].mean()), "explained": float(explained)}
        each = zip(STATE_NAMES, right, strict=True)
        return Evaluation(scalars | {f"accuracy_{name}": float(value) for name, value in each}, {})
