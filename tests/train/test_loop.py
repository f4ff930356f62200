"""The loop: the same run whether interrupted or not, its results and its messages."""

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from check_resume import curve as metrics
from flax import nnx
from helpers import NUM_TEXT, random_leaves, write_tokenizer
from jax.sharding import NamedSharding, PartitionSpec
from tiny_sets import FEATURES_INFO, features_record, turns_of
from tiny_stage import CONFIG, TinyStage
from training_runs import LONG, STEPS, Measuring, make_run

from animegamer_jax.bundle.bundle import Bundle, BundleWriter, flat_params
from animegamer_jax.data.loader import make_iterator
from animegamer_jax.data.shards import begin_dataset
from animegamer_jax.errors import NonFiniteError, UserError
from animegamer_jax.protocol import PAPER
from animegamer_jax.sharding import make_mesh
from animegamer_jax.storage.paths import absolute
from animegamer_jax.train import metric_logger
from animegamer_jax.train.loop import train
from animegamer_jax.train.optimizer import make_optimizer
from animegamer_jax.train.result import one_layer
from animegamer_jax.train.signals import StopSignals
from animegamer_jax.train.stages.base import DataSource, Evaluation, StageNetworks

TESTS = Path(__file__).parents[1]
PATHS = os.pathsep.join(
    str(TESTS.parent / name)
    for name in ("", "tests", "tests/support", "tests/support/training", "scripts")
)


class Signalled(TinyStage):
    """Sends its own process a signal in an evaluation."""

    number = signal.SIGTERM

    def evaluate(self, networks: StageNetworks, batch: Any, key: jax.Array) -> Evaluation:
        signal.raise_signal(self.number)
        return super().evaluate(networks, batch, key)


class Interrupted(Signalled):
    number = signal.SIGINT


class Hungry(TinyStage):
    """Runs out of memory in an evaluation."""

    def evaluate(self, networks: StageNetworks, batch: Any, key: jax.Array) -> Evaluation:
        raise MemoryError


class Unreadable(TinyStage):
    """One record of the training data cannot be read: `record`."""

    record = -1

    def samples(self, sources: Any, *, split: str) -> grain.MapDataset:
        def read(index: int, sample: Any) -> Any:
            if split == "train" and index % 64 == self.record:
                raise UserError(f"record {index}: cannot be read")
            return sample

        return super().samples(sources, split=split).map_with_index(read)


class Worsening(TinyStage):
    """Scores badly in every evaluation."""

    def evaluate(self, networks: StageNetworks, batch: Any, key: jax.Array) -> Evaluation:
        return Evaluation({"error": 1e9}, {})


def weights(folder: Path) -> dict[str, np.ndarray]:
    bundle = Bundle.open(folder)
    return {
        f"{name}.{path}": array
        for name in ("encoder", "vae")
        for path, array in bundle.read_in_order(name, bundle.leaves(name))
    }


def assert_same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], err_msg=name)


TOKENIZERS = ("tokenizer", "t5_tokenizer")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    """The network that the stage changes, and one that it does not."""
    folder = tmp_path_factory.mktemp("bundle")
    write_tokenizer(folder / "tokenizer")
    stages = ("foundations-clip",)
    with BundleWriter(folder / "start", name="start", protocol=PAPER, stages=stages) as writer:
        for name in ("encoder", "vae"):
            config = getattr(CONFIG, name)
            writer.write_network(name, config, random_leaves(name, config, 0))
        for name in TOKENIZERS:
            writer.write_tokenizer(folder / "tokenizer", name=name)
    return Bundle.open(folder / "start")


