"""Which programs are planned: what the options mean, what a sweep tries, what is near."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from animegamer_jax.errors import UserError

if TYPE_CHECKING:
    from animegamer_jax.plan.topology import Topology
    from animegamer_jax.train.stages.recipe import Recipe

StageName = Literal["warmup", "decoder", "mllm", "adapt", "rollout"]
PartName = Literal["turn", "mllm", "decoder", "vae"]
SizeName = Literal["toy", "full"]
LAYOUTS = {"training": ("sharded", "whole"), "play": ("latency", "throughput")}
_REMATS = ("full", "dots", "none")
_OF_TRAINING = ("batch_size", "remat", "accumulate", "trained")
_OF_PLAY = ("part", "games", "denoising_steps")
_MOST_STEPS = 1000  # of denoising
# Slices that Google rents, by the directions of a chip's torus; smallest first.
_SLICES = {
    2: ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    3: (
        (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8),
        (8, 8, 16), (8, 16, 16),
    ),
}  # fmt: skip
_LARGER = 2  # slices that are tried where nothing on the given one fits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One program to compile, with everything that was left to defaults.

    Attributes:
        stage: a stage of training, or "rollout".
        size: of the networks.
        layout: name of the plan.
        mesh: sizes of all mesh axes.
        batch_size, remat, accumulate, trained: of the recipe; None for the rollout.
        part, games, denoising_steps: of the rollout.
    """

    stage: StageName
    size: SizeName
    layout: str
    mesh: Mapping[str, int]
    batch_size: int | None = None
    remat: str | None = None
    accumulate: int | None = None
    trained: str | None = None
    part: PartName = "turn"
    games: int = 1
    denoising_steps: int = 50

    @property
    def changes(self) -> dict[str, Any]:
        """Of the recipe, for a stage of training."""
        return {name: getattr(self, name) for name in _OF_TRAINING}

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {n}" for name, n in self.mesh.items() if n > 1) or "one chip"
        if self.stage == "rollout":
            told = [f"{self.games} game{'s' * (self.games != 1)}"]
            told += [f"part {self.part}"] if self.part != "turn" else []
        else:
            told = [f"batch size {self.batch_size}", f"remat {self.remat}"]
            told += [f"accumulate {self.accumulate}"] if self.accumulate != 1 else []
            told += ["all weights trained"] if self.trained == "all" else []
        return ", ".join([f"layout {self.layout} ({axes})", *told])

    @property
    def command(self) -> str | None:
        """The command that trains what was planned; None for the rollout."""
        if self.stage == "rollout":
            return None
        axes = [f"--{name} {self.mesh[name]}" for name in ("context", "tensor")]
        fixed = _trains_the_same(_recipe(self.stage, self.size, {}))
        words = [
            f"animegamer train {self.stage} --size {self.size}",
            f"--layout {self.layout} --fsdp {self.mesh['fsdp']}",
            *(word for word in axes if not word.endswith(" 1")),
            f"--batch-size {self.batch_size} --remat {self.remat} --accumulate {self.accumulate}",
            *([] if fixed else [f"--trained {self.trained}"]),
            "--data DATA --model MODEL --out OUT",
        ]
        return " ".join(words)

    def fields(self) -> dict[str, Any]:
        """As plain data: of training what is of training, of the rollout what is of it."""
        others = _OF_TRAINING if self.stage == "rollout" else _OF_PLAY
        found = {k: v for k, v in dataclasses.asdict(self).items() if k not in others}
        return {**found, "command": self.command, "case": str(self)}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def first_case(
    stage: StageName,
    topology: "Topology",
    *,
    size: SizeName = "full",
    mesh: tuple[str, ...] = (),
    layout: str | None = None,
    **given: Any,
) -> Case:
    """What the command's options mean.

    Args:
        stage: what is planned.
        topology: the slice.
        size: of the networks.
        mesh: words such as `fsdp=4`.
        layout: name of a plan; None: by stage and slice.
        given: the other options of `Case`; None: not given.

    Raises:
        UserError: they contradict each other, the stage or the slice.
    """
    kind, of_others = ("play", _OF_TRAINING) if stage == "rollout" else ("training", _OF_PLAY)
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name in of_others:
            other = "training" if kind == "play" else "play: --stage rollout"
            raise UserError(f"{_option(name)} is of {other}, found --stage {stage}")
    for name in ("batch_size", "accumulate", "games", "denoising_steps"):
        if given.get(name, 1) < 1:
            raise UserError(f"{_option(name)} {given[name]}: expected 1 or more")
    if given.get("denoising_steps", 1) > _MOST_STEPS:
        found = given["denoising_steps"]
        raise UserError(f"--denoising-steps {found}: expected 1 to {_MOST_STEPS}")
    if layout is not None and layout not in LAYOUTS[kind]:
        raise UserError(
            f"--layout {layout}: expected one of {', '.join(LAYOUTS[kind])} for --stage {stage}"
        )
    sizes = _read_mesh(mesh, chips=topology.num_chips) if mesh else None
    make = _play_case if stage == "rollout" else _training_case
    return make(stage, topology, size=size, sizes=sizes, layout=layout, given=given)


