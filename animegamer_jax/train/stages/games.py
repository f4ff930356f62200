"""What the stages that read games share: samples of a window of turns, as prompts.

Past turns are given by their true representations, or a share of them (`history_shown`) by those of
what a model shows; E_a is frozen and runs inside the step.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Key

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.configs import MLLMConfig
from animegamer_jax.data.datasets import SHOWN, read_info
from animegamer_jax.data.windows import Starts, Windows
from animegamer_jax.errors import UserError
from animegamer_jax.models.encoder import ShotEncoder
from animegamer_jax.protocol import Layout, Prompt
from animegamer_jax.storage.paths import absolute
from animegamer_jax.tokenizer import Tokenizer
from animegamer_jax.train.stages.base import DataSource, Stage
from animegamer_jax.train.stages.recipe import Recipe, Share


@dataclasses.dataclass(frozen=True, kw_only=True)
class GameRecipe(Recipe):
    """The recipe of a stage that is trained on windows of turns.

    Attributes:
        starts: Start of the histories. With "game" they reach back to the start of the game, as far
            as the window allows; with "anywhere" their length is drawn first, uniformly.
        history_shown: Share of past turns whose features are of the model's own clips
            (`animegamer data shown`) instead of the true ones, as in play.
    """

    starts: Starts = "game"
    history_shown: Share = 0.0


G = TypeVar("G", bound=GameRecipe)


class GamePrompts(NamedTuple):
    """Prompts of the language model, and the representations of all their turns."""

    prompt: Prompt
    representations: Float[Array, "b w n r"]

    @property
    def history(self) -> Float[Array, "b k r"]:
        """The representations of the past turns, concatenated."""
        b, w, n, r = self.representations.shape
        return self.representations[:, :-1].reshape(b, (w - 1) * n, r)


def encode_turns(encoder: ShotEncoder, game: Any) -> Float[Array, "b w n r"]:
    """Returns E_a of every turn of `GameSample`s, float32, without gradients."""
    b, w, n, _ = game.text.shape
    text = game.text.reshape(b * w, n, -1)
    image = game.image.reshape(b * w, game.image.shape[2], -1)
    encoded = jax.lax.stop_gradient(encoder(text, image)).astype(jnp.float32)
    return encoded.reshape(b, w, *encoded.shape[1:])


def lay_out(encoder: ShotEncoder, game: Any, layout: Layout) -> GamePrompts:
    """Returns the prompts of `GameSample`s and `encode_turns` of them."""
    prompt = layout.assemble(
        game.captions, game.caption_lengths, game.states[:, :-1], game.num_history
    )
    return GamePrompts(prompt, encode_turns(encoder, game))


def choose_turns(
    history: Float[Array, "b k r"],
    others: Float[Array, "b k r"],
    key: Key[Array, ""],
    *,
    rate: float,
    count: int,
) -> Float[Array, "b k r"]:
    """Replaces a share `rate` of the turns, `count` rows each, by the same turns of `others`.

    It ignores which turns exist: the rows of an absent turn are masked, and an existing turn may
    get E_a's representation of an absent turn's zeros.
    """
    turns, other = (rearrange(x, "b (w n) r -> b w n r", n=count) for x in (history, others))
    chosen = jax.random.bernoulli(key, rate, (*turns.shape[:2], 1, 1))
    return rearrange(jnp.where(chosen, other, turns), "b w n r -> b (w n) r")


class GameStage(Stage[G]):
    """A stage whose samples are windows of turns for the language model."""

    @property
    def mllm_config(self) -> MLLMConfig:
        assert self.config.mllm is not None
        return self.config.mllm

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, checked against the language model."""
        config = self.mllm_config
        return self.load_tokenizer(
            vocab_size=config.mistral.vocab_size, num_queries=config.num_queries
        )

    @property
    def window(self) -> int:
        """The number of turns of a sample: the protocol's window."""
        return self.protocol.window

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout of a sample's turns."""
        return Layout(
            self.protocol,
            self.tokenizer.ids,
            num_queries=self.mllm_config.num_queries,
            window=self.window,
        )

    def windows(self) -> Windows:
        """Returns the windows of turns that the stage is trained on."""
        recipe = self.recipe
        return Windows(
            tokenizer=self.tokenizer, protocol=self.protocol, starts=recipe.starts, seed=recipe.seed
        )

    def reads_shown(self, split: str = "train") -> bool:
        """Returns whether samples of a split hold what a model shows; held-out ones never do."""
        return split == "train" and self.recipe.history_shown > 0

    def check_sources(self, bundle: Bundle | None, sources: Sequence[DataSource]) -> None:
        """Checks that shown histories are of the bundle's decoder, or that it has been adapted.

        An adapted decoder reads those of the one that it came from.

        Raises:
            UserError: Another decoder made them, or there are none.
        """
        assert bundle is not None, "the command has checked what the stage needs"
        if not self.reads_shown() or not bundle.has("dit") or "adapt" in (bundle.info.stages or ()):
            return
        digest = bundle.digest("dit")
        for source in sources:
            path = absolute(source.path) / SHOWN
            if read_info(path).decoder != digest:
                raise UserError(
                    f"{path}: made by another decoder than that of {bundle.path}: remove it and "
                    "run `animegamer data shown` again"
                )

    def history(
        self, encoder: ShotEncoder, game: Any, prompts: GamePrompts, key: Key[Array, ""]
    ) -> Float[Array, "b k r"]:
        """Returns E_a of past turns, the recipe's share of them as a model showed them."""
        rate = self.recipe.history_shown
        if not rate or not game.shown.shape[2]:  # held-out samples have none
            return prompts.history
        shown = lay_out(encoder, game._replace(image=game.shown), self.layout).history
        count = self.layout.num_queries
        return choose_turns(prompts.history, shown, key, rate=rate, count=count)

    def check_protocol(self) -> None:
        """Checks that a model can be trained for the stage's protocol.

        Raises:
            UserError: The protocol reads states from another pass, or representations at other
                positions, than training does.
        """
        protocol = self.protocol
        if protocol.representation_shift or protocol.states_pass != "same":
            raise UserError(
                f"stage {self.name}: expected a model with protocol paper, found {protocol.name}, "
                "which reads answers at other positions than training does: convert the model "
                "again with --protocol paper"
            )