@pytest.fixture(scope="module")
def uninterrupted(bundle, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    assert train(make_run(out, bundle, peak=0.001)) == 0
    return out


# --- interrupted runs -----------------------------------------------------------------------

CHILD = """
import sys, time
from pathlib import Path
import conftest
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.train.loop import train
from tiny_stage import TinyStage
from training_runs import make_run

class Slow(TinyStage):
    def samples(self, sources, *, split):
        def wait(sample):
            time.sleep(0.02)
            return sample
        return super().samples(sources, split=split).map(wait)

train(make_run(Path(sys.argv[2]), Bundle.open(sys.argv[1]), kind=Slow))
"""


# With the limit of many systems, 1,024 files, and 1,000 shards it would take a minute.
FEW_FILES = """
import dataclasses, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from pathlib import Path
import conftest
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.train.loop import train
from training_runs import LONG, OfShards, make_run

recipe = dataclasses.replace(LONG, steps=25, save_every=25, eval_every=25)
run = make_run(Path(sys.argv[3]), Bundle.open(sys.argv[1]), recipe=recipe, kind=OfShards)
run = dataclasses.replace(run, sources=(run.sources[0]._replace(path=sys.argv[2]),))
assert train(run) == 0
print(len(OfShards.read), len(os.listdir("/proc/self/fd")))
"""


def test_a_training_of_more_shards_than_may_be_open(bundle, tmp_path):
    shards = {"train": 100, "test": 2}
    written = begin_dataset(
        tmp_path / "features", dataclasses.replace(FEATURES_INFO, splits={}), shards=shards
    )
    for split, count in shards.items():
        for shard in range(count):
            turns = turns_of(1, first=shard, num_turns=8 if split == "test" else 2)
            written.write(split, shard, map(features_record, turns))
    written.finish(expected={"train": [2] * 100, "test": [8] * 2})
    words = (bundle.path, tmp_path / "features", tmp_path / "run")
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES, *map(str, words)],
        env=dict(os.environ, PYTHONPATH=PATHS),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    games, files = map(int, done.stdout.split())
    assert games == 100
    assert files <= 32  # a quarter of the limit for records, and the process's own
    assert len(metrics(tmp_path / "run")) > 0
    assert Bundle.open(tmp_path / "run" / "model").has("encoder")


def test_killed_and_terminated_equals_uninterrupted(bundle, uninterrupted, tmp_path, capfd):
    """SIGKILL at a random step, then SIGTERM, then to the end: the same curve, the same weights."""
    step = random.SystemRandom().randrange(2, 9)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(bundle.path), str(tmp_path)],
        env=dict(os.environ, PYTHONPATH=PATHS),
        stderr=subprocess.DEVNULL,
    )
    file = tmp_path / metric_logger.METRICS_FILE
    deadline = time.monotonic() + 300
    while not file.exists() or f'"step": {step},' not in file.read_text():
        assert child.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert not (tmp_path / "model").exists()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert train(make_run(tmp_path, bundle, kind=Signalled)) == 0  # in the evaluation of step 9
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    message = f"tiny: SIGTERM after step 9 of 12: saved in {tmp_path}; the same command resumes"
    assert message in capfd.readouterr().err
    assert not (tmp_path / "model").exists()
    assert train(make_run(tmp_path, bundle)) == 0
    assert "12 steps of 8 shots, 9 of them done before" in capfd.readouterr().err  # none is lost
    assert metrics(tmp_path) == metrics(uninterrupted)
    assert_same_bits(weights(tmp_path / "model"), weights(uninterrupted / "model"))


def test_ctrl_c_saves_and_says_how_to_resume(bundle, tmp_path, capfd):
    recipe = dataclasses.replace(LONG, save_every=100, eval_every=2)
    assert train(make_run(tmp_path, bundle, recipe=recipe, kind=Interrupted)) == 130
    message = f"tiny: Ctrl-C after step 2 of 12: saved in {tmp_path}; the same command resumes"
    assert message in capfd.readouterr().err
    assert (tmp_path / "checkpoints" / "2").is_dir()


