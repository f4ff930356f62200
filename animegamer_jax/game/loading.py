"""From a bundle to networks that are ready to play: checked, merged, and placed on devices."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from animegamer_jax.configs import (
    ModelConfig,
    disagreements,
    feature_disagreements,
)
from animegamer_jax.errors import UserError
from animegamer_jax.game.rollout import Networks
from animegamer_jax.models.dit import fix_most_score, tabulate_modulation
from animegamer_jax.models.encoder import ShotEncoder, ShotNetworks
from animegamer_jax.models.linear import merge_low_rank, quantize_weights
from animegamer_jax.protocol import Protocol
from animegamer_jax.sharding import PLANS, ShardingPlan, make_mesh, play_plan, use_plan
from animegamer_jax.tokenizer import Tokenizer

Placement = tuple[Mesh, ShardingPlan]


def check_fit(
    config: ModelConfig, *, history: str = "predicted", picture_first: bool = False
) -> None:
    """Checks that the networks of a configuration can play together.

    Args:
        config: Configuration of each network.
        history: Value of `Protocol.history`.
        picture_first: Value of `Protocol.picture_first`.

    Raises:
        UserError: A network is missing, or sizes of two networks differ; names all problems.
    """
    missing = [n for n in ("mllm", "encoder", "dit", "vae") if getattr(config, n) is None]
    if missing:
        raise UserError(f"cannot play without {', '.join(missing)}: convert these networks, too")
    problems = [f"{size}: {problem}" for size, problem in disagreements(config).items()]
    if history == "shown" or picture_first:
        if config.clip is None or config.encoder is None:
            if picture_first:
                raise UserError(
                    "cannot play without clip: this model draws a picture first, and sees it: "
                    "use the whole model"
                )
            raise UserError(
                "cannot play with history shown without clip: use a model with CLIP, or play with "
                "--history predicted"
            )
        differ = feature_disagreements(dataclasses.replace(config, t5=None))
        problems += [f"{size}: encoder {e}, clip {c}" for size, (e, c) in differ.items()]
    if config.picture is not None and not picture_first:
        problems.append("picture: a decoder of pictures, and a protocol without a picture first")
    if config.dit and config.dit.latent_frames % 2 == 0:
        problems.append(f"latent frames: dit {config.dit.latent_frames}, vae an odd number")
    if problems:
        raise UserError("the networks do not fit together: " + "; ".join(problems))


def load_networks(
    bundle: Any, protocol: Protocol, *, dtype: str | None, placement: Placement | None, int8: bool
) -> Networks:
    """Loads the networks needed to play, with low-rank updates merged into the weights.

    Args:
        bundle: The bundle that has them.
        protocol: The protocol of the games.
        dtype: Number format of activations and weights; the bundle's own if None.
        placement: The mesh and the plan by which they are read to devices. None: one device.
        int8: Whether the language model's weights are rounded to eight bits.

    Raises:
        UserError: A network is damaged.
    """

    def load(name: str) -> Any:
        options: Any = {"dtype": dtype, "param_dtype": dtype}
        if placement is not None:
            rules = placement[1].of("dit" if name == "picture" else name)  # as it runs
            options |= {"mesh": placement[0], "rules": rules}
        network = bundle.load(name, **options)
        merge_low_rank(network)
        if name in ("dit", "picture"):
            fix_most_score(network)
            if protocol.student_timesteps:
                with use_placement(placement):
                    timesteps = protocol.student_timesteps
                    tabulate_modulation(network, timesteps, protocol.motion_values)
        elif name == "mllm" and int8:
            quantize_weights(network)
        return network

    mllm, dit, vae, encoder = map(load, ("mllm", "dit", "vae", "encoder"))
    with use_placement(placement):
        unconditional = jax.jit(_unconditional)(encoder)
    shot = ShotNetworks(load("clip"), encoder) if protocol.sees_frames else None
    picture = load("picture") if bundle.has("picture") else None
    return Networks(mllm, dit, vae, unconditional, shot, picture)


def load_tokenizer(bundle: Any) -> Tokenizer:
    """Loads a bundle's tokenizer, whose tokens the language model must have."""
    mllm = bundle.config.mllm
    return Tokenizer.load(
        bundle.tokenizer_dir, vocab_size=mllm.mistral.vocab_size, num_queries=mllm.num_queries
    )


def _unconditional(encoder: ShotEncoder) -> jax.Array:
    return encoder.unconditional()


def make_placement(layout: str, num_games: int | None, *, guided: bool) -> Placement:
    """Makes the mesh of a plan from all devices, or from as many as the games need.

    Raises:
        UserError: There is no such plan, the devices do not fit it, or there are several hosts.
    """
    if layout not in PLANS:
        raise UserError(f"layout {layout}: expected one of {', '.join(PLANS)}")
    if jax.process_count() > 1:
        raise UserError(f"layout {layout}: expected one host, found {jax.process_count()}")
    plan, devices = play_plan(layout, guided=guided), jax.devices()
    try:
        if num_games is not None:
            groups = plan.mesh_shape(len(devices))["data"]
            used = max(n for n in range(1, groups + 1) if groups % n == 0 and num_games % n == 0)
            devices = devices[: len(devices) // groups * used]
        return make_mesh(plan.mesh_shape(len(devices)), devices=devices), plan
    except ValueError as error:
        raise UserError(str(error)) from error


@contextlib.contextmanager
def use_placement(placement: Placement | None) -> Iterator[None]:
    """Traces programs for the mesh and by its plan within the block."""
    if placement is None:
        yield
        return
    with jax.set_mesh(placement[0]), use_plan(placement[1]):
        yield
