"""`animegamer train STAGE`: the options of a stage, and the checks before it starts.

The recipe's own fields are options, with the values of the recipe of that stage and size as
defaults, so what a command line means is known only when `--size` and `--part` have been read.
"""

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from etils import epath

from animegamer_jax.configs import SIZES, ModelConfig, disagreements
from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import (
    absolute,
    telling,
)
from animegamer_jax.train.mesh import (
    check_mesh,
    default_layout,
    mesh_shape,
)
from animegamer_jax.train.stages.recipe import Recipe

if TYPE_CHECKING:
    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.protocol import Protocol
    from animegamer_jax.sharding import ShardingPlan
    from animegamer_jax.train.loop import Run
    from animegamer_jax.train.stages.base import DataSource, Stage

STAGES = ("foundations", "warmup", "decoder", "mllm", "adapt")
PARTS = ("clip", "t5", "vae", "dit")
_STARTED = ("checkpoints", "events")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What every stage is told beside its recipe.

    Attributes:
        data: Data sets to train on, each a folder, or FOLDER=WEIGHT for its share of the samples.
        out: The folder for checkpoints, events, metrics.jsonl, and at the end model/: a path that
            all hosts share, or gs://.
        model: The bundle to start from: the model/ of the stage before.
        part: Which of the foundations.
        size: Of networks that the bundle does not have, and of the recipe.
        start: Go on from the last checkpoint in the output folder, or begin anew in its place.
        result: Which weights model/ gets at the end: those of the last step, or of the checkpoint
            with the least held-out loss.
        threads: That read data.
        fsdp: Devices that share every weight; the rest of the devices share the batch alone. None:
            as many as the layout has.
        tensor: Devices that share every head and layer.
        context: Devices that share every sequence.
        layout: Layout of the weights: sharded over --fsdp devices, or replicated on each device.
            None: sharded with --fsdp or --tensor; else replicated for --size toy; else what suits
            stage and devices, as in `animegamer plan`.
        peak_tflops: Of one chip in bfloat16, for the MFU, where its kind is unknown.
        coordinator: HOST:PORT of host 0, where JAX does not find the hosts by itself (it does on
            TPU machines and under Slurm).
        hosts: How many there are, with --coordinator.
        host: The number of this one, with --coordinator.
        connect_seconds: To wait for the other hosts.
    """

    data: tuple[str, ...]
    out: str
    model: str | None = None
    part: Literal["clip", "t5", "vae", "dit"] | None = None
    size: Literal["toy", "full"] = "toy"
    start: Literal["resume", "anew"] = "resume"
    result: Literal["last", "best"] = "last"
    threads: int = 2
    fsdp: int | None = None
    tensor: int = 1
    context: int = 1
    layout: Literal["sharded", "replicated"] | None = None
    peak_tflops: float | None = None
    coordinator: str | None = None
    hosts: int | None = None
    host: int | None = None
    connect_seconds: int = 300


class StageCommand:
    """The command of one stage: `for_words(words)` is the function that takes its options."""

    def __init__(self, stage: str):
        self.stage = stage

    def for_words(self, words: list[str]) -> Callable[..., int]:
        """The function with the defaults of the size and part that the command line names.

        Raises:
            UserError: the stage has no such part, or no recipe of this size; or --data is there
                twice, of which only the last one would count.
        """
        if sum(word.partition("=")[0] == "--data" for word in words) > 1:
            raise UserError("--data: found twice: expected once, all sets behind it: --data A B")
        part = _option(words, "--part")
        if _asks_help(words) and self.stage == "foundations":
            part = part or PARTS[0]
        stage, recipe = find_stage(self.stage, part=part, size=_option(words, "--size") or "toy")

        return make_command(stage, recipe)


def make_command(stage: type["Stage[Any]"], recipe: Recipe) -> Callable[..., int]:
    """The function of a stage whose arguments are the command's options."""

    def train(options: Options, recipe: Recipe = recipe) -> int:
        return start(stage, options, recipe)

    train.__doc__ = (stage.__doc__ or stage.name).splitlines()[0]
    flat = tyro.conf.arg(name="")  # no prefix: --out, --steps, --optimizer.learning-rate
    for function in (train, inspect.unwrap(train)):  # tests wrap it to check types
        function.__annotations__ = {
            "options": Annotated[Options, flat],
            "recipe": Annotated[type(recipe), flat],
            "return": int,
        }
    return train


def _option(words: list[str], name: str) -> str | None:
    """The value of an option in a command line, the last one if it is there several times."""
    found = None
    for i, word in enumerate(words):
        if word == name and i + 1 < len(words):
            found = words[i + 1]
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def _asks_help(words: list[str]) -> bool:
    return any(word in ("-h", "--help") for word in words)


