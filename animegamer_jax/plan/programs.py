"""The programs that are planned: a stage's training step and a turn of the game.

Their arguments are shapes with shardings; no weight and no activation is ever allocated.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import abstract_network
from animegamer_jax.bundle.config import with_dtypes
from animegamer_jax.configs import SIZES, ModelConfig
from animegamer_jax.convert.networks import with_lora
from animegamer_jax.game import rollout
from animegamer_jax.game.saved.turns import History
from animegamer_jax.models.dit import DiT, tabulate_modulation
from animegamer_jax.models.encoder import ShotNetworks
from animegamer_jax.models.linear import quantize_weights
from animegamer_jax.plan.abstract_inputs import AbstractBundle, write_tokenizer
from animegamer_jax.protocol import PAPER, Layout
from animegamer_jax.sharding import (
    ShardingPlan,
    network_rules,
    overlapping_gathers,
    param_shardings,
    use_plan,
)
from animegamer_jax.tokenizer import Tokenizer
from animegamer_jax.train.registry import find_stage
from animegamer_jax.train.stages.base import Stage
from animegamer_jax.train.stages.mllm import MLLMStage
from animegamer_jax.train.stages.recipe import Recipe
from animegamer_jax.train.step import (
    abstract_state,
    batch_sharding,
    make_train_step,
    stage_optimizer,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function and abstract arguments, ready to lower.

    Attributes:
        name: Description of the program.
        jitted: The jitted function.
        arguments: Shapes with shardings.
        samples: Samples of a call.
        unit: Unit of a sample: "clips", "games" or "turns".
        flops: FLOPs of a sample by the stage's own count; None: it has none.
        tokens: Tokens of a sample of the language model's training; None: another program.
        branch_shares: How often each branch of a conditional with as many branches runs, where
            that is known; others count by their most expensive branch.
    """

    name: str
    jitted: Any
    arguments: tuple[Any, ...]
    samples: int
    unit: str
    flops: float | None
    tokens: int | None = None
    branch_shares: tuple[float, ...] = ()

    def lower(self, mesh: Mesh, plan: ShardingPlan) -> Any:
        """Lowers the program for the mesh's devices."""
        # The compiler accepts only the default precision for bfloat16 products in a kernel.
        precision = jax.default_matmul_precision("default")
        with precision, jax.sharding.use_abstract_mesh(mesh.abstract_mesh), use_plan(plan):
            return self.jitted.lower(*self.arguments)


