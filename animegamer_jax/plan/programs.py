"""The programs that are planned: a stage's training step and a turn of the game, abstract.

Their arguments are shapes with places on a mesh; no weight and no activation is ever made.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import abstract_network
from animegamer_jax.bundle.config import with_dtypes
from animegamer_jax.configs import SIZES, ModelConfig
from animegamer_jax.convert.networks import with_lora
from animegamer_jax.game import rollout
from animegamer_jax.plan.stand_in import AbstractBundle, write_tokenizer
from animegamer_jax.protocol import PAPER, Layout, Protocol
from animegamer_jax.sharding import Plan, network_rules, param_shardings, partition_spec, use_plan
from animegamer_jax.tokenizer import Tokenizer
from animegamer_jax.train.optimizer import make_optimizer
from animegamer_jax.train.registry import find_stage
from animegamer_jax.train.stages.base import Stage
from animegamer_jax.train.stages.mllm import MLLMStage
from animegamer_jax.train.stages.recipe import Recipe
from animegamer_jax.train.step import abstract_state, batch_sharding, make_train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function and abstract arguments, ready to be lowered.

    Attributes:
        name: what it is, for people.
        jitted: `jax.jit(...)`.
        arguments: shapes with shardings.
        samples: that a call does: clips, games or turns.
        unit: what a sample is.
        flops: of a sample by the stage's own arithmetic; None: it has none.
        tokens: of a sample, of the language model's training; None: another program.
    """

    name: str
    jitted: Any
    arguments: tuple[Any, ...]
    samples: int
    unit: str
    flops: float | None
    tokens: int | None = None

    def lower(self, mesh: Mesh, plan: Plan) -> Any:
        """The program for the mesh's devices."""
        # A kernel's bfloat16 products have one precision; the compiler refuses a higher one.
        precision = jax.default_matmul_precision("default")
        with precision, jax.sharding.use_abstract_mesh(mesh.abstract_mesh), use_plan(plan):
            return self.jitted.lower(*self.arguments)


def _placed(tree: Any, shardings: Any) -> Any:
    """Shapes in their places; `shardings` has one for each array, or for each parameter."""

    def one(sharding: NamedSharding, part: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
        )

    return jax.tree.map(one, shardings, tree, is_leaf=lambda x: isinstance(x, NamedSharding))


def _everywhere(tree: Any, mesh: Mesh, *names: str | None) -> Any:
    """All arrays of a tree with their first dimensions by logical names, else whole."""
    sharding = NamedSharding(mesh, partition_spec(names))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
    )


def make_stage(
    name: str, size: str, folder: Path, **changes: Any
) -> tuple[Stage[Any], AbstractBundle]:
    """A stage of a named size, with a bundle of shapes; `changes` are of its recipe."""
    stage_class, recipe = find_stage(name, size=size)
    recipe = dataclasses.replace(recipe, **changes)
    config, protocol = SIZES[size](), PAPER
    tokenizer = write_tokenizer(folder, config)
    bundle = AbstractBundle(config, protocol, tokenizer=tokenizer)
    return stage_class(recipe, config, protocol, tokenizer_dir=tokenizer), bundle


def stage_program(
    name: str, *, mesh: Mesh, plan: Plan, size: str = "full", **changes: Any
) -> Program:
    """A stage's training step.

    Args:
        name: of the stage, as on the command line.
        mesh: of the devices that are planned for.
        plan: how weights and activations lie on it.
        size: of the networks and the recipe.
        changes: of the recipe.
    """
    with tempfile.TemporaryDirectory() as temporary:
        stage, bundle = make_stage(name, size, Path(temporary), **changes)
        recipe: Recipe = stage.recipe
        with use_plan(plan):
            networks = stage.load(bundle, mesh=mesh)
            optimizer = make_optimizer(recipe.optimizer, steps=recipe.steps)
            state, shardings = abstract_state(networks, stage, optimizer, mesh=mesh)
            sharding = batch_sharding(mesh)
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (recipe.batch_size, *x.shape), x.dtype, sharding=sharding
            ),
            stage.sample_spec(),
        )
        step = make_train_step(stage, optimizer, shardings=shardings)
        return Program(
            name=f"{name} step, {recipe.batch_size} {stage.unit}",
            jitted=step,
            arguments=(_placed(state, shardings), batch, _key(mesh)),
            samples=recipe.batch_size,
            unit=stage.unit,
            flops=stage.sample_flops(networks),
            tokens=_num_tokens(stage),
        )


def _num_tokens(stage: Stage[Any]) -> int | None:
    if not isinstance(stage, MLLMStage):
        return None
    if stage.recipe.targets == "every":
        return stage.packed_layout.length
    return stage.layout.length + len(stage.layout.answer)