def _training_case(
    stage: StageName,
    topology: "Topology",
    *,
    size: SizeName,
    sizes: dict[str, int] | None,
    layout: str | None,
    given: Mapping[str, Any],
) -> Case:
    from animegamer_jax.configs import SIZES
    from animegamer_jax.train.mesh import check_mesh

    recipe = _recipe(stage, size, given)
    if "trained" in given and _trains_the_same(recipe):
        raise UserError(f"--trained: stage {stage} always trains the same weights: leave it out")
    shares = sizes is not None and sizes["fsdp"] > 1
    if layout == "whole" and shares:
        raise UserError(
            "--layout whole keeps all weights on each device, which --mesh fsdp shares: "
            "expected one of them"
        )
    if layout is None:
        layout = _default_layout(stage, topology, trains_all=recipe.trained == "all")
        layout = "sharded" if shares else layout
    shape = sizes or _plan_shape(layout, topology.num_chips)
    unit = shape["data"] * shape["fsdp"] * recipe.accumulate
    if "batch_size" not in given:
        batch = math.ceil(recipe.batch_size / unit) * unit
        recipe = dataclasses.replace(recipe, batch_size=batch)
    check_mesh(recipe, shape, SIZES[size](), stage)
    changes = {name: getattr(recipe, name) for name in _OF_TRAINING}
    return Case(stage=stage, size=size, layout=layout, mesh=shape, **changes)


def _play_case(
    stage: StageName,
    topology: "Topology",
    *,
    size: SizeName,
    sizes: dict[str, int] | None,
    layout: str | None,
    given: Mapping[str, Any],
) -> Case:
    from animegamer_jax.configs import SIZES
    from animegamer_jax.train.mesh import check_divides

    if layout is None:
        layout = _default_layout(stage, topology, trains_all=False)
    shape = sizes or _plan_shape(layout, topology.num_chips)
    dit = SIZES[size]().dit
    assert dit is not None
    if shape["tensor"] > 1:
        raise UserError(
            f"--mesh tensor={shape['tensor']}: play shares over data, fsdp and context: leave it "
            "out"
        )
    parts = shape["context"]
    told, height = f"--mesh context={parts}", dit.latent_height
    check_divides(told, parts, what="the rows of latents", size=height)
    # A game's devices along fsdp hold its two rows of guidance; of `throughput`, other games.
    groups = shape["data"]
    if layout == "latency":
        parts = shape["fsdp"]
        check_divides(f"--mesh fsdp={parts}", parts, what="the rows of guidance", size=2)
    else:
        groups *= shape["fsdp"]
    games = given.get("games", groups)
    if games % groups:
        raise UserError(
            f"--games {games}: expected a multiple of {groups}, so many groups of chips play"
        )
    options = {"games": games, **{k: given[k] for k in ("part", "denoising_steps") if k in given}}
    return Case(stage=stage, size=size, layout=layout, mesh=shape, **options)


