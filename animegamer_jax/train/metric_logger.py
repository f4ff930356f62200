"""Metrics of a training run: rates and model FLOP utilization, and where they are written.

Written are the progress on the terminal, TensorBoard events and `metrics.jsonl`.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from einops import rearrange
from etils import epath
from PIL import Image

from animegamer_jax.devices import find_chip
from animegamer_jax.distributed import raise_on_all_hosts
from animegamer_jax.errors import UserError
from animegamer_jax.media.video import FRAMES_PER_SECOND
from animegamer_jax.progress import print_status, show_progress
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import is_bucket, user_errors
from animegamer_jax.storage.serialization import Line, read_lines
from animegamer_jax.train.stages.base import Evaluation

METRICS_FILE = "metrics.jsonl"
EVENTS = "events"
_LINE_HINT = "remove the line"
_GIF_COLUMNS = 8

Metrics = dict[str, float | None]
"""A line of the metrics file: `step`, and metrics; None stands for NaN and the infinities."""


@dataclasses.dataclass(kw_only=True)
class Throughput:
    """Times the training steps, with their data but without compilation, evaluation and saving.

    Attributes:
        unit: What a sample is called, in the plural.
        batch_size: Samples a step.
        sample_flops: FLOPs of one sample's training step; None if the stage does not count them.
        chips: Number of chips.
        peak_tflops: Peak bfloat16 TFLOP/s of one chip; None takes it from the table of chips.
    """

    unit: str
    batch_size: int
    sample_flops: float | None
    chips: int
    peak_tflops: float | None = None

    def __post_init__(self):
        if self.peak_tflops is None:
            chip = find_chip(jax.devices()[0].device_kind)
            self.peak_tflops = chip and chip.peak_tflops
        self._compiled = False
        self._steps, self._seconds = 0, 0.0  # since the last rates
        self._start, self._seconds_in_steps = time.perf_counter(), 0.0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Times a step; the first one compiles and does not count."""
        start = time.perf_counter()
        yield
        if self._compiled:
            seconds = time.perf_counter() - start
            self._steps, self._seconds = self._steps + 1, self._seconds + seconds
            self._seconds_in_steps += seconds
        self._compiled = True

    def goodput(self) -> float:
        """Returns the share of this process's time since training began that went into steps."""
        return self._seconds_in_steps / (time.perf_counter() - self._start)

    def rates(self) -> dict[str, float]:
        """Returns the rates since the last call; empty if no step has been timed since."""
        if not self._seconds:
            return {}
        rate = self._steps / self._seconds
        self._steps, self._seconds = 0, 0.0
        samples = rate * self.batch_size / self.chips
        found = {
            "steps_per_second": rate,
            "goodput": self.goodput(),
            f"{self.unit}_per_second_per_chip": samples,
        }
        if self.sample_flops is not None and self.peak_tflops is not None:
            found["mfu"] = self.sample_flops * samples / (self.peak_tflops * 1e12)
        return found

    def formula(self) -> str:
        """Describes how the model FLOP utilization (MFU) is computed."""
        kind = jax.devices()[0].device_kind
        flops = "unknown" if self.sample_flops is None else f"{self.sample_flops:.4g}"
        peak = f"unknown for {kind!r}: give --peak-tflops"
        if self.peak_tflops is not None:
            peak = f"{self.peak_tflops * 1e12:.4g}"
        return (
            f"MFU = FLOPs of a {self.unit.removesuffix('s')}'s step x {self.unit} a second / "
            f"(chips x peak FLOP/s); FLOPs {flops}, chips {self.chips}, peak FLOP/s {peak}"
        )


def gif(clips: np.ndarray, *, fps: int = FRAMES_PER_SECOND) -> bytes:
    """Returns clips uint8 [n, f, h, w, 3] in rows of eight as one animated GIF."""
    columns = min(len(clips), _GIF_COLUMNS)
    filled = np.pad(clips, ((0, -len(clips) % columns), *[(0, 0)] * 4))
    sheet = rearrange(filled, "(y x) f h w c -> f (y h) (x w) c", x=columns)
    pictures = [Image.fromarray(frame) for frame in sheet]
    buffer = io.BytesIO()
    pictures[0].save(
        buffer,
        format="GIF",
        save_all=True,
        append_images=pictures[1:],
        duration=round(1000 / fps),
        loop=0,
    )
    return buffer.getvalue()