def _key(mesh: Mesh) -> jax.ShapeDtypeStruct:
    key = jax.eval_shape(lambda: jax.random.key(0))
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=whole)


def abstract_networks(
    config: ModelConfig, *, mesh: Mesh, plan: Plan, dtype: str = "bfloat16"
) -> rollout.Networks:
    """What plays, as shapes in the places that the plan gives them."""

    def one(name: Any) -> nnx.Module:
        formats: Any = {"dtype": dtype, "param_dtype": dtype}
        network_config = with_dtypes(getattr(config, name), **formats)
        if name in ("mllm", "dit"):  # low-rank updates are merged when a player loads them
            network_config = with_lora(name, network_config, None)
        network = abstract_network(name, network_config)
        graphdef, state = nnx.split(network)
        return nnx.merge(graphdef, _placed(state, param_shardings(state, mesh, plan.of(name))))

    encoder: Any = config.encoder
    shape = (encoder.num_text_tokens + encoder.num_image_tokens, encoder.representation_size)
    whole = NamedSharding(mesh, PartitionSpec())
    unconditional = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=whole)
    networks: Any = (one("mllm"), one("dit"), one("vae"), unconditional)
    return rollout.Networks(*networks)


def rollout_program(
    *,
    mesh: Mesh,
    plan: Plan,
    size: str = "full",
    games: int = 1,
    steps: int = 50,
    part: str = "turn",
    protocol: Protocol = PAPER,
) -> Program:
    """A turn of the game from instruction to frames, or one of its parts.

    Args:
        mesh: of the devices that are planned for.
        plan: how weights and activations lie on it.
        size: of the networks.
        games: that are played at once.
        steps: of denoising.
        part: "turn", "mllm", "decoder" or "vae".
        protocol: of the game.
    """
    config = SIZES[size]()
    networks = abstract_networks(config, mesh=mesh, plan=plan)
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer = Tokenizer.load(
            write_tokenizer(Path(temporary), config), num_queries=networks.mllm.config.num_queries
        )
    layout = Layout(
        protocol,
        tokenizer.ids,
        num_queries=networks.mllm.config.num_queries,
        window=protocol.window,
    )
    table = diffusion.make_sampler_table(diffusion.schedule_of(protocol), steps)
    function, make_arguments = _part(part, networks=networks, layout=layout, table=table)
    with use_plan(plan), network_rules("mllm"):
        placed = _everywhere(jax.eval_shape(functools.partial(make_arguments, games)), mesh)
    network_of = {"turn": networks, "mllm": networks.mllm, "decoder": networks, "vae": networks.vae}
    what = {
        "turn": f"whole turn, {steps} steps",
        "mllm": "game state",
        "decoder": f"{steps} denoising steps with guidance",
        "vae": "decoding the clip",
    }[part]
    return Program(
        name=f"{what}, {games} game{'s' * (games != 1)}",
        jitted=jax.jit(function),
        arguments=(network_of[part], *placed),
        samples=games,
        unit="turns",
        flops=None,
    )


def _part(
    part: str, *, networks: rollout.Networks, layout: Layout, table: diffusion.SamplerTable
) -> tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]:
    """A part of a turn, and what makes its arguments for a number of games (called abstractly)."""
    size = networks.mllm.config.representation_size
    length = layout.protocol.caption_length

    def window(games: int) -> rollout.Window:
        return rollout.empty_window(layout, games, size)

    def instruction(games: int) -> rollout.Instruction:
        return rollout.Instruction(
            jnp.zeros((games, length), jnp.int32), jnp.ones((games,), jnp.int32)
        )

    def keys(games: int) -> jax.Array:
        return jax.vmap(jax.random.key)(jnp.zeros((games,), jnp.uint32))

    if part == "turn":
        return (
            functools.partial(rollout.play_turn, layout=layout, table=table),
            lambda games: (
                window(games),
                instruction(games),
                keys(games),
                jnp.zeros((), jnp.int32),
            ),
        )
    if part == "mllm":
        return (
            functools.partial(rollout.predict_state, layout=layout),
            lambda games: (window(games), instruction(games)),
        )
    if part == "vae":
        return rollout.decode_clip, lambda games: (
            jnp.zeros((games, *rollout.latent_shape(networks.dit))),
        )

    def decode(networks: rollout.Networks, state: rollout.GameState, keys: jax.Array) -> Any:
        start = rollout.start_clip(networks.dit, keys)
        return rollout.denoise(networks, state, start, table, keys)

    return decode, lambda games: (
        rollout.GameState(
            jnp.zeros((games, layout.num_queries, size)),
            jnp.zeros((games, 4), jnp.int32),
            jnp.zeros((games,)),
        ),
        keys(games),
    )