def _default_layout(stage: StageName, topology: "Topology", *, trains_all: bool) -> str:
    from animegamer_jax.train.mesh import default_layout

    return default_layout(
        stage,
        num_devices=topology.num_chips,
        memory_gb=topology.chip.usable_gb,
        trains_all=trains_all,
    )


def _recipe(stage: str, size: str, changes: Mapping[str, Any]) -> "Recipe":
    from animegamer_jax.train.registry import find_stage

    return dataclasses.replace(find_stage(stage, size=size)[1], **changes)


def _trains_the_same(recipe: "Recipe") -> bool:
    """Whether `trained` is no option of the stage's command."""
    from animegamer_jax.train.stages.recipe import FixedRecipe

    return isinstance(recipe, FixedRecipe)


def recipe_samples(case: Case) -> int | None:
    """That the stage's whole recipe goes through; None for the rollout."""
    if case.stage == "rollout":
        return None
    recipe = _recipe(case.stage, case.size, {})
    return recipe.steps * recipe.batch_size


def _all_axes(shape: Mapping[str, int]) -> dict[str, int]:
    from animegamer_jax.sharding import MESH_AXES

    return {name: shape.get(name, 1) for name in MESH_AXES}


def _plan_shape(name: str, chips: int) -> dict[str, int]:
    from animegamer_jax.sharding import PLANS

    try:
        return _all_axes(PLANS[name].mesh_shape(chips))
    except ValueError as error:
        raise UserError(f"--layout {name}: {error}") from None


def _read_mesh(words: tuple[str, ...], *, chips: int) -> dict[str, int]:
    from animegamer_jax.sharding import MESH_AXES

    shape: dict[str, int] = {}
    for word in words:
        name, _, size = word.partition("=")
        if name not in MESH_AXES or not size.isdigit() or int(size) < 1:
            raise UserError(f"--mesh {word}: expected AXIS=SIZE, an axis of {', '.join(MESH_AXES)}")
        if name in shape:
            raise UserError(f"--mesh {' '.join(words)}: {name} is there twice")
        shape[name] = int(size)
    product = math.prod(shape.values())
    if "data" not in shape and chips % product == 0:
        shape["data"] = chips // product
    if math.prod(shape.values()) != chips:
        raise UserError(
            f"--mesh {' '.join(words)}: {product} devices, found {chips} in the slice: a divisor "
            "of them without data, or sizes whose product they are"
        )
    return _all_axes(shape)


# Others


def sweep_cases(case: Case, topology: "Topology", *, given: Collection[str]) -> Iterator[Case]:
    """Other meshes, batches and remat policies of a stage; other layouts and games of play.

    Args:
        case: what the options mean.
        topology: the slice.
        given: names of the options that were given, which stay as they are.
    """
    if case.stage == "rollout":
        yield from _sweep_play(case, topology, given=given)
        return
    chips, accumulate = topology.num_chips, case.accumulate or 1
    meshes = [(case.layout, case.mesh)]
    if "mesh" not in given:
        meshes = [("whole", _all_axes({"data": chips}))]
        meshes += [("sharded", _shared(chips, n)) for n in (4, 16, 64, 256) if chips % n == 0]
        meshes = [m for m in meshes if "layout" not in given or m[0] == case.layout]
        meshes = meshes or [(case.layout, case.mesh)]
    remats = [case.remat] if "remat" in given else _REMATS
    for (name, shape), share, remat in itertools.product(meshes, (1, 2, 4), remats):
        batch = share * accumulate * shape["data"] * shape["fsdp"]
        if "batch_size" in given:
            if share > 1 or (case.batch_size or 0) % batch:
                continue
            batch = case.batch_size
        yield dataclasses.replace(case, layout=name, mesh=shape, batch_size=batch, remat=remat)