def read_metrics(path: Path, *, step: int | None = None) -> list[Line[Metrics]]:
    """Returns the complete lines of a metrics file up to a step; a killed run may have more.

    Raises:
        UserError: The file cannot be read, or a line is damaged.
    """
    if not path.exists():
        return []
    kept = []
    for line in read_lines(
        path, Metrics, hint="start again without it", line_hint=_LINE_HINT, may_grow=True
    ):
        last = line.value.get("step")
        if last is None or not last.is_integer():
            raise UserError(
                f"{line.where}: step: expected a whole number, found {last}: {_LINE_HINT}"
            )
        if step is None or last <= step:
            kept.append(line)
    return kept


def is_clocked(name: str) -> bool:
    """Returns whether a metric depends on the clock, and so differs between two equal runs."""
    return "second" in name or name in ("mfu", "goodput", "run_goodput")


def _is_evaluation(record: Metrics, step: int) -> bool:
    return record.get("step") == step and any(name.startswith("eval/") for name in record)


def _seconds_in_steps(records: Iterable[Metrics]) -> tuple[float, float]:
    """Returns the last step whose rate is known, and the seconds that all steps until then took."""
    last, seconds = 0.0, 0.0
    for record in records:
        step, rate = record["step"], record.get("steps_per_second")
        if step is not None and rate:
            seconds += (step - last) / rate
            last = step
    return last, seconds


def _first_start(*folders: epath.Path) -> float:
    """Returns when the first process of a run began, in seconds since 1970, by its events' file."""
    names = [file.name for folder in folders if folder.exists() for file in folder.iterdir()]
    found = [re.match(r"events\.out\.tfevents\.(\d+)", name) for name in names]
    return min((float(match[1]) for match in found if match), default=time.time())


class _Events:
    """A file of TensorBoard events, written at once.

    tensorboardX's own writer has a thread for it, which prints a traceback when the disk is full.

    Args:
        folder: The files' folder.
        step: The first step; TensorBoard hides this one and later ones of earlier files.
    """

    def __init__(self, folder: Path, *, step: int):
        from tensorboardX.event_file_writer import EventsWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        self._write(step=step, file_version="brain.Event:2")
        self._write(step=step, session_log={"status": 1})  # START

    def add(self, step: int, **value: Any) -> None:
        """Writes a summary's value: its `tag`, and `simple_value` or `image`."""
        self._write(step=step, wall_time=time.time(), summary={"value": [value]})

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        from tensorboardX.proto import event_pb2

        event = getattr(event_pb2, "Event")  # noqa: B009 - protobuf makes it at run time
        self._writer.write_event(event(**fields))


