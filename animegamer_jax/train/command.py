"""`animegamer train STAGE`: the options of a stage, and the checks before it starts.

The recipe's fields are options too; their defaults are those of the recipe for the given stage,
part and size. So `--size` and `--part` are read from the command line before it is parsed.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from etils import epath

from animegamer_jax.configs import SIZES, Dtype, ModelConfig, disagreements
from animegamer_jax.distributed import HostOptions
from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import absolute, user_errors
from animegamer_jax.train.mesh import check_mesh, default_layout, mesh_shape
from animegamer_jax.train.registry import PARTS, STAGES, find_stage
from animegamer_jax.train.stages.recipe import Recipe

if TYPE_CHECKING:
    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.protocol import Protocol
    from animegamer_jax.sharding import ShardingPlan
    from animegamer_jax.train.run import TrainingRun
    from animegamer_jax.train.stages.base import DataSource, Stage

_STARTED = ("checkpoints", "events")  # folders of a started run


_FLAT = tyro.conf.arg(name="")  # options without a prefix: --out, --steps, --host


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every stage besides its recipe.

    Attributes:
        data: Datasets to train on. Each is a folder, or FOLDER=WEIGHT to set the weight of its
            samples, by default 1.
        out: Output folder for checkpoints/, events/, metrics.jsonl and, at the end, model/, on a
            path that all hosts share or in a bucket (gs://).
        model: Bundle to start from: model/ of the stage before, or `toy` for the embedded model.
            The first stage needs none.
        part: Part of the foundations to train, required for these and for no other stage.
        size: Size of the recipe, and of networks that the bundle does not have.
        start: Whether to resume from the last checkpoint in the output folder, or to delete the run
            there and start a fresh one.
        export_checkpoint: Weights that model/ gets at the end: those of the last step, or of the
            checkpoint with the best held-out score.
        threads: Number of data-loading threads.
        fsdp: Number of devices that share every weight; the other devices share only the batch.
            Default: as many as the layout has.
        tensor: Number of devices that share every head and layer.
        context: Number of devices that share every sequence.
        slices: Number of TPU slices. Default: those of the devices; another number simulates
            slices on devices that belong to none.
        layout: Layout of the weights: sharded over --fsdp devices, or replicated on each device.
            Default: sharded with --fsdp or --tensor; else replicated for --size toy; else what
            suits stage and devices, as in `animegamer plan`.
        peak_tflops: Peak bfloat16 TFLOP/s of one chip, used for the MFU. Default: that of the table
            of chips, if the chip is in it.
        host_options: Options for several hosts.
    """

    data: tuple[str, ...]
    out: str
    model: str | None = None
    part: Literal["clip", "t5", "vae", "dit"] | None = None
    size: Literal["toy", "full"] = "toy"
    start: Literal["resume", "fresh"] = "resume"
    export_checkpoint: Literal["last", "best"] = "last"
    threads: int = 2
    fsdp: int | None = None
    tensor: int = 1
    context: int = 1
    slices: int | None = None
    layout: Literal["sharded", "replicated"] | None = None
    peak_tflops: float | None = None
    host_options: Annotated[HostOptions, _FLAT] = dataclasses.field(default_factory=HostOptions)


class StageCommand:
    """The command of one stage; `for_words` returns the function that takes its options."""

    def __init__(self, stage: str):
        self.stage = stage

    def for_words(self, words: list[str]) -> Callable[..., int]:
        """Returns the function with the defaults of the command line's size and part.

        Raises:
            UserError: The stage has no such part or no recipe of this size, or --data is given
                twice, of which only the last one would count.
        """
        if sum(word.partition("=")[0] == "--data" for word in words) > 1:
            raise UserError("--data: found twice: expected once, with all datasets: --data A B")
        part = _option(words, "--part")
        if {"-h", "--help"} & {*words} and self.stage == "foundations":
            part = part or PARTS[0]
        stage, recipe = find_stage(self.stage, part=part, size=_option(words, "--size") or "toy")
        return make_command(stage, recipe)


