"""`animegamer train`: options by stage and size, and what is refused before anything starts."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
from etils import epath
from helpers import random_leaves, tiny_config, write_tokenizer
from tiny_stage import RECIPE, TinyStage

from animegamer_jax import cli, sharding
from animegamer_jax.bundle.bundle import Bundle, BundleWriter
from animegamer_jax.bundle.config import BundleConfig
from animegamer_jax.bundle.embedded import ASSETS
from animegamer_jax.cli import parse
from animegamer_jax.configs import make_full, make_toy
from animegamer_jax.errors import UserError
from animegamer_jax.protocol import PAPER
from animegamer_jax.sharding import PLANS
from animegamer_jax.toy.dataset import ToySize, write_toy_games
from animegamer_jax.train import command
from animegamer_jax.train.command import Options, StageCommand, complete_config
from animegamer_jax.train.mesh import (
    check_mesh,
    check_recipe,
    mesh_shape,
)
from animegamer_jax.train.registry import PARTS, STAGES, find_stage
from animegamer_jax.train.stages.base import DataSource
from animegamer_jax.train.stages.recipe import OptimizerConfig

WORDS = ["--data", "somewhere", "--out", "out"]
EVERY = [("foundations", part) for part in PARTS] + [
    (stage, None) for stage in STAGES if stage != "foundations"
]


def parsed(stage: str, *words: str) -> tuple[Options, Any]:
    """Options and recipe of a command line."""
    function = StageCommand(stage).for_words([*WORDS, *words])
    args, kwargs = parse(function, f"animegamer train {stage}", [*WORDS, *words])
    found = dict(zip(("options", "recipe"), args, strict=False)) | kwargs
    return found["options"], found["recipe"]


# --- options --------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "part"), EVERY)
def test_a_stages_own_recipe_is_the_default(stage, part):
    words = () if part is None else ("--part", part)
    options, recipe = parsed(stage, *words)
    stage_class, expected = find_stage(stage, part=part, size="toy")
    assert recipe == expected
    assert options == Options(data=("somewhere",), out="out", part=part)
    assert stage_class.name.startswith(stage)
    assert {maker.split()[0] for maker in stage_class.needs.values()} <= set(STAGES)


def test_any_field_of_the_recipe_is_an_option():
    words = ("--steps", "7", "--optimizer.learning-rate", "0.5", "--ema-decay", "None")
    _, recipe = parsed("decoder", *words, "--optimizer.decay", "constant", "--trained", "all")
    assert (recipe.steps, recipe.optimizer.learning_rate, recipe.ema_decay) == (7, 0.5, None)
    assert (recipe.optimizer.decay, recipe.trained) == ("constant", "all")
    _, expected = find_stage("decoder", size="toy")
    assert recipe.batch_size == expected.batch_size


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (("warmup",), ("trained", "eval_clips", "eval_sampling_steps")),
        *((("foundations", "--part", part), ("trained",)) for part in PARTS),
    ],
)
def test_fields_that_a_stage_ignores_are_not_options(stage, options, capsys):
    for option in options:
        dashed = f"--{option.replace('_', '-')}"
        with pytest.raises(UserError, match=f"[Uu]nrecognized options: {dashed}"):
            parsed(*stage, dashed, "4")
    function = StageCommand(stage[0]).for_words([*stage[1:]])
    with pytest.raises(SystemExit):
        parse(function, "animegamer train", [*stage[1:], "--help"])
    output = capsys.readouterr().out
    assert "--eval-every" in output
    assert not [option for option in options if f"--{option.replace('_', '-')} " in output]


def test_a_size_has_its_recipe():
    _, toy = parsed("decoder")
    _, full = parsed("decoder", "--size", "full")
    assert full == find_stage("decoder", size="full")[1]
    assert full != toy
    assert parsed("decoder", "--size=full")[1] == full
    assert full.steps == 80_000
    assert full.optimizer.learning_rate == 2e-4


@pytest.mark.parametrize(
    ("stage", "words", "message"),
    [
        ("warmup", ("--size", "huge"), "--size huge: expected one of full, toy"),
        ("foundations", (), "stage foundations: expected --part, one of clip, t5, vae, dit"),
        ("foundations", ("--part", "gan"), "--part gan: expected one of clip, t5, vae, dit"),
        ("mllm", ("--part", "vae"), "stage mllm: --part vae: only foundations has parts"),
        (
            "foundations",
            ("--part", "vae", "--size", "full"),
            r"--size full: .* has recipes only for toy: convert the released networks",
        ),
        ("dreams", (), "unknown stage 'dreams': expected one of foundations, warmup, decoder"),
        ("warmup", ("--data", "b=2"), "--data: found twice: expected once, with all datasets"),
        ("warmup", ("--data=b",), "--data: found twice: expected once, with all datasets"),
        ("warmup", ("--stpes", "3"), r"--stpes.*see animegamer train warmup --help"),
        ("warmup", ("--steps", "many"), r"steps.*see animegamer train warmup --help"),
    ],
)
def test_wrong_words(stage, words, message):
    with pytest.raises(UserError, match=message) as caught:
        parsed(stage, *words)
    assert "\n" not in str(caught.value)


def test_help_shows_the_defaults(capsys):
    function = StageCommand("foundations").for_words(["--help"])
    with pytest.raises(SystemExit) as stop:
        parse(function, "animegamer train foundations", ["--help"])
    assert not stop.value.code
    text = capsys.readouterr().out
    for option in ("--data", "--out", "--part", "--start", "--steps", "--optimizer.learning-rate"):
        assert option in text


# --- data, mesh, numbers --------------------------------------------------------------------


def test_data_sets_and_their_weights(tmp_path):
    (tmp_path / "a=1").mkdir()
    words = ("films/totoro", "films/kiki=2.5", str(tmp_path / "a=1"), "s3://x/y=1")
    assert command.sources(words) == (
        DataSource("films/totoro"),
        DataSource("films/kiki", 2.5),
        DataSource(str(tmp_path / "a=1")),
        DataSource("s3://x/y", 1.0),
    )


@pytest.mark.parametrize("word", ["a=0", "a=-1", "a=heavy", "a=nan", "a=inf"])
def test_wrong_weights(word):
    with pytest.raises(
        UserError, match=f"--data {word}: expected FOLDER=WEIGHT with a number above"
    ):
        command.sources((word,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 12}, "--batch-size 12: expected a multiple of 8 .*: 8 or 16$"),
        ({"batch_size": 8, "accumulate": 2}, "--batch-size 8: expected a multiple of 16 .*: 16$"),
        ({"steps": 0}, "--steps: expected a number greater than or equal to 1, found 0"),
        ({"accumulate": 0}, "--accumulate: expected a number greater than or equal to 1, found 0"),
        ({"save_every": -1}, "--save-every: .* or equal to 1, found -1"),
        ({"ema_decay": 1.0}, "--ema-decay: expected a number less than 1, found 1.0"),
        (
            {"optimizer": OptimizerConfig(learning_rate=float("nan"))},
            "--optimizer.learning-rate: expected a finite number, found NaN",
        ),
        (
            {"optimizer": OptimizerConfig(learning_rate=0.1, clip_norm=0.0)},
            "--optimizer.clip-norm: expected a number greater than 0, found 0.0",
        ),
    ],
)
def test_numbers_that_do_not_fit(changes, message):
    with pytest.raises(UserError, match=message):
        check_recipe(dataclasses.replace(RECIPE, **changes), batch_shards=8)


@pytest.mark.parametrize(("option", "value"), [("history_shown", 1.5), ("word_dropout", -0.1)])
def test_shares_are_from_zero_to_one(option, value):
    recipe = dataclasses.replace(find_stage("mllm")[1], **{option: value})
    words = f"--{option.replace('_', '-')}: expected a number .* than or equal to [01], found"
    with pytest.raises(UserError, match=words):
        check_recipe(recipe, batch_shards=1)


@pytest.mark.parametrize(("stage", "part"), EVERY)
def test_every_recipe_is_in_range(stage, part):
    for recipe in find_stage(stage, part=part)[0].recipes.values():
        check_recipe(recipe, batch_shards=1)


def test_meshes():
    def shape(plan: str, devices: int, fsdp: int | None = None, **given: int):
        sizes = {"context": 1, "tensor": 1, "slices": 1, **given}
        return tuple(mesh_shape(PLANS[plan], num_devices=devices, fsdp=fsdp, **sizes).values())

    assert shape("sharded", 64) == (4, 16, 1, 1)
    assert shape("sharded", 8) == (1, 8, 1, 1)
    assert shape("sharded", 24) == (2, 12, 1, 1)
    assert shape("sharded", 64, tensor=2, context=4) == (1, 8, 4, 2)
    assert shape("sharded", 64, fsdp=4, tensor=2) == (8, 4, 1, 2)
    assert shape("replicated", 8) == (8, 1, 1, 1)
    for bad in ({"fsdp": 3}, {"tensor": 0}, {"context": 16}):
        with pytest.raises(UserError, match=r"expected a divisor of the 8 devices$"):
            shape("sharded", 8, **bad)
    assert shape("sharded", 16, slices=2) == (2, 8, 1, 1)  # weights within a slice
    assert shape("sharded", 64, slices=4, fsdp=4, tensor=2) == (8, 4, 1, 2)
    with pytest.raises(UserError, match="expected a divisor of the 4 devices of a slice"):
        shape("sharded", 8, fsdp=8, slices=2)
    for slices in (0, 3):
        with pytest.raises(UserError, match=f"--slices {slices}: expected a divisor of the 8 dev"):
            shape("sharded", 8, slices=slices)


def test_layouts_by_default():
    def name(stage: str, *words: str) -> str:
        options, recipe = parsed(stage, *words)
        return command._layout(stage, options, recipe).name

    assert name("mllm") == name("decoder") == "replicated"  # toys
    assert name("mllm", "--size", "full") == name("decoder", "--size", "full") == "sharded"
    assert name("decoder", "--fsdp", "4") == name("decoder", "--layout", "sharded") == "sharded"
    assert name("decoder", "--tensor", "2") == "sharded"
    assert name("decoder", "--size", "full", "--layout", "replicated") == "replicated"


def test_heads_that_the_mesh_does_not_divide():
    config, shape = make_full(), {"data": 2, "tensor": 4}
    with pytest.raises(UserError, match=r"tensor=4: the transformer's heads are 30: expected one"):
        check_mesh(RECIPE, shape, config, "decoder")
    check_mesh(RECIPE, shape, config, "mllm")
    check_mesh(RECIPE, shape, config, "foundations-vae")


# --- the stage before -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder_only(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_tokenizer(folder / "tokenizer")
    config = tiny_config(400).encoder
    assert config is not None
    with BundleWriter(folder / "model", name="small", protocol=PAPER) as writer:
        writer.write_network("encoder", config, random_leaves("encoder", config, 0))
        writer.write_tokenizer(folder / "tokenizer")
    return folder / "model"


def test_a_stage_without_the_one_before_it(encoder_only, tmp_path):
    stage, recipe = find_stage("warmup")
    options = Options(data=("x",), out=str(tmp_path / "out"))
    with pytest.raises(
        UserError,
        match=r"stage warmup needs the network vae, which stage foundations --part vae makes, but "
        r"no --model was given: train foundations --part vae first",
    ):
        command.start(stage, options, recipe)
    with pytest.raises(UserError, match=r"small.*/model has no such network: train"):
        command.start(stage, dataclasses.replace(options, model=str(encoder_only)), recipe)
    assert not (tmp_path / "out").exists()


NEEDED = [(stage, set(find_stage(stage)[0].needs.values())) for stage in STAGES[1:]]


@pytest.mark.parametrize(
    ("name", "missing"),
    [(stage, m) for stage, makers in NEEDED for m in sorted(makers & set(STAGES))],
)
def test_a_stage_on_a_model_that_has_not_been_through_the_one_before_it(name, missing):
    """Though it has all networks: one of them is as an earlier stage left it."""
    stage, _ = find_stage(name)
    before = STAGES[1 : STAGES.index(name)]
    done = tuple(s for s in before if s != missing)
    message = (
        f"stage {name} needs a model that stage {missing} has trained, but model has completed "
        f"only {', '.join(done) or 'no stage'}: train {missing} first, and give its result "
        "with --model"
    )
    with pytest.raises(UserError, match=f"^{message}$"):
        command.check_needs(stage, through(done), model="model")


@pytest.mark.parametrize("name", [stage for stage, _ in NEEDED])
def test_a_stage_on_a_model_that_has_been_through_those_before_it_or_does_not_know(name):
    stage, _ = find_stage(name)
    before = STAGES[1 : STAGES.index(name)]
    for done in (before, STAGES[1:], None):
        command.check_needs(stage, through(done), model="model")


def through(stages: tuple[str, ...] | None) -> Bundle:
    """A bundle of all networks that has been through some stages; None: it does not say."""
    config = BundleConfig(
        format_version=1,
        name="model",
        date=None,
        protocol=PAPER,
        networks=make_toy(),
        weights={},
        released={},
        stages=stages,
    )
    return Bundle(epath.Path("model"), config)


def test_the_full_size_starts_from_a_bundle(tmp_path):
    class NeedsNothing(TinyStage):
        needs: ClassVar = {}

    options = Options(data=("x",), out=str(tmp_path / "out"), size="full")
    with pytest.raises(UserError, match="--size full: expected --model with the pre-trained"):
        command.start(NeedsNothing, options, RECIPE)


def test_networks_that_the_bundle_lacks_are_of_the_size(tiny_bundle, encoder_only):
    bundle = Bundle.open(tiny_bundle)
    config = complete_config(bundle, size="toy", vocab_size=77)
    toy = make_toy()
    assert config.encoder == bundle.config.encoder
    assert config.mllm == bundle.config.mllm
    assert toy.clip is not None
    assert toy.t5 is not None
    assert config.clip == dataclasses.replace(toy.clip, vocab_size=77)
    assert config.t5 == dataclasses.replace(toy.t5, vocab_size=77)
    nothing = complete_config(None, size="toy", vocab_size=77)
    assert nothing.mllm is not None
    assert nothing.mllm.mistral.vocab_size == 77
    with pytest.raises(UserError, match=r"--size toy does not fit this bundle: representation"):
        complete_config(Bundle.open(encoder_only), size="toy", vocab_size=77)


# --- all of it ------------------------------------------------------------------------------


def test_heads_are_checked_before_anything_starts(tiny_bundle, tmp_path):
    options = Options(data=("x",), out=str(tmp_path), model=str(tiny_bundle), tensor=4)
    with pytest.raises(UserError, match=r"tensor=4: the transformer's heads are 2"):
        command.make_run(find_stage("decoder")[0], options, RECIPE)


def test_the_embedded_model_by_its_name(tmp_path):
    options = Options(data=("x",), out=str(tmp_path), model="toy")
    run, _ = command.make_run(find_stage("mllm")[0], options, find_stage("mllm")[1])
    assert run.bundle is not None
    assert str(run.bundle.path) == str(ASSETS / "toy")


def test_a_run_in_a_bucket(tiny_bundle):
    """Its address stays as it is: it is no path of this machine."""
    options = Options(data=("x",), out="gs://bucket/runs/tiny", model=str(tiny_bundle))
    run, plan = command.make_run(TinyStage, options, RECIPE)
    assert str(run.out) == "gs://bucket/runs/tiny"
    assert plan.name == "replicated"
    assert not Path("gs:").exists()


def test_the_first_stage_of_a_toy_takes_the_datasets_tokenizer_and_protocol(tmp_path):
    size = ToySize(games=1, test_games=1, turns=1, height=16, width=24)
    info = write_toy_games(str(tmp_path / "games"), size)
    source = DataSource(str(tmp_path / "games"))
    tokenizer, protocol = command._tokenizer_and_protocol(None, data=source, size="toy")
    assert protocol == info.protocol
    embedded = ASSETS / "toy"
    for file in (tokenizer / "tokenizer.json", tmp_path / "games" / "words.json"):
        expected = embedded / file.relative_to(tmp_path / "games")
        assert file.read_bytes() == expected.read_bytes()
    (tokenizer / "tokenizer.json").unlink()
    tokenizer.rmdir()
    with pytest.raises(UserError, match=r"no tokenizer/ there: make the dataset again") as error:
        command._tokenizer_and_protocol(None, data=source, size="toy")
    assert "\n" not in str(error.value)


def run(stage: type[TinyStage], tmp_path: Path, *words: str) -> int:
    words = ("--data", "x", "--out", str(tmp_path / "out"), "--eval-every", "9", *words)
    function = command.make_command(stage, dataclasses.replace(RECIPE, save_every=9, noise=0.1))
    args, kwargs = parse(function, "animegamer train tiny", list(words))
    return function(*args, **kwargs)


class Filling(TinyStage):
    """The disk is full from its first evaluation on."""

    out: ClassVar[Path]

    def evaluate(self, networks, batch, key):
        assert (self.out / "checkpoints" / "2").is_dir()
        full = shutil.disk_usage(self.out)._replace(free=0)
        shutil.disk_usage = lambda path: full
        return super().evaluate(networks, batch, key)


def test_a_full_disk_ends_in_one_line_and_the_same_command_resumes(
    tiny_bundle, tmp_path, capfd, monkeypatch
):
    """From the evaluation at step 2 on the disk has no free byte."""
    out = tmp_path / "out"
    words = ["--data", "x", "--model", str(tiny_bundle), "--out", str(out)]
    Filling.out = out
    monkeypatch.setattr(command, "train_tiny", command.make_command(Filling, RECIPE), raising=False)
    monkeypatch.setitem(cli.COMMANDS, "train tiny", ("train.command:train_tiny", ""))
    with monkeypatch.context() as disk:
        disk.setattr(shutil, "disk_usage", shutil.disk_usage)
        assert cli.main(["train", "tiny", *words]) == 2
    lines = capfd.readouterr().err.splitlines()
    (message,) = (line for line in lines if not line.startswith(("tiny: ", "tiny ", "MFU = ")))
    refused = f"{out}/checkpoints: a checkpoint cannot be written: No space left on device"
    assert message == lines[-1]
    assert message.startswith(
        f"animegamer train tiny: {refused}: free space there, then start the "
    )
    assert not (out / "model").exists()
    function = command.make_command(TinyStage, RECIPE)
    args, kwargs = parse(function, "animegamer train tiny", words)
    assert function(*args, **kwargs) == 0
    assert "6 steps of 8 shots, 2 of them done before" in capfd.readouterr().err
    assert Bundle.open(out / "model").name == "tiny"


def test_from_words_to_a_bundle_and_a_fresh_start(tiny_bundle, tmp_path, capfd):
    words = ("--model", str(tiny_bundle), "--batch-size", "8")
    assert run(TinyStage, tmp_path, *words, "--steps", "1") == 0
    out = tmp_path / "out"
    assert Bundle.open(out / "model").name == "tiny"
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    with pytest.raises(UserError, match=r"recipe.seed was 0, is 1: start with the earlier value"):
        run(TinyStage, tmp_path, *words, "--steps", "1", "--seed", "1")
    assert run(TinyStage, tmp_path, *words, "--steps", "1", "--seed", "1", "--start", "fresh") == 0
    (line, evaluated) = (out / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["loss"] != first["loss"]
    assert "eval/loss" in json.loads(evaluated)
    assert "tiny steps: 1 of 1; loss " in capfd.readouterr().err


@pytest.mark.slow
def test_two_simulated_slices_train_to_the_losses_of_one(tiny_bundle, tmp_path, monkeypatch):
    """Weights over eight devices of one slice, or over the four of each of two."""
    arranged: list[tuple[tuple[int, ...], int]] = []
    over_slices = sharding._over_slices

    def note(sizes, devices, *, slices):
        arranged.append((tuple(sizes), slices))
        return over_slices(sizes, devices, slices=slices)

    monkeypatch.setattr(sharding, "_over_slices", note)
    words = ("--model", str(tiny_bundle), "--batch-size", "8", "--steps", "2")
    losses = []
    for slices in ("1", "2"):
        (folder := tmp_path / slices).mkdir()
        assert run(TinyStage, folder, *words, "--layout", "sharded", "--slices", slices) == 0
        lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
        steps = [line for line in map(json.loads, lines) if "loss" in line]
        losses.append([line["loss"] for line in steps])
        assert 0 < steps[-1]["run_goodput"] <= 1
    assert arranged == [((2, 4, 1, 1), 2)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][0] != losses[0][1]