def find_stage(
    name: str, *, part: str | None = None, size: str = "toy"
) -> tuple[type["Stage[Any]"], Recipe]:
    """The class of a stage and its recipe of a size.

    Raises:
        UserError: there is no such stage, part or recipe.
    """
    if name not in STAGES:
        raise UserError(f"unknown stage {name!r}: expected one of {', '.join(STAGES)}")
    if (name == "foundations") != (part is not None):
        told = f"stage {name}: expected --part, one of {', '.join(PARTS)}, found none"
        if part is not None:
            told = f"stage {name}: --part {part}: only foundations has parts: leave it out"
        raise UserError(told)
    module = importlib.import_module(f"animegamer_jax.train.stages.{name}")
    if part is None:
        stage, recipes = module.STAGE, module.RECIPES
    elif part in module.PARTS:
        stage, recipes = module.PARTS[part], module.RECIPES[part]
    else:
        raise UserError(f"--part {part}: expected one of {', '.join(PARTS)}")
    if size not in SIZES:
        raise UserError(f"--size {size}: expected one of {', '.join(SIZES)}")
    if size not in recipes:
        raise UserError(
            f"--size {size}: {stage.name} has recipes for {', '.join(recipes)} only: convert the "
            "released networks instead (`animegamer initialise`)"
        )
    return stage, recipes[size]


def sources(words: tuple[str, ...]) -> tuple["DataSource", ...]:
    """Data sets from the command line's DIR or DIR=WEIGHT.

    Raises:
        UserError: there is none, or a weight is no positive number.
    """
    from animegamer_jax.train.stages.base import DataSource

    if not words:
        raise UserError("--data: expected one data set or more, found none")
    found = []
    for word in words:
        path, equals, weight = word.rpartition("=")
        if not equals or Path(word).exists():
            found.append(DataSource(word))
            continue
        try:
            share = float(weight)
        except ValueError:
            share = math.nan
        if not (math.isfinite(share) and share > 0):
            raise UserError(f"--data {word}: expected DIR=WEIGHT with a number above 0")
        found.append(DataSource(path, share))
    return tuple(found)


def check_needs(stage: type["Stage[Any]"], bundle: "Bundle | None", *, model: str | None) -> None:
    """Makes sure that the stages before this one have been trained.

    A stage may train a network further that an earlier one made: that it is there does not tell.
    A bundle that knows its stages is asked for them; the foundations need not be among them, since
    released networks stand in their place.

    Raises:
        UserError: a network is missing, or a stage; it names the stage to train.
    """
    for name, maker in stage.needs.items():
        if bundle is None or not bundle.has(name):
            where = "no --model was given" if model is None else f"{model} has no such network"
            raise UserError(
                f"stage {stage.name} needs the network {name}, which stage {maker} makes, but "
                f"{where}: train {maker} first, and give its result with --model"
            )
    done = None if bundle is None else bundle.info.stages
    for maker in stage.needs.values():
        if done is not None and maker in STAGES and maker not in done:
            raise UserError(
                f"stage {stage.name} needs a model that stage {maker} has trained, but {model} has "
                f"been through {', '.join(done) or 'none'} only: train {maker} first, and give its "
                "result with --model"
            )


def _with_vocabulary(config: ModelConfig, size: int) -> ModelConfig:
    """The configuration with all vocabularies of one size."""
    changes: dict[str, Any] = {}
    for name in ("clip", "t5"):
        network = getattr(config, name)
        if network is not None:
            changes[name] = dataclasses.replace(network, vocab_size=size)
    if config.mllm is not None:
        mistral = dataclasses.replace(config.mllm.mistral, vocab_size=size)
        changes["mllm"] = dataclasses.replace(config.mllm, mistral=mistral)
    return dataclasses.replace(config, **changes)


def complete_config(bundle: "Bundle | None", *, size: str, vocab_size: int | None) -> ModelConfig:
    """The bundle's networks, and those of `size` where it has none.

    Raises:
        UserError: they do not fit together.
    """
    config = SIZES[size]()
    if vocab_size is not None:
        config = _with_vocabulary(config, vocab_size)
    if bundle is None:
        return config
    own = {
        field.name: getattr(bundle.config, field.name)
        for field in dataclasses.fields(ModelConfig)
        if getattr(bundle.config, field.name) is not None
    }
    config = dataclasses.replace(config, **own)
    for what, said in disagreements(config).items():
        raise UserError(f"{bundle.path}: --size {size} does not fit this bundle: {what}: {said}")
    return config


