"""`animegamer plan`: what a stage or a turn of the game needs of a TPU slice, by its compiler."""

import json as jsonlib
import os
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from animegamer_jax.errors import UserError
from animegamer_jax.plan.cases import (
    Case,
    PartName,
    SizeName,
    StageName,
    first_case,
    nearest_cases,
    sweep_cases,
)
from animegamer_jax.plan.compiler import NoRoomError, compile_case
from animegamer_jax.plan.report import CAVEAT, Found, as_object, describe_estimate

if TYPE_CHECKING:
    from animegamer_jax.plan.topology import Topology

_BEST = 5  # lines of a sweep


def plan(
    stage: StageName,
    topology: str,
    mesh: tuple[str, ...] = (),
    layout: str | None = None,
    batch_size: Annotated[int | None, tyro.conf.arg(aliases=("--batch",))] = None,
    remat: Literal["none", "dots", "full"] | None = None,
    accumulate: int | None = None,
    trained: Literal["recipe", "all"] | None = None,
    part: PartName | None = None,
    games: int | None = None,
    denoising_steps: int | None = None,
    size: SizeName = "full",
    sweep: bool = False,
    price: float | None = None,
    json: bool = False,
) -> int:
    """Compile a stage's step or a turn for a TPU slice, and tell memory, time and cost.

    Args:
        stage: What to plan.
        topology: The slice: a chip and its torus, such as v5e:4x4, v6e:2x4, v5p:4x4x4.
        mesh: Sizes of mesh axes (data=4 fsdp=16); default: what the layout says.
        layout: How weights and activations lie: sharded or whole for a stage, latency or throughput
            for the rollout; default: by stage and slice.
        batch_size: Samples a step; default: the recipe's, or as many as the slice needs.
        remat: What the backward pass computes again; default: the recipe's.
        accumulate: Parts of a batch, one after the other; default: the recipe's.
        trained: What is trained; default: the recipe's.
        part: Of a turn: all of it, the game state, the denoising, or the frames; default: all.
        games: That are played at once; default: one for each group of chips.
        denoising_steps: Of a turn; default: 50.
        size: Of the networks.
        sweep: Try what was not given of meshes, batches, remat policies, layouts of play and games,
            and tell the best that fit.
        price: Of a chip and hour, for the cost of the whole recipe or of 1,000 turns.
        json: Print one JSON object and nothing else.

    Raises:
        UserError: the slice, the mesh or the recipe does not fit; a program fits no chip.
    """
    # The slice is described to libtpu's compiler; JAX itself must not look for its chips here.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if "jax" not in sys.modules:  # a chip's program is not for this machine: no cache reads it back
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    from animegamer_jax.plan.topology import parse_topology

    if price is not None and not 0 < price < float("inf"):
        raise UserError(f"--price {price}: expected a number above 0")
    wanted = parse_topology(topology)
    options = {
        "batch_size": batch_size,
        "remat": remat,
        "accumulate": accumulate,
        "trained": trained,
        "part": part,
        "games": games,
        "denoising_steps": denoising_steps,
    }
    case = first_case(stage, wanted, size=size, mesh=mesh, layout=layout, **options)
    if sweep:
        given = {name for name, value in options.items() if value is not None}
        given |= {name for name, value in {"mesh": mesh, "layout": layout}.items() if value}
        return _sweep(case, wanted, given=given, price=price, as_json=json)
    try:
        estimate = compile_case(case, wanted)
    except NoRoomError as error:
        raise _refused(case, wanted, error, price=price, as_json=json) from None
    _print([(case, estimate)], price=price, as_json=json)
    return 0


def _refused(
    case: Case, topology: "Topology", error: NoRoomError, *, price: float | None, as_json: bool
) -> UserError:
    """What to tell of a program that does not fit: the nearest one that does."""
    _tell(f"{case} on {topology}: {error}")
    tried: list[str] = []
    nearest: Found | None = None
    for other, slice_ in nearest_cases(case, topology):
        told = f"{other} on {slice_}"
        try:
            nearest = other, compile_case(other, slice_)
        except NoRoomError as no_room:
            _tell(f"{told}: {no_room}")
            tried.append(told)
        else:
            break
    if as_json:
        found = as_object([], price=price, refused=error, nearest=nearest)
        print(jsonlib.dumps(found, indent=1))
    mend = (
        f"nor does any of {len(tried)} others: {'; '.join(tried)}" if tried else "nothing is near"
    )
    if nearest is not None:
        at, e = nearest
        mend = f"the nearest found to fit is {at} on {e.topology}: peak {e.memory.peak:.1f} GB"
    return UserError(f"{case} on {topology}: {error}; {mend}")


def _sweep(
    case: Case, topology: "Topology", *, given: set[str], price: float | None, as_json: bool
) -> int:
    found: list[Found] = []
    cases = list(sweep_cases(case, topology, given=given))
    error: NoRoomError | None = None
    for number, other in enumerate(cases, 1):
        try:
            estimate = compile_case(other, topology)
        except NoRoomError as no_room:
            told, error = str(no_room), no_room
        else:
            told = f"{estimate.seconds.total:.2f} s, peak {estimate.memory.peak:.1f} GB"
            found.append((other, estimate))
        _tell(f"{number} of {len(cases)}: {other}: {told}")
    if not cases:
        raise UserError(f"{case.stage} on {topology}: nothing to try with what was given")
    if not found:
        if as_json:
            print(jsonlib.dumps(as_object([], price=price, refused=error), indent=1))
        raise UserError(f"{case.stage} on {topology}: none of {len(cases)} programs fits")
    found.sort(key=lambda pair: -pair[1].samples_per_second)
    _print(found[:_BEST], price=price, as_json=as_json)
    return 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print(found: list[Found], *, price: float | None, as_json: bool) -> None:
    if as_json:
        print(jsonlib.dumps(as_object(found, price=price), indent=1))
        return
    for case, estimate in found:
        print("\n".join(describe_estimate(case, estimate, price=price)), end="\n\n")
    print(CAVEAT)