def test_a_second_ctrl_c_stops_at_once():
    with StopSignals() as signals:
        assert not signals.received(1)
        signal.raise_signal(signal.SIGINT)
        assert signals.received(2)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_onto_eight_devices_and_on_for_longer(bundle, uninterrupted, tmp_path):
    """Half on one device, half on eight: the same losses; and then more steps than at first."""
    recipe = dataclasses.replace(LONG, steps=9, result_dtype="bfloat16")
    assert train(make_run(tmp_path, bundle, recipe=recipe)) == 0
    first = weights(tmp_path / "model")
    assert Bundle.open(tmp_path / "model").info.weights["encoder"].dtypes.keys() == {"bfloat16"}
    assert Bundle.open(tmp_path / "model").info.weights["vae"] == bundle.info.weights["vae"]
    mesh = make_mesh({"data": 4, "fsdp": 2})
    assert train(make_run(tmp_path, bundle, mesh=mesh)) == 0
    for a, b in zip(metrics(tmp_path), metrics(uninterrupted), strict=True):
        for name in b:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-5)
    second = weights(tmp_path / "model")
    assert not np.array_equal(
        first["encoder.text.input.kernel"], second["encoder.text.input.kernel"]
    )


def test_an_evaluation_that_fails_loses_no_step_and_is_done_again(bundle, uninterrupted, tmp_path):
    with pytest.raises(MemoryError):
        train(make_run(tmp_path, bundle, kind=Hungry))
    assert (tmp_path / "checkpoints" / "9").is_dir()
    assert not (tmp_path / "checkpoints" / "scores.json").exists()
    assert train(make_run(tmp_path, bundle)) == 0
    assert metrics(tmp_path) == metrics(uninterrupted)
    assert_same_bits(weights(tmp_path / "model"), weights(uninterrupted / "model"))


def nth_batch(number: int) -> list[int]:
    """Numbers of the samples in a batch of the runs here, the first of which is 1."""
    with contextlib.closing(
        make_iterator(grain.MapDataset.range(64), batch_size=8, seed=LONG.seed)
    ) as order:
        return [int(k) for k in [next(order) for _ in range(number)][-1]]


def test_a_record_that_cannot_be_read_loses_no_step(bundle, uninterrupted, tmp_path):
    recipe = dataclasses.replace(LONG, save_every=100)
    broken = type("Broken", (Unreadable,), {"record": nth_batch(6)[2]})
    for _ in range(2):  # the second time it cannot begin
        with pytest.raises(UserError) as caught:
            train(make_run(tmp_path, bundle, recipe=recipe, kind=broken))
        assert str(caught.value) == f"record {broken.record}: cannot be read"
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["5"]
    assert train(make_run(tmp_path, bundle)) == 0  # the record is whole again
    assert metrics(tmp_path) == metrics(uninterrupted)
    assert_same_bits(weights(tmp_path / "model"), weights(uninterrupted / "model"))


# --- what it leaves -------------------------------------------------------------------------


def test_the_best_checkpoint_as_the_result(bundle, tmp_path, capfd):
    recipe = dataclasses.replace(LONG, steps=9, keep_last=1)
    assert train(make_run(tmp_path, bundle, recipe=recipe)) == 0
    best = weights(tmp_path / "model")
    longer = dataclasses.replace(recipe, steps=STEPS)
    assert train(make_run(tmp_path, bundle, recipe=longer, kind=Worsening, export="best")) == 0
    assert " since the run began, of step 9, the best: error " in capfd.readouterr().err
    assert_same_bits(weights(tmp_path / "model"), best)
    assert train(make_run(tmp_path, bundle, recipe=longer)) == 0
    last = weights(tmp_path / "model")
    assert (last["encoder.text.input.kernel"] != best["encoder.text.input.kernel"]).any()


