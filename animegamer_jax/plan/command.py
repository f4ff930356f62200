"""`animegamer plan`: what a stage or a turn needs on a TPU slice, by the TPU's compiler."""

import json as jsonlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from animegamer_jax.errors import UserError
from animegamer_jax.plan.compiled.compiler import CrashError, NoRoomError, compile_program
from animegamer_jax.plan.configurations import (
    Configuration,
    PartName,
    SizeName,
    StageName,
    make_configuration,
    nearest_configurations,
    sweep_configurations,
)
from animegamer_jax.plan.report import CAVEAT, Found, as_object, describe_estimate
from animegamer_jax.progress import print_status

if TYPE_CHECKING:
    from animegamer_jax.plan.topology import Topology

_BEST = 5  # estimates that a sweep prints


def plan(
    stage: StageName,
    topology: str,
    slices: int = 1,
    mesh: tuple[str, ...] = (),
    layout: str | None = None,
    batch_size: Annotated[int | None, tyro.conf.arg(aliases=("--batch",))] = None,
    remat: Literal["none", "dots", "full"] | None = None,
    accumulate: int | None = None,
    trained: Literal["recipe", "all"] | None = None,
    part: PartName | None = None,
    games: int | None = None,
    denoising_steps: int | None = None,
    history: Literal["predicted", "shown"] | None = None,
    student: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    skip: Path | None = None,
    int8: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    size: SizeName = "full",
    sweep: bool = False,
    price: float | None = None,
    json: bool = False,
) -> int:
    """Compile a training step or a turn for a TPU slice; print memory, time and cost.

    Args:
        stage: Training stage to plan, or `rollout` for a turn of the game.
        topology: Slice, as a chip and its torus, such as v5e:4x4, v6e:2x4, v5p:4x4x4 or
            tpu7x:2x2x1.
        slices: Number of such slices, which share the batch over the network between them.
        mesh: Sizes of mesh axes, such as data=4 fsdp=16. Default: those of the layout.
        layout: Layout of weights and activations: sharded or replicated for a training stage,
            latency or throughput for the rollout. Default: by stage and slice.
        batch_size: Samples of a training step. Default: the recipe's, rounded up to a multiple of
            the parts into which the slice splits a batch.
        remat: Which activations the backward pass recomputes. Default: the recipe's.
        accumulate: Number of parts of a batch, computed one after the other. Default: the recipe's.
        trained: Weights to train. Default: the recipe's.
        part: Part of a turn: all of it, the game state (mllm), the denoising (decoder) or the
            frames (vae). Default: all of it.
        games: Games played at once. Default: one for each group of chips.
        denoising_steps: Denoising steps of a turn, 1 to 1000. Default: 50; 4 for a student.
        history: Past shot representations: `predicted`, or `shown`, encoded by CLIP and E_a from
            the first frame of each clip, which needs more weights. Default: predicted.
        student: Plan for a decoder distilled to four steps without guidance.
        skip: File of denoising steps to skip, as `animegamer calibrate` writes it. Default: none.
        int8: Plan for a language model whose weights are rounded to eight bits.
        size: Size of the networks.
        sweep: Try combinations of the options that are not given (mesh, layout, batch size, remat,
            games), and print the best that fit.
        price: Price of a chip for an hour, to print the cost of the whole recipe or 1,000 turns.
            Default: no cost is printed.
        json: Print one JSON object and nothing else.

    Raises:
        UserError: The slice, the mesh or the recipe does not fit, or no program fits a chip.
    """
    # Only libtpu's compiler is needed: JAX must not look for chips on this machine.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from animegamer_jax.game.skipped_steps import SkippedSteps
    from animegamer_jax.plan.topology import parse_topology

    if price is not None and not 0 < price < float("inf"):
        raise UserError(f"--price {price}: expected a number above 0")
    wanted = parse_topology(topology, slices=slices)
    options = {
        "batch_size": batch_size,
        "remat": remat,
        "accumulate": accumulate,
        "trained": trained,
        "part": part,
        "games": games,
        "denoising_steps": denoising_steps,
        "history": history,
        "student": student or None,
        "int8": int8 or None,
        "rows": None if skip is None else SkippedSteps.read(skip).rows,
    }
    configuration = make_configuration(
        stage, wanted, size=size, mesh=mesh, layout=layout, **options
    )
    if sweep:
        given = {name for name, value in options.items() if value is not None}
        given |= {name for name, value in {"mesh": mesh, "layout": layout}.items() if value}
        return _run_sweep(configuration, wanted, given=given, price=price, as_json=json)
    print_status(f"{configuration} on {wanted}: compiling, which takes minutes at full size")
    try:
        estimate = compile_program(configuration, wanted)
    except NoRoomError as error:
        raise _find_nearest(configuration, wanted, error, price=price, as_json=json) from None
    _print([(configuration, estimate)], price=price, as_json=json)
    return 0


def _find_nearest(
    wanted: Configuration,
    topology: "Topology",
    error: NoRoomError,
    *,
    price: float | None,
    as_json: bool,
) -> UserError:
    """Returns the error for a program that does not fit, with the nearest one that does."""
    print_status(f"{wanted} on {topology}: {error}")
    tried: list[str] = []
    found: Found | None = None
    for other, slice_ in nearest_configurations(wanted, topology):
        try:
            found = other, compile_program(other, slice_)
            break
        except (NoRoomError, CrashError) as no_room:
            tried.append(f"{other} on {slice_}")
            print_status(f"{tried[-1]}: {no_room}")
    if as_json:
        content = as_object([], price=price, refused=error, nearest=found)
        print(jsonlib.dumps(content, indent=1))
    hint = "there is nothing else to try"
    if found is not None:
        other, e = found
        hint = f"the nearest found to fit is {other} on {e.topology}: peak {e.memory.peak:.1f} GB"
    elif tried:
        hint = f"nor does any of {len(tried)} others: {'; '.join(tried)}"
    return UserError(f"{wanted} on {topology}: {error}; {hint}")


def _run_sweep(
    start: Configuration,
    topology: "Topology",
    *,
    given: set[str],
    price: float | None,
    as_json: bool,
) -> int:
    found: list[Found] = []
    configurations = list(sweep_configurations(start, topology, given=given))
    error: NoRoomError | None = None
    for number, configuration in enumerate(configurations, 1):
        try:
            estimate = compile_program(configuration, topology)
        except CrashError as crash:
            result = str(crash)
        except NoRoomError as no_room:
            result, error = str(no_room), no_room
        else:
            result = f"{estimate.seconds.total:.2f} s, peak {estimate.memory.peak:.1f} GB"
            found.append((configuration, estimate))
        print_status(f"{number} of {len(configurations)}: {configuration}: {result}")
    if not configurations:
        raise UserError(f"{start.stage} on {topology}: nothing to try with the given options")
    if not found:
        if as_json:
            print(jsonlib.dumps(as_object([], price=price, refused=error), indent=1))
        count = len(configurations)
        raise UserError(f"{start.stage} on {topology}: none of {count} programs fits")
    found.sort(key=lambda pair: -pair[1].samples_per_second)
    _print(found[:_BEST], price=price, as_json=as_json)
    return 0


def _print(found: list[Found], *, price: float | None, as_json: bool) -> None:
    if as_json:
        print(jsonlib.dumps(as_object(found, price=price), indent=1))
        return
    for configuration, estimate in found:
        lines = describe_estimate(configuration, estimate, price=price)
        print("\n".join(lines), end="\n\n")
    print(CAVEAT)