def _tokenizer_and_protocol(
    bundle: "Bundle | None", *, data: "DataSource", size: str
) -> tuple[Path, "Protocol"]:
    """Returns the bundle's, or for the first stage of a toy those of its dataset."""
    if bundle is not None:
        return bundle.tokenizer_dir, bundle.protocol
    if size != "toy":
        raise UserError(
            f"--size {size}: expected --model with the pre-trained networks: `animegamer "
            "initialise` makes such a bundle"
        )
    from animegamer_jax.bundle.vocabulary import local_tokenizer
    from animegamer_jax.data.datasets import read_info

    protocol = read_info(data.path).protocol
    hint = "make the dataset again with `animegamer data toyworld`, or start from a --model"
    return local_tokenizer(absolute(data.path), hint=hint), protocol


def _layout(stage: str, options: Options, recipe: Recipe) -> "ShardingPlan":
    """The plan as told, or the one that suits."""
    import jax

    from animegamer_jax.devices import find_chip
    from animegamer_jax.sharding import PLANS

    if options.layout is not None:
        return PLANS[options.layout]
    if (options.fsdp or 1) * options.tensor > 1:
        return PLANS["sharded"]
    if options.size == "toy":  # gathering its weights would cost more than they do
        return PLANS["replicated"]
    chip = find_chip(jax.devices()[0].device_kind)
    name = default_layout(
        stage,
        num_devices=jax.device_count(),
        memory_gb=None if chip is None else chip.usable_gb,
        trains_all=recipe.trained == "all",
    )
    return PLANS[name]


def _clear(out: epath.Path) -> None:
    """Removes what an earlier run left, but for its result.

    Raises:
        UserError: storage refused.
    """
    with telling(out, "cannot be cleared", mend="remove it, or choose another --out"):
        for name in _STARTED:
            if (out / name).exists():
                (out / name).rmtree()
        (out / "metrics.jsonl").unlink(missing_ok=True)


def start(stage_class: type["Stage[Any]"], options: Options, recipe: Recipe) -> int:
    """Checks everything that can be checked at once, and trains.

    Raises:
        UserError: something does not fit.
    """
    from animegamer_jax.devices import keep_compiled_programs

    keep_compiled_programs()
    import jax

    from animegamer_jax.distributed import (
        check_agreement,
        join_hosts,
        together,
    )

    join_hosts(
        coordinator=options.coordinator,
        hosts=options.hosts,
        host=options.host,
        seconds=options.connect_seconds,
    )
    from animegamer_jax.sharding import use_plan
    from animegamer_jax.train.loop import train

    with together():
        run, plan = make_run(stage_class, options, recipe)
        about = run.about()
        how = {"mesh": dict(run.mesh.shape), "layout": plan.name}
        how |= {"start": options.start, "result": options.result}
    check_agreement({**about, **how, "out": f"{run.out}"})
    with together():
        if options.start == "anew" and jax.process_index() == 0:
            _clear(run.out)
    with use_plan(plan):
        return train(run)


def make_run(
    stage_class: type["Stage[Any]"], options: Options, recipe: Recipe
) -> tuple["Run", "ShardingPlan"]:
    """What the options mean, on the devices that there are.

    Raises:
        UserError: something does not fit.
    """
    import jax

    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.sharding import make_mesh
    from animegamer_jax.tokenizer import Tokenizer
    from animegamer_jax.train.loop import Run

    data = sources(options.data)
    plan = _layout(stage_class.name, options, recipe)
    shape = mesh_shape(
        plan,
        num_devices=jax.device_count(),
        fsdp=options.fsdp,
        context=options.context,
        tensor=options.tensor,
    )
    bundle = None if options.model is None else Bundle.open(options.model)
    check_needs(stage_class, bundle, model=options.model)
    out = absolute(options.out)
    tokenizer_dir, protocol = _tokenizer_and_protocol(bundle, data=data[0], size=options.size)
    num_queries = 1  # of frame tokens the stage asks itself
    vocab_size = len(Tokenizer.load(tokenizer_dir, num_queries=num_queries))
    config = complete_config(bundle, size=options.size, vocab_size=vocab_size)
    check_mesh(recipe, shape, config, stage_class.name)
    run = Run(
        stage=stage_class(recipe, config, protocol, tokenizer_dir=tokenizer_dir),
        bundle=bundle,
        sources=data,
        out=out,
        mesh=make_mesh(shape),
        threads=options.threads,
        peak=options.peak_tflops,
        result=options.result,
    )
    return run, plan


foundations = StageCommand("foundations")
warmup = StageCommand("warmup")
decoder = StageCommand("decoder")
mllm = StageCommand("mllm")
adapt = StageCommand("adapt")