def test_a_finished_run_is_made_longer(bundle, tmp_path, capfd):
    """Its cosine then ends at the new last step, and the same command resumes it bit for bit."""
    cosine = dataclasses.replace(LONG.optimizer, decay="cosine")
    short = dataclasses.replace(LONG, steps=3, optimizer=cosine)
    assert train(make_run(tmp_path, bundle, recipe=short)) == 0
    assert "made longer" not in capfd.readouterr().err
    longer = dataclasses.replace(short, steps=6)
    assert train(make_run(tmp_path, bundle, recipe=longer)) == 0
    rates = [make_optimizer(cosine, steps=steps).learning_rate for steps in (3, 6)]
    old, new = (float(rate(3)) for rate in rates)
    assert new > old
    said = (
        "tiny: made longer, from 3 to 6 steps: the learning rate's cosine now ends there, so the "
        f"rate of step 4 is {new:.3g} instead of {old:.3g}"
    )
    assert said in capfd.readouterr().err
    found = {line["step"]: line["learning_rate"] for line in metrics(tmp_path) if "loss" in line}
    expected = [*map(rates[0], range(3)), *map(rates[1], range(3, 6))]
    np.testing.assert_allclose([found[step] for step in range(1, 7)], expected, rtol=1e-6)
    assert Bundle.open(tmp_path / "model").info.stages == ("foundations-clip", "tiny")
    assert train(make_run(tmp_path, bundle, recipe=longer)) == 0  # nothing is left to do
    assert "made longer" not in capfd.readouterr().err
    with pytest.raises(UserError, match=r"recipe\.steps was 6, is 3"):
        train(make_run(tmp_path, bundle, recipe=short))


def test_the_result_is_a_bundle_with_the_averaged_weights(bundle, uninterrupted):
    result = Bundle.open(uninterrupted / "model")
    assert result.name == "tiny"
    assert result.protocol == bundle.protocol
    assert result.config == bundle.config
    assert result.info.stages == ("foundations-clip", "tiny")
    before, after = weights(bundle.path), weights(uninterrupted / "model")
    moved = {name for name, value in after.items() if not np.array_equal(value, before[name])}
    assert {".".join(name.split(".")[:2]) for name in moved} == {
        "encoder.text",
        "encoder.text_norm",
    }
    for name in TOKENIZERS:
        files, expected = (
            {path.name: path.read_bytes() for path in (model.path / name).iterdir()}
            for model in (result, bundle)
        )
        assert files == expected
    network = result.load("encoder")
    assert len(flat_params(nnx.state(network))) == len(result.leaves("encoder"))


def test_checkpoints_that_stay(uninterrupted):
    """The last two, and the best: the losses fall, so it is one of them."""
    folder = uninterrupted / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["12", "9", "scores.json"]
    evaluated = [line for line in metrics(uninterrupted) if "eval/error" in line]
    scores = {f"{line['step']:.0f}": line["eval/error"] for line in evaluated}
    assert json.loads((folder / "scores.json").read_text()) == scores


def test_the_records(uninterrupted):
    lines = metrics(uninterrupted)
    trained = [line for line in lines if "loss" in line]
    assert [line["step"] for line in trained] == list(range(1, STEPS + 1))
    evaluated = [line for line in lines if "eval/error" in line]
    assert [line["step"] for line in evaluated] == [9, 12]
    assert trained[0]["loss"] > trained[-1]["loss"]
    (events,) = (uninterrupted / "events").iterdir()
    data = events.read_bytes()
    for tag in (b"train/loss", b"train/mfu", b"eval/error", b"eval/clips", b"GIF89a"):
        assert tag in data
    raw = (uninterrupted / metric_logger.METRICS_FILE).read_text().splitlines()
    timed = json.loads(raw[2])
    expected = timed["steps_per_second"] * 8 * 6.0 * NUM_TEXT * (12 * 32 + 32 * 32) / (0.001 * 1e12)
    assert timed["mfu"] == pytest.approx(expected)
    assert timed["shots_per_second_per_chip"] == pytest.approx(timed["steps_per_second"] * 8)


def test_what_a_stage_measures_and_the_digits_of_frozen_weights(bundle, tmp_path, capfd):
    """`finish` sets a field; frozen weights, used in bfloat16, are written as they were read."""
    recipe = dataclasses.replace(LONG, steps=2, dtype="bfloat16")
    assert train(make_run(tmp_path, bundle, recipe=recipe, kind=Measuring)) == 0
    result = Bundle.open(tmp_path / "model")
    assert result.config.encoder is not None
    assert result.config.encoder.dtype == "bfloat16"
    before, after = weights(bundle.path), weights(tmp_path / "model")
    name = "encoder.image.input.kernel"
    np.testing.assert_array_equal(after[name], before[name])
    assert not np.array_equal(before[name].astype(jnp.bfloat16), before[name])
    output = capfd.readouterr().err
    formula = (
        "FLOPs of a shot's step x shots a second / (chips x peak FLOP/s); FLOPs 5.914e+04, chips 1"
    )
    assert f"{formula}, peak FLOP/s unknown for 'cpu': give --peak-tflops" in output


