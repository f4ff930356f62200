"""The configurations to compile: what the options mean, what a sweep tries, what is nearest."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from animegamer_jax.errors import UserError, check_at_least

if TYPE_CHECKING:
    from animegamer_jax.plan.topology import Topology
    from animegamer_jax.train.stages.recipe import Recipe

StageName = Literal["warmup", "decoder", "mllm", "adapt", "distill", "rollout"]
PartName = Literal["turn", "mllm", "decoder", "vae"]
SizeName = Literal["toy", "full"]
LAYOUTS = {"training": ("sharded", "replicated"), "play": ("latency", "throughput")}
_REMATS = ("full", "dots", "none")
_TRAINING_OPTIONS = ("batch_size", "remat", "accumulate", "trained")
_PLAY_OPTIONS = ("part", "games", "denoising_steps", "history", "student", "rows", "int8")
_STUDENT_STEPS = 4
_MAX_STEPS = 1000  # of denoising
_LARGER = 2  # number of larger slices to try if nothing fits the given one

Candidate = tuple["Configuration", "Topology"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """One program to compile, with all defaults filled in.

    Attributes:
        stage: A training stage, or "rollout".
        size: Size of the networks.
        layout: Name of the sharding plan.
        mesh: Sizes of all mesh axes.
        batch_size, remat, accumulate, trained: Settings of the recipe; None for the rollout.
        part, games, denoising_steps, history, student, rows, int8: Settings of the rollout
            (`programs.rollout_program`).
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
    history: Literal["predicted", "shown"] = "predicted"
    student: bool = False
    rows: tuple[int, ...] = ()
    int8: bool = False

    @property
    def changes(self) -> dict[str, Any]:
        """Changes of the recipe, for a training stage."""
        return {name: getattr(self, name) for name in _TRAINING_OPTIONS}

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {n}" for name, n in self.mesh.items() if n > 1) or "one chip"
        if self.stage == "rollout":
            settings = [f"{self.games} game{'s' * (self.games != 1)}"]
            settings += [f"part {self.part}"] if self.part != "turn" else []
            settings += [f"history {self.history}"] if self.history != "predicted" else []
            settings += [f"student of {self.denoising_steps} steps"] if self.student else []
            settings += ["language model int8"] if self.int8 else []
            settings += [f"{sum(self.rows)} evaluations of a row"] if self.rows else []
        else:
            settings = [f"batch size {self.batch_size}", f"remat {self.remat}"]
            settings += [f"accumulate {self.accumulate}"] if self.accumulate != 1 else []
            settings += ["all weights trained"] if self.trained == "all" else []
        return ", ".join([f"layout {self.layout} ({axes})", *settings])

    @property
    def command(self) -> str | None:
        """The command that trains with this configuration; None for the rollout.

        Its steps see as many samples as the recipe's, of which the report gives the chip-hours.
        """
        samples = recipe_samples(self)
        if samples is None or self.batch_size is None:
            return None
        axes = [f"--{name} {self.mesh[name]}" for name in ("context", "tensor")]
        fixed = _has_fixed_weights(_recipe(self.stage, self.size, {}))
        words = [
            f"animegamer train {self.stage} --size {self.size}",
            f"--layout {self.layout} --fsdp {self.mesh['fsdp']}",
            *(word for word in axes if not word.endswith(" 1")),
            f"--steps {math.ceil(samples / self.batch_size)}",
            f"--batch-size {self.batch_size} --remat {self.remat} --accumulate {self.accumulate}",
            *([] if fixed else [f"--trained {self.trained}"]),
            "--data DATA --model MODEL --out OUT",
        ]
        return " ".join(words)

    def fields(self) -> dict[str, Any]:
        """Returns plain data, without the settings of the other kind of program."""
        others = _TRAINING_OPTIONS if self.stage == "rollout" else _PLAY_OPTIONS
        found = {k: v for k, v in dataclasses.asdict(self).items() if k not in others}
        return {**found, "command": self.command, "configuration": str(self)}