def make_command(stage: type["Stage[Any]"], recipe: Recipe) -> Callable[..., int]:
    """Returns the function of a stage whose arguments are the command's options."""

    def train(options: Options, recipe: Recipe = recipe) -> int:
        return start(stage, options, recipe)

    train.__doc__ = (stage.__doc__ or stage.name).splitlines()[0]
    for function in (train, inspect.unwrap(train)):  # tests wrap it to check types
        function.__annotations__ = {
            "options": Annotated[Options, _FLAT],
            "recipe": Annotated[type(recipe), _FLAT],
            "return": int,
        }
    return train


def _option(words: list[str], name: str) -> str | None:
    """Returns the value of an option in a command line, the last if it is given several times."""
    found = None
    for i, word in enumerate(words):
        if word == name and i + 1 < len(words):
            found = words[i + 1]
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def sources(words: tuple[str, ...]) -> tuple["DataSource", ...]:
    """Returns the datasets of the command line's FOLDER or FOLDER=WEIGHT.

    Raises:
        UserError: There is none, or a weight is not a positive number.
    """
    from animegamer_jax.train.stages.base import DataSource

    if not words:
        raise UserError("--data: expected at least one dataset, found none")
    found = []
    for word in words:
        path, equals, weight = word.rpartition("=")
        if not equals or Path(word).exists():
            found.append(DataSource(word))
            continue
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number > 0):
            raise UserError(f"--data {word}: expected FOLDER=WEIGHT with a number above 0")
        found.append(DataSource(path, number))
    return tuple(found)