# --- what stops it --------------------------------------------------------------------------


def test_a_nan_stops_names_and_leaves_the_last_good_state(bundle, uninterrupted, tmp_path):
    recipe = dataclasses.replace(LONG, bad_sample=nth_batch(5)[3])
    run = make_run(tmp_path, bundle, recipe=recipe)
    with pytest.raises(NonFiniteError) as caught:
        train(run)
    message = str(caught.value)
    assert message.startswith(
        "step 5: the batch's text is not finite: stopped; the state before it"
    )
    assert "\n" not in message
    assert message.endswith("from the start: with --start fresh, or another --out")
    good = [line for line in metrics(uninterrupted) if line["step"] <= 4]
    assert good
    assert metrics(tmp_path) == good
    assert (tmp_path / "checkpoints" / "4").is_dir()
    assert not (tmp_path / "model").exists()


def test_another_configuration_is_refused(bundle, uninterrupted):
    recipe = dataclasses.replace(LONG, batch_size=16)
    with pytest.raises(UserError, match=r"recipe.batch_size was 8, is 16: start with the earlier"):
        train(make_run(uninterrupted, bundle, recipe=recipe))


def test_another_model_to_start_from_is_refused(bundle, uninterrupted):
    class Other(Bundle):
        name = "other"

    other = Other(bundle.path, bundle.info)
    with pytest.raises(UserError, match=r"model was 'start \w+', is 'other \w+'"):
        train(make_run(uninterrupted, other))


def test_data_of_another_content_is_refused(bundle, uninterrupted, tmp_path):
    """A dataset whose description has changed since the run began: it had none then."""
    (tmp_path / "somewhere").mkdir()
    (tmp_path / "somewhere" / "set.json").write_text("{}")
    run = make_run(uninterrupted, bundle)
    moved = dataclasses.replace(run, sources=(DataSource(str(tmp_path / "somewhere")),))
    message = r"the dataset somewhere differs from .* \(data\.0\.content was '', is '\w+'\)"
    with pytest.raises(UserError, match=message):
        train(moved)


def test_the_curve_that_is_compared_has_no_clock(uninterrupted, tmp_path):
    """Two equal runs on two days; and of a real run all that the training alone decides."""
    scalars = {"loss": 0.5, "grad_norm": 1.0}
    for day in (1.0, 2.0):
        logger = metric_logger.MetricLogger(
            absolute(tmp_path / f"{day}"), step=0, steps=1, name="tiny"
        )
        clocked = ("steps_per_second", "shots_per_second_per_chip", "goodput", "mfu")
        logger.log(1, scalars | dict.fromkeys(clocked, day))
        logger.close()
    assert metrics(tmp_path / "1.0") == metrics(tmp_path / "2.0") == [{"step": 1, **scalars}]
    names = {"step", "loss", "text_error", "grad_norm", "update_norm", "param_norm"}
    assert metrics(uninterrupted)[5].keys() == names | {"learning_rate"}


def test_a_layer_of_a_stack_comes_alone():
    """No program holds the whole stack on one device."""
    mesh = make_mesh({"data": 2, "fsdp": 4})
    stack = np.arange(6 * 8 * 12, dtype=np.float32).reshape(6, 8, 12)
    placed = jax.device_put(stack, NamedSharding(mesh, PartitionSpec(None, "fsdp")))
    take = one_layer(NamedSharding(mesh, PartitionSpec()))
    np.testing.assert_array_equal(np.stack([take(placed, i) for i in range(6)]), stack)
    assert take(placed, 1).is_fully_replicated
    assert "[6,8,12]" not in take.lower(placed, 1).compile().as_text()