def make_configuration(
    stage: StageName,
    topology: "Topology",
    *,
    size: SizeName = "full",
    mesh: tuple[str, ...] = (),
    layout: str | None = None,
    **given: Any,
) -> Configuration:
    """Fills in the defaults of the command's options.

    Args:
        stage: A training stage, or "rollout".
        topology: The slice.
        size: Size of the networks.
        mesh: Sizes of mesh axes as on the command line, such as `fsdp=4`.
        layout: Name of a sharding plan; None: by stage and slice.
        given: The other options of `Configuration`; None: not given.

    Raises:
        UserError: The options do not fit each other, the stage or the slice.
    """
    from animegamer_jax.train.mesh import default_layout

    plays = stage == "rollout"
    kind, others = ("play", _TRAINING_OPTIONS) if plays else ("training", _PLAY_OPTIONS)
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name in others:
            other = "training" if plays else "play: --stage rollout"
            if name == "rows":
                name = "skip"
            raise UserError(f"{_option(name)} is an option of {other}, found --stage {stage}")
    for name in ("batch_size", "accumulate", "games", "denoising_steps"):
        check_at_least(_option(name), given.get(name), 1)
    if given.get("denoising_steps", 1) > _MAX_STEPS:
        found = given["denoising_steps"]
        raise UserError(f"--denoising-steps {found}: expected 1 to {_MAX_STEPS}")
    if layout is not None and layout not in LAYOUTS[kind]:
        raise UserError(
            f"--layout {layout}: expected one of {', '.join(LAYOUTS[kind])} for --stage {stage}"
        )
    sizes = _read_mesh(mesh, chips=topology.num_devices) if mesh else None
    shares = sizes is not None and sizes["fsdp"] > 1
    if layout == "replicated" and shares:
        raise UserError(
            "--layout replicated keeps all weights on each device, --mesh fsdp shares them: "
            "expected one of the two"
        )
    recipe = None if plays else _recipe(stage, size, given)
    if recipe and "trained" in given and _has_fixed_weights(recipe):
        raise UserError(f"--trained: stage {stage} always trains the same weights: leave it out")
    if layout is None and recipe and shares:
        layout = "sharded"
    layout = layout or default_layout(
        stage,
        num_devices=topology.num_devices,
        memory_gb=topology.chip.usable_gb,
        trains_all=recipe is not None and recipe.trained == "all",
    )
    if sizes is None:  # each slice holds all weights
        sizes = _plan_shape(layout, topology.num_devices // topology.slices)
        sizes["data"] *= topology.slices
    shape = sizes
    if shape["data"] % topology.slices:
        raise UserError(
            f"--slices {topology.slices}: they share the batch alone, expected a divisor of the "
            f"mesh axis data, found data={shape['data']}"
        )
    if recipe is None:
        settings = _play_settings(shape, size=size, layout=layout, given=given)
    else:
        settings = _training_settings(recipe, shape, stage=stage, size=size, given=given)
    return Configuration(stage=stage, size=size, layout=layout, mesh=shape, **settings)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _training_settings(
    recipe: "Recipe", mesh: Mapping[str, int], *, stage: str, size: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    from animegamer_jax.configs import SIZES
    from animegamer_jax.train.mesh import check_mesh

    unit = mesh["data"] * mesh["fsdp"] * recipe.accumulate
    if "batch_size" not in given:
        batch = math.ceil(recipe.batch_size / unit) * unit
        recipe = dataclasses.replace(recipe, batch_size=batch)
    check_mesh(recipe, mesh, SIZES[size](), stage)
    return {name: getattr(recipe, name) for name in _TRAINING_OPTIONS}


def _play_settings(
    mesh: Mapping[str, int], *, size: str, layout: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    from animegamer_jax.configs import SIZES
    from animegamer_jax.train.mesh import check_divides

    dit = SIZES[size]().dit
    assert dit is not None
    if mesh["tensor"] > 1:
        raise UserError(
            f"--mesh tensor={mesh['tensor']}: the rollout uses data, fsdp and context: leave it out"
        )
    for axis, what, total in (
        ("context", "the rows of latents", dit.latent_height),
        ("fsdp", "the rows of guidance", 2),
    ):
        if axis == "context" or layout == "latency":
            check_divides(f"--mesh {axis}={mesh[axis]}", mesh[axis], what=what, size=total)
    steps = given.get("denoising_steps", _STUDENT_STEPS if given.get("student") else 50)
    if given.get("student") and given.get("rows"):
        raise UserError("--skip: a student skips no steps: leave out --student or --skip")
    if rows := given.get("rows", ()):
        if "denoising_steps" in given and len(rows) != steps:
            raise UserError(
                f"--skip: steps to skip of {len(rows)}, found --denoising-steps {steps}: leave "
                "that option out"
            )
        steps = len(rows)
    groups = _num_groups(layout, mesh)
    games = given.get("games", groups)
    if games % groups:
        raise UserError(
            f"--games {games}: expected a multiple of {groups}, the number of groups of chips"
        )
    return {**given, "games": games, "denoising_steps": steps}


def _num_groups(layout: str, mesh: Mapping[str, int]) -> int:
    """Returns the number of groups of chips; along fsdp a group holds both rows of guidance."""
    return mesh["data"] * (mesh["fsdp"] if layout == "throughput" else 1)


def _recipe(stage: str, size: str, changes: Mapping[str, Any]) -> "Recipe":
    from animegamer_jax.train.registry import find_stage

    return dataclasses.replace(find_stage(stage, size=size)[1], **changes)


def _has_fixed_weights(recipe: "Recipe") -> bool:
    """Returns whether the stage's command has no option `--trained`."""
    from animegamer_jax.train.stages.recipe import FixedRecipe

    return isinstance(recipe, FixedRecipe)


def recipe_samples(configuration: Configuration) -> int | None:
    """Returns the number of samples in a stage's whole recipe; None for the rollout."""
    if configuration.stage == "rollout":
        return None
    recipe = _recipe(configuration.stage, configuration.size, {})
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
            raise UserError(f"--mesh {' '.join(words)}: found {name} twice")
        shape[name] = int(size)
    product = math.prod(shape.values())
    if "data" not in shape and chips % product == 0:
        shape["data"] = chips // product
    if math.prod(shape.values()) != chips:
        raise UserError(
            f"--mesh {' '.join(words)}: {product} devices, found {chips} in the slice: expected "
            "sizes whose product is that number, or without data a divisor of it"
        )
    return _all_axes(shape)


# Sweeps


def sweep_configurations(
    configuration: Configuration, topology: "Topology", *, given: Collection[str]
) -> Iterator[Configuration]:
    """Yields other meshes, batches and remat policies of a stage, or layouts and games of play.

    The options that were `given` stay unchanged.
    """
    make = _sweep_play if configuration.stage == "rollout" else _sweep_training
    yield from make(configuration, topology.num_devices, given)


def _sweep_training(
    start: Configuration, chips: int, given: Collection[str]
) -> Iterator[Configuration]:
    meshes = [(start.layout, start.mesh)]
    if "mesh" not in given:
        meshes = [("replicated", _all_axes({"data": chips}))]
        meshes += [
            ("sharded", _all_axes({"data": chips // n, "fsdp": n}))
            for n in (4, 16, 64, 256)
            if chips % n == 0
        ]
        meshes = [m for m in meshes if "layout" not in given or m[0] == start.layout]
        meshes = meshes or [(start.layout, start.mesh)]
    remats = [start.remat] if "remat" in given else _REMATS
    for (name, shape), share, remat in itertools.product(meshes, (1, 2, 4), remats):
        batch = share * (start.accumulate or 1) * shape["data"] * shape["fsdp"]
        if "batch_size" in given:
            if share > 1 or (start.batch_size or 0) % batch:
                continue
            batch = start.batch_size
        yield dataclasses.replace(start, layout=name, mesh=shape, batch_size=batch, remat=remat)


def _sweep_play(
    start: Configuration, chips: int, given: Collection[str]
) -> Iterator[Configuration]:
    layouts = {start.layout: start.mesh}
    if not {"mesh", "layout"} & set(given):
        layouts = {name: mesh for name in LAYOUTS["play"] if (mesh := _fitting_mesh(name, chips))}
    for name, shape in layouts.items():
        groups = _num_groups(name, shape)
        for games in (start.games,) if "games" in given else (groups, 4 * groups):
            if games % groups == 0:
                yield dataclasses.replace(start, layout=name, mesh=shape, games=games)


def _fitting_mesh(layout: str, chips: int) -> dict[str, int] | None:
    try:
        return _plan_shape(layout, chips)
    except UserError:
        return None


# What may fit instead


def nearest_configurations(configuration: Configuration, topology: "Topology") -> list[Candidate]:
    """Returns what may fit if a configuration does not, the nearest first, without duplicates.

    On the same slice: full remat, a batch in more parts, weights shared by more chips, a smaller
    batch; for play fewer games and the other layout. Then larger slices of the same chip.
    """
    near = _near_play if configuration.stage == "rollout" else _near_training
    found: list[Candidate] = []
    for other in near(configuration, topology):
        if other != (configuration, topology) and other not in found:
            found.append(other)
    return found


def _near_training(start: Configuration, topology: "Topology") -> Iterator[Candidate]:
    assert start.batch_size is not None
    full, chips = dataclasses.replace(start, remat="full"), topology.num_devices
    inner = start.mesh["context"] * start.mesh["tensor"]  # chips that share a sample
    yield full, topology
    yield from ((c, topology) for c in _share_more(full, chips // inner, batch=start.batch_size))
    *_, most = _share_more(full, chips // inner, batch=chips // inner)
    yield most, topology
    for larger in larger_slices(topology):
        if larger.num_devices % inner == 0:
            shards = larger.num_devices // inner
            batch = math.ceil(start.batch_size / shards) * shards
            *_, most = _share_more(full, shards, batch=batch)
            yield most, larger


def _share_more(start: Configuration, shards: int, *, batch: int) -> Iterator[Configuration]:
    """Yields the batch in as many parts as possible, with weights shared by more and all chips."""
    more = [n for n in range(start.mesh["fsdp"] + 1, shards + 1) if shards % n == 0]
    fits = start.mesh["data"] * start.mesh["fsdp"] == shards
    meshes = [(start.layout, start.mesh)] if fits else []
    for fsdp in dict.fromkeys((*more[:1], *more[-1:])):
        meshes.append(("sharded", {**start.mesh, "data": shards // fsdp, "fsdp": fsdp}))
    for layout, mesh in meshes:
        yield dataclasses.replace(
            start, layout=layout, mesh=mesh, batch_size=batch, accumulate=batch // shards
        )


def _near_play(start: Configuration, topology: "Topology") -> Iterator[Candidate]:
    games, groups = start.games, _num_groups(start.layout, start.mesh)
    while games > groups:
        games = max(groups, games // 4 // groups * groups)
        yield dataclasses.replace(start, games=games), topology
    for slice_ in (topology, *larger_slices(topology)):
        shape = _fitting_mesh("latency", slice_.num_devices)
        if shape is None:
            continue
        games = math.ceil(start.games / shape["data"]) * shape["data"]
        for count in dict.fromkeys((games, shape["data"])):
            yield dataclasses.replace(start, layout="latency", mesh=shape, games=count), slice_


def larger_slices(topology: "Topology") -> list["Topology"]:
    """Returns the next larger slices of the same chip."""
    from animegamer_jax.plan.topology import rented_shapes

    size = math.prod(topology.shape)
    larger = [shape for shape in rented_shapes(topology.chip) if math.prod(shape) > size]
    return [dataclasses.replace(topology, shape=shape) for shape in larger[:_LARGER]]