class MetricLogger:
    """Writes the metrics of a run; does nothing on hosts other than host 0.

    The files grow line by line, which files in a bucket cannot: those of a run in a bucket grow in
    a temporary folder and are copied with every checkpoint.

    Args:
        folder: The run's output folder.
        step: Steps done before; later lines of an interrupted run are removed from the files.
        evaluated: Whether this step has been evaluated; if not, the line of an evaluation that was
            interrupted is removed as well, since it is made again.
        steps: Steps in all.
        name: The stage's name, for the terminal.
        local: Where the files grow; None takes `folder`, or a temporary folder for a bucket.

    Raises:
        UserError: The files cannot be written.
    """

    def __init__(
        self,
        folder: epath.Path,
        *,
        step: int,
        steps: int,
        name: str,
        evaluated: bool = True,
        local: Path | None = None,
    ):
        self._active = jax.process_index() == 0
        if not self._active:
            return
        if local is None and is_bucket(folder):
            local = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
        self._copies = None if local is None else folder
        local = Path(folder) if local is None else local
        self._path = local / METRICS_FILE
        with self._writing():
            local.mkdir(parents=True, exist_ok=True)
        if self._copies is not None:
            with self._copying():
                if (folder / METRICS_FILE).exists():
                    self._path.write_bytes((folder / METRICS_FILE).read_bytes())
        with self._writing():
            lines = read_metrics(self._path, step=step)
            if not evaluated:
                lines = [line for line in lines if not _is_evaluation(line.value, step)]
            write_whole(self._path, "".join(f"{line.text}\n" for line in lines).encode())
            self._file = open(self._path, "a")  # noqa: SIM115 - closed in `close`
            self._events = _Events(local / EVENTS, step=step + 1)
            self._began = _first_start(epath.Path(local / EVENTS), folder / EVENTS)
        self._counted, self._seconds_in_steps = _seconds_in_steps(line.value for line in lines)
        self._name, self._steps = name, steps
        self._note = "; compiling" if step < steps else ""
        self._display = contextlib.ExitStack()
        self._progress = self._display.enter_context(show_progress(note=lambda: self._note))
        self.advance(step)
        self._note = ""
        if self._copies is not None:
            self.print(
                f"{name}: {METRICS_FILE} and {EVENTS}/ grow in {local}; they are copied to "
                f"{folder} with every checkpoint"
            )

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return user_errors(
            self._path, "cannot be written", hint="make room there, then start again"
        )

    def _copying(self) -> contextlib.AbstractContextManager[None]:
        hint = "check the bucket's free space and permissions, then start again"
        return user_errors(self._copies or self._path, "the metrics cannot be copied", hint=hint)

    def print(self, line: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        if self._active:
            print_status(line)

    def advance(self, step: int) -> None:
        """Shows the number of steps done, and the last logged loss."""
        if self._active:
            self._progress(f"{self._name} steps", step, self._steps)

    @raise_on_all_hosts()
    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the metrics after a number of steps to the files; `advance` shows the loss.

        `loss` is among the metrics, and `steps_per_second` where known, to which `run_goodput` is
        added: the share of the time since the run began, restarts included, that its steps took.

        Raises:
            UserError: On any host, the files cannot be written.
        """
        if not self._active:
            return
        scalars = {name: float(value) for name, value in metrics.items()}
        rate = scalars.get("steps_per_second")
        if rate:
            self._seconds_in_steps += (step - self._counted) / rate
            self._counted = step
            scalars["run_goodput"] = self._run_goodput()
        self._write(step, scalars, prefix="train/")
        self._note = f"; loss {scalars['loss']:.4g}"

    def _run_goodput(self) -> float:
        return self._seconds_in_steps / max(time.time() - self._began, self._seconds_in_steps, 1e-9)

    def describe_goodput(self, goodput: float) -> str:
        """Describes the share of time in steps: this process's, and the run's with its restarts."""
        text = f"{goodput:.0%} of the time in steps"
        if not self._active or not self._seconds_in_steps:
            return text
        return f"{text}; {self._run_goodput():.0%} since the run began"

    @raise_on_all_hosts()
    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Writes the scores and clips of held-out data.

        Raises:
            UserError: On any host, the files cannot be written.
        """
        if not self._active:
            return
        self._write(step, {f"eval/{k}": v for k, v in evaluation.scalars.items()}, prefix="")
        with self._writing():
            for name, clips in evaluation.clips.items():
                self._add_clips(f"eval/{name}", np.asarray(clips), step)
            self._events.flush()
        scores = "  ".join(f"{name} {x:.4g}" for name, x in evaluation.scalars.items())
        self.print(f"{self._name} {step}/{self._steps}  held-out: {scores}")

    def _write(self, step: int, scalars: Mapping[str, float], *, prefix: str) -> None:
        # JSON has no NaN and no infinity: null stands for them.
        finite = {k: v if math.isfinite(v) else None for k, v in scalars.items()}
        with self._writing():
            self._file.write(json.dumps({"step": step, **finite}) + "\n")
            self._file.flush()
            for name, value in scalars.items():
                self._events.add(step, tag=prefix + name, simple_value=value)

    def _add_clips(self, tag: str, clips: np.ndarray, step: int) -> None:
        image = {
            "height": clips.shape[2],
            "width": clips.shape[3],
            "colorspace": 3,
            "encoded_image_string": gif(clips),
        }
        self._events.add(step, tag=tag, image=image)

    @raise_on_all_hosts()
    def copy(self) -> None:
        """Copies the files to the run's folder, if they grow elsewhere.

        Raises:
            UserError: On any host, they cannot be written there.
        """
        self._copy()

    def _copy(self) -> None:
        if not self._active or self._copies is None:
            return
        with self._writing():
            if not self._file.closed:
                self._file.flush()
                self._events.flush()
        with self._copying():
            (self._copies / EVENTS).mkdir(parents=True, exist_ok=True)
            for file in (self._path, *(self._path.parent / EVENTS).iterdir()):
                place = file.relative_to(self._path.parent)
                (self._copies / place).write_bytes(file.read_bytes())

    def close(self) -> None:
        """Ends the progress bar, closes the files and copies them; waits for no other host."""
        if not self._active:
            return
        self._display.close()
        with self._writing(), contextlib.closing(self._events), self._file:
            os.fsync(self._file.fileno())
        self._copy()
