"""A run's metrics: rates and goodput, the lines of its file, and pictures of its clips."""

import io
import json
from typing import Any

import numpy as np
import pytest
from check_resume import curve as metrics
from PIL import Image, ImageSequence

from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import absolute
from animegamer_jax.train import metric_logger
from animegamer_jax.train.stages.base import Evaluation


def test_rates_and_utilization(monkeypatch):
    """The first step compiles and does not count; rates are those since the last call."""
    clock = [0.0]
    monkeypatch.setattr(metric_logger.time, "perf_counter", lambda: clock[0])
    options: dict[str, Any] = {"unit": "shots", "batch_size": 100, "sample_flops": 1e12, "chips": 2}
    throughput = metric_logger.Throughput(**options, peak_tflops=100.0)
    on_cpu = metric_logger.Throughput(**options)

    def steps(*seconds: float) -> None:
        for each in seconds:
            with throughput.step(), on_cpu.step():
                clock[0] += each

    steps(10.0)
    assert throughput.rates() == {}
    steps(1.0, 3.0)
    clock[0] += 2.0
    expected = {"steps_per_second": 0.5, "goodput": 0.25, "shots_per_second_per_chip": 25.0}
    assert throughput.rates() == {**expected, "mfu": 0.25}
    assert on_cpu.rates() == expected  # a chip without a known peak
    steps(4.0)
    assert throughput.rates()["steps_per_second"] == 0.25
    assert throughput.goodput() == 0.4


def test_goodput_of_a_run_counts_what_restarts_cost(monkeypatch, tmp_path):
    """It began 100 s ago; 20 steps of 2 s count, ten that were lost and the time between do not."""
    monkeypatch.setattr(metric_logger.time, "time", lambda: 1100.0)
    events = tmp_path / metric_logger.EVENTS
    events.mkdir()
    (events / "events.out.tfevents.1000.host").touch()
    rates = {10: 0.5, 20: 0.5, 30: 0.25}
    lines = [{"step": step, "loss": 1, "steps_per_second": rate} for step, rate in rates.items()]
    lines.insert(1, {"step": 10, "eval/psnr": 20.0})
    file = tmp_path / metric_logger.METRICS_FILE
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    logger = metric_logger.MetricLogger(absolute(tmp_path), step=25, steps=50, name="tiny")
    assert logger.describe_goodput(0.9) == "90% of the time in steps; 40% since the run began"
    logger.log(30, {"loss": 1.0})  # the step that compiles has no rate
    logger.log(40, {"loss": 1.0, "steps_per_second": 1.0})
    logger.close()
    found = [line.get("run_goodput") for line in map(json.loads, file.read_text().splitlines())]
    assert found == [None, None, None, None, 0.6]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"step": "two"}', 'step: .*found "two"'),
        ("[1]", "found \\[1\\]"),
        ('{"loss": 1}', "step: expected a whole number, found None"),
    ],
)
def test_a_damaged_line_of_metrics_is_named(tmp_path, line, reason):
    """Only the last line may be half-written: a run is killed there and nowhere else."""
    file = tmp_path / metric_logger.METRICS_FILE
    file.write_text('{"step": 1, "loss": null}\n{"step": 2, "lo')
    assert [line.text for line in metric_logger.read_metrics(file)] == ['{"step": 1, "loss": null}']
    file.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    pattern = rf"^{file}, line 2: [^\n]*{reason}[^\n]*: remove the line$"
    with pytest.raises(UserError, match=pattern):
        metric_logger.read_metrics(file)


@pytest.mark.parametrize("evaluated", [True, False])
def test_an_evaluation_that_was_interrupted_has_one_line(evaluated, tmp_path):
    """Its line was written, its score was not: it is made again."""
    scores = {"step": 2, "eval/psnr": 20.0}
    lines = [{"step": 1, "eval/psnr": 10.0}, {"step": 2, "loss": 1.0}, scores]
    file = tmp_path / metric_logger.METRICS_FILE
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    logger = metric_logger.MetricLogger(
        absolute(tmp_path), step=2, steps=5, name="tiny", evaluated=evaluated
    )
    if not evaluated:
        logger.log_evaluation(2, Evaluation(scalars={"psnr": 20.0}, clips={}))
    logger.close()
    assert metrics(tmp_path) == lines


def test_a_gif_of_clips():
    clips = np.zeros((9, 4, 6, 10, 3), np.uint8)
    clips[8, 2] = (255, 0, 0)
    picture = Image.open(io.BytesIO(metric_logger.gif(clips)))
    frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(picture)]
    assert [f.shape for f in frames[:1]] == [(12, 80, 3)]
    assert (frames[-2][6:, :10] == (255, 0, 0)).all()


def test_an_unfinished_line_of_metrics_is_dropped(tmp_path):
    file = tmp_path / metric_logger.METRICS_FILE
    file.write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n{"step": 3, "lo')
    logger = metric_logger.MetricLogger(absolute(tmp_path), step=1, steps=5, name="tiny")
    logger.log(2, {"loss": float("nan")})
    logger.close()
    assert file.read_text() == '{"step": 1, "loss": 2}\n{"step": 2, "loss": null}\n'


def test_records_that_grow_elsewhere_are_copied(tmp_path, capfd):
    """As those of a run in a bucket do."""
    far, near = tmp_path / "far", tmp_path / "near"
    far.mkdir()
    before = '{"step": 1, "loss": 2}\n'
    (far / metric_logger.METRICS_FILE).write_text(before + '{"step": 2, "loss": 9}\n')
    logger = metric_logger.MetricLogger(absolute(far), step=1, steps=5, name="tiny", local=near)
    assert f"metrics.jsonl and events/ grow in {near}" in capfd.readouterr().err
    logger.log(2, {"loss": 1.0})
    logger.copy()
    lines = before + '{"step": 2, "loss": 1.0}\n'
    assert (far / metric_logger.METRICS_FILE).read_text() == lines
    logger.log(3, {"loss": 0.5})
    logger.close()
    assert (far / metric_logger.METRICS_FILE).read_text() == lines + '{"step": 3, "loss": 0.5}\n'
    (events,) = (far / metric_logger.EVENTS).iterdir()
    assert b"train/loss" in events.read_bytes()