def _abstract(tree: Any, sharding: Any, *leading: int) -> Any:
    """Returns the shapes of arrays, with leading dimensions added, all with one sharding."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*leading, *x.shape), x.dtype, sharding=sharding), tree
    )


def _sharded(tree: Any, shardings: Any) -> Any:
    """Adds a sharding to each shape or parameter."""
    return jax.tree.map(
        lambda sharding, part: _abstract(part, sharding),
        shardings,
        tree,
        is_leaf=lambda x: isinstance(x, NamedSharding),
    )


def _replicated(tree: Any, mesh: Mesh) -> Any:
    return _abstract(tree, NamedSharding(mesh, PartitionSpec()))


def make_stage(
    name: str, size: str, folder: Path, **changes: Any
) -> tuple[Stage[Any], AbstractBundle]:
    """Makes a stage of a named size with a bundle of shapes; `changes` are of its recipe."""
    stage_class, recipe = find_stage(name, size=size)
    recipe = dataclasses.replace(recipe, **changes)
    config, protocol = SIZES[size](), PAPER
    tokenizer = write_tokenizer(folder, config)
    stage = stage_class(recipe, config, protocol, tokenizer_dir=tokenizer)
    # A stage may add parameters, as a memory's positions: the bundle already has them.
    return stage, AbstractBundle(stage.config, protocol, folder=folder)


def stage_program(
    name: str, *, mesh: Mesh, plan: ShardingPlan, size: str = "full", **changes: Any
) -> Program:
    """Returns the training step of a stage, named as on the command line, with a changed recipe."""
    with tempfile.TemporaryDirectory() as temporary:
        stage, bundle = make_stage(name, size, Path(temporary), **changes)
        recipe: Recipe = stage.recipe
        with use_plan(plan):
            networks = stage.load(bundle, mesh=mesh)
            optimizer = stage_optimizer(stage)
            state, shardings = abstract_state(networks, stage, optimizer, mesh=mesh)
            batch = _abstract(stage.sample_spec(), batch_sharding(mesh), recipe.batch_size)
        key = jax.eval_shape(lambda: jax.random.key(0))
        step = make_train_step(stage, optimizer, shardings=shardings)
        return Program(
            name=f"{name} step, {recipe.batch_size} {stage.unit}",
            jitted=step,
            arguments=(_sharded(state, shardings), batch, _replicated(key, mesh)),
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


def abstract_networks(
    config: ModelConfig,
    *,
    mesh: Mesh,
    plan: ShardingPlan,
    history: History = "predicted",
    int8: bool = False,
    student_timesteps: Sequence[int] = (),
) -> rollout.Networks:
    """Returns the networks needed to play, as bfloat16 shapes sharded by the plan.

    With `int8` the language model's weights have eight bits. The decoder is a distilled one if it
    has `student_timesteps`.
    """

    def one(name: Any) -> nnx.Module:
        network_config = with_dtypes(
            getattr(config, name), dtype="bfloat16", param_dtype="bfloat16"
        )
        if name in ("mllm", "dit"):  # a player merges low-rank updates when it loads them
            network_config = with_lora(name, network_config, None)
        network = abstract_network(name, network_config)
        if isinstance(network, DiT):  # as `fix_most_score` notes for weights of the usual size
            blocks: Any = network.layers.blocks
            blocks.most_score = 0.0
            if student_timesteps:
                tabulate_modulation(network, student_timesteps, PAPER.motion_values)
        if name == "mllm" and int8:
            quantize_weights(network)
        graphdef, state = nnx.split(network)
        return nnx.merge(graphdef, _sharded(state, param_shardings(state, mesh, plan.of(name))))

    encoder: Any = config.encoder
    shape = (encoder.num_text_tokens + encoder.num_image_tokens, encoder.representation_size)
    unconditional = _replicated(jax.ShapeDtypeStruct(shape, jnp.bfloat16), mesh)
    shown: Any = (one("clip"), one("encoder")) if history == "shown" else None
    networks: Any = (one("mllm"), one("dit"), one("vae"), unconditional)
    return rollout.Networks(*networks, shot=shown and ShotNetworks(*shown))


def rollout_program(
    *,
    mesh: Mesh,
    plan: ShardingPlan,
    size: str = "full",
    games: int = 1,
    steps: int = 50,
    part: str = "turn",
    history: History = "predicted",
    student: bool = False,
    rows: tuple[int, ...] = (),
    int8: bool = False,
) -> Program:
    """Returns a turn from instruction to frames, or its part "mllm", "decoder" or "vae".

    Args:
        mesh: The devices.
        plan: The sharding plan.
        size: Size of the networks.
        games: Games played at once.
        steps: Denoising steps.
        part: Part of the turn.
        history: As `Protocol.history`.
        student: Whether the decoder is a distilled one, without guidance.
        rows: Rows of guidance that each step evaluates (`SkippedSteps.rows`); empty: all.
        int8: Whether the language model's weights have eight bits.
    """
    config, protocol = SIZES[size](), dataclasses.replace(PAPER, history=history)
    table = diffusion.make_sampler_table(diffusion.schedule_of(protocol), steps)
    networks = abstract_networks(
        config,
        mesh=mesh,
        plan=plan,
        history=history,
        int8=int8,
        student_timesteps=[int(step) for step in table.timestep] if student else (),
    )
    if student:
        networks = networks._replace(unconditional=None)
    c = networks.mllm.config
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_tokenizer(Path(temporary), config)
        tokenizer = Tokenizer.load(folder, num_queries=c.num_queries)
    layout = Layout(protocol, tokenizer.ids, num_queries=c.num_queries, window=protocol.window)
    if rows:
        table = table._replace(rows=np.array(rows, np.int32))

    def denoise(networks: rollout.Networks, state: rollout.GameState, keys: jax.Array) -> Any:
        dit, unconditional = networks.dit, networks.unconditional
        count = rollout.num_residuals(table, unconditional)
        start = rollout.start_clip(dit, keys, rows=count)
        return rollout.denoise_clip(dit, unconditional, state, start, table, keys)

    description, function, network = {
        "turn": (
            f"whole turn, {steps} steps",
            functools.partial(rollout.play_turn, layout=layout, table=table),
            networks,
        ),
        "mllm": (
            "game state",
            functools.partial(rollout.predict_state, layout=layout),
            networks.mllm,
        ),
        "decoder": (
            f"{steps} denoising steps {'without' if student else 'with'} guidance",
            denoise,
            networks,
        ),
        "vae": ("decoding the clip", rollout.decode_clip, networks.vae),
    }[part]

    def make_arguments() -> tuple[Any, ...]:
        size = c.representation_size
        window = rollout.empty_window(layout, games, size, networks.first_dit.config.memory_shape)
        captions = jnp.zeros((games, protocol.caption_length), jnp.int32)
        instruction = rollout.Instruction(captions, jnp.ones((games,), jnp.int32))
        keys = jax.vmap(jax.random.key)(jnp.zeros((games,), jnp.uint32))
        representation = jnp.zeros((games, layout.num_queries, size))
        states = jnp.zeros((games, 4), jnp.int32)
        state = rollout.GameState(representation, states, jnp.zeros((games,)))
        return {
            "turn": (window, instruction, keys, jnp.zeros((), jnp.int32)),
            "mllm": (window, instruction),
            "decoder": (state, keys),
            "vae": (jnp.zeros((games, *rollout.latent_shape(networks.dit))),),
        }[part]

    with use_plan(plan), network_rules("mllm"):
        arguments = jax.eval_shape(make_arguments)
    return Program(
        name=f"{description}, {games} game{'s' * (games != 1)}",
        jitted=jax.jit(function, compiler_options=overlapping_gathers(mesh)),
        arguments=(network, *_replicated(arguments, mesh)),
        samples=games,
        unit="turns",
        flops=None,
        branch_shares=tuple(rows.count(n) / len(rows) for n in range(3)) if rows else (),
    )