def _sweep_play(case: Case, topology: "Topology", *, given: Collection[str]) -> Iterator[Case]:
    from animegamer_jax.sharding import PLANS

    layouts = [(case.layout, case.mesh)]
    if not {"mesh", "layout"} & set(given):
        layouts = []
        for name in LAYOUTS["play"]:
            try:
                layouts.append((name, _all_axes(PLANS[name].mesh_shape(topology.num_chips))))
            except ValueError:
                continue
    for name, shape in layouts:
        groups = shape["data"] * (shape["fsdp"] if name == "throughput" else 1)
        for games in (case.games,) if "games" in given else (groups, 4 * groups):
            if games % groups == 0:
                yield dataclasses.replace(case, layout=name, mesh=shape, games=games)


def _shared(chips: int, fsdp: int) -> dict[str, int]:
    return _all_axes({"data": chips // fsdp, "fsdp": fsdp})


def nearest_cases(case: Case, topology: "Topology") -> list[tuple[Case, "Topology"]]:
    """What may fit where a case does not, the nearest first, none twice.

    On the same slice: more computed again, in more parts, weights shared by more chips, a smaller
    batch; of play the other layout and fewer games. Then larger slices of the same chip.
    """
    near = _near_play if case.stage == "rollout" else _near_training
    found: list[tuple[Case, Topology]] = []
    for other in near(case, topology):
        if other != (case, topology) and other not in found:
            found.append(other)
    return found


def _near_training(case: Case, topology: "Topology") -> Iterator[tuple[Case, "Topology"]]:
    assert case.batch_size is not None
    full, chips = dataclasses.replace(case, remat="full"), topology.num_chips
    yield full, topology
    yield from ((c, topology) for c in _shared_more(full, chips, batch=case.batch_size))
    smallest = chips // _inner(case)
    *_, most = _shared_more(full, chips, batch=smallest)
    yield most, topology
    for larger in larger_slices(topology):
        if larger.num_chips % _inner(case) == 0:
            shards = larger.num_chips // _inner(case)
            batch = math.ceil(case.batch_size / shards) * shards
            *_, most = _shared_more(full, larger.num_chips, batch=batch)
            yield most, larger


def _inner(case: Case) -> int:
    """Chips that share a sample."""
    return case.mesh["context"] * case.mesh["tensor"]


def _shared_more(case: Case, chips: int, *, batch: int) -> Iterator[Case]:
    """A batch in as many parts as can be; then weights shared by more chips, then by all."""
    shards = chips // _inner(case)
    more = [n for n in range(case.mesh["fsdp"] + 1, shards + 1) if shards % n == 0]
    meshes = [(case.layout, case.mesh)] if math.prod(case.mesh.values()) == chips else []
    for fsdp in dict.fromkeys((*more[:1], *more[-1:])):
        meshes.append(("sharded", {**case.mesh, "data": shards // fsdp, "fsdp": fsdp}))
    for layout, mesh in meshes:
        parts = batch // shards
        yield dataclasses.replace(
            case, layout=layout, mesh=mesh, batch_size=batch, accumulate=parts
        )


def _near_play(case: Case, topology: "Topology") -> Iterator[tuple[Case, "Topology"]]:
    from animegamer_jax.sharding import PLANS

    games = case.games
    groups = case.mesh["data"] * (case.mesh["fsdp"] if case.layout == "throughput" else 1)
    while games > groups:
        games = max(groups, games // 4 // groups * groups)
        yield dataclasses.replace(case, games=games), topology
    for slice_ in (topology, *larger_slices(topology)):
        try:
            shape = _all_axes(PLANS["latency"].mesh_shape(slice_.num_chips))
        except ValueError:
            continue
        games = math.ceil(case.games / shape["data"]) * shape["data"]
        for count in dict.fromkeys((games, shape["data"])):
            other = dataclasses.replace(case, layout="latency", mesh=shape, games=count)
            yield other, slice_


def larger_slices(topology: "Topology") -> list["Topology"]:
    """The next ones of the same chip."""
    shapes = _SLICES[topology.chip.dimensions]
    larger = [shape for shape in shapes if math.prod(shape) > topology.num_chips]
    return [dataclasses.replace(topology, shape=shape) for shape in larger[:_LARGER]]