def check_needs(stage: type["Stage[Any]"], bundle: "Bundle | None", *, model: str | None) -> None:
    """Checks that the stages before this one have been trained.

    Not every stage adds a network, so the bundle's list of stages is checked too, if it has one.
    The foundations need not be in it, since released networks may take their place.

    Raises:
        UserError: A network or a stage is missing; it names the stage to train.
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
                f"completed only {', '.join(done) or 'no stage'}: train {maker} first, and give "
                "its result with --model"
            )


def _with_vocabulary(config: ModelConfig, size: int) -> ModelConfig:
    """Returns the configuration with all vocabularies of one size."""
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
    """Returns the configurations of the bundle's networks, and of `size` for those it lacks.

    Raises:
        UserError: They do not fit together.
    """
    config = SIZES[size]()
    if vocab_size is not None:
        config = _with_vocabulary(config, vocab_size)
    if bundle is None:
        return config
    own = {name: network for name, network in vars(bundle.config).items() if network is not None}
    config = dataclasses.replace(config, **own)
    for what, values in disagreements(config).items():
        raise UserError(f"{bundle.path}: --size {size} does not fit this bundle: {what}: {values}")
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
    """Returns the plan of the options, or the default for stage and devices."""
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


def _slices(asked: int | None) -> int:
    """Returns the number of slices of the devices, or that of the option where they have none.

    Raises:
        UserError: The option differs from the slices that there are.
    """
    from animegamer_jax.sharding import count_slices

    found = count_slices()
    if asked is not None and found > 1 and asked != found:
        raise UserError(f"--slices {asked}: the devices belong to {found} slices: leave it out")
    return found if asked is None else asked


def _clear(out: epath.Path) -> None:
    """Deletes an earlier run, except for its model/.

    Raises:
        UserError: It cannot be deleted.
    """
    with user_errors(out, "cannot be cleared", hint="delete it, or choose another --out"):
        for name in _STARTED:
            if (out / name).exists():
                (out / name).rmtree()
        (out / "metrics.jsonl").unlink(missing_ok=True)


def start(stage_class: type["Stage[Any]"], options: Options, recipe: Recipe) -> int:
    """Checks everything that can be checked at once, and trains.

    Raises:
        UserError: Something does not fit.
    """
    from animegamer_jax.devices import keep_compiled_programs

    keep_compiled_programs()
    options.host_options.join()
    import jax

    from animegamer_jax.distributed import check_agreement, only_run, raise_on_all_hosts
    from animegamer_jax.sharding import use_plan
    from animegamer_jax.train.loop import train

    with raise_on_all_hosts():
        run, plan = make_run(stage_class, options, recipe)
        settings = run.run_config()
        settings |= {"mesh": dict(run.mesh.shape), "layout": plan.name, "start": options.start}
        settings |= {"export_checkpoint": options.export_checkpoint, "out": f"{run.out}"}
    check_agreement(settings)
    with only_run(run.out), use_plan(plan):
        with raise_on_all_hosts():
            if options.start == "fresh" and jax.process_index() == 0:
                _clear(run.out)
        return train(run)


def make_run(
    stage_class: type["Stage[Any]"], options: Options, recipe: Recipe
) -> tuple["TrainingRun", "ShardingPlan"]:
    """Returns the run that the options describe, on the available devices.

    Raises:
        UserError: Something does not fit.
    """
    import jax

    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.sharding import make_mesh
    from animegamer_jax.tokenizer import Tokenizer
    from animegamer_jax.train.run import TrainingRun

    data = sources(options.data)
    plan = _layout(stage_class.name, options, recipe)
    slices = _slices(options.slices)
    shape = mesh_shape(
        plan,
        num_devices=jax.device_count(),
        fsdp=options.fsdp,
        context=options.context,
        tensor=options.tensor,
        slices=slices,
    )
    bundle = None if options.model is None else Bundle.open(options.model)
    check_needs(stage_class, bundle, model=options.model)
    out = absolute(options.out)
    tokenizer_dir, protocol = _tokenizer_and_protocol(bundle, data=data[0], size=options.size)
    # The stage checks the number of frame tokens.
    vocab_size = len(Tokenizer.load(tokenizer_dir, num_queries=1))
    config = complete_config(bundle, size=options.size, vocab_size=vocab_size)
    check_mesh(recipe, shape, config, stage_class.name)
    stage = stage_class(recipe, config, protocol, tokenizer_dir=tokenizer_dir)
    stage.check_sources(bundle, data)
    run = TrainingRun(
        stage=stage,
        bundle=bundle,
        sources=data,
        out=out,
        mesh=make_mesh(shape, slices=slices),
        threads=options.threads,
        peak_tflops=options.peak_tflops,
        export_checkpoint=options.export_checkpoint,
    )
    return run, plan


foundations = StageCommand("foundations")
warmup = StageCommand("warmup")
decoder = StageCommand("decoder")
mllm = StageCommand("mllm")
adapt = StageCommand("adapt")
picture = StageCommand("picture")
distill = StageCommand("distill")


def shown(
    *,
    model: str,
    data: str,
    split: str = "train",
    turns: int | None = None,
    steps: int | None = None,
    dtype: Dtype | None = None,
    batch: int = 16,
) -> int:
    """Compute CLIP features of a model's own clips, for training with histories as in play.

    For `--history-shown` of train mllm, adapt and distill. The decoder makes a clip of each turn
    from its true shot representation, and CLIP encodes the clip's first frame; where the protocol
    draws a picture first, only the picture is drawn. After an interruption, run the same command
    again.

    Args:
        model: Bundle with CLIP and a trained decoder, or `toy` for the embedded model.
        data: Feature dataset; the results are written to its folder `shown`.
        split: Split of the turns.
        turns: Number of turns, from the first; for the others, training uses the true features.
            Default: all.
        steps: Number of denoising steps. Default: that of the model's protocol.
        dtype: Number format of the computation. Default: the model's own.
        batch: Number of turns whose clips are made in one batch.
    """
    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.data.datasets import SHOWN, open_features
    from animegamer_jax.devices import keep_compiled_programs
    from animegamer_jax.distributed import only_run
    from animegamer_jax.progress import print_line, show_progress
    from animegamer_jax.train.stages.shown_clips import write_shown

    keep_compiled_programs()
    for name, number in {"turns": turns, "steps": steps, "batch": batch}.items():
        if number is not None and number < 1:
            raise UserError(f"--{name}: expected 1 or more, found {number}")
    features = open_features(data)
    with only_run(features.path / SHOWN), show_progress() as progress:
        info = write_shown(
            features,
            bundle=Bundle.open(model),
            split=split,
            count=turns,
            steps=steps,
            dtype=dtype,
            batch_size=batch,
            on_progress=progress,
        )
    print_line(f"{data}: what {model} shows of {sum(info.splits.values())} turns ({split})")
    return 0
