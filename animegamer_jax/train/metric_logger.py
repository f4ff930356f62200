"""What is seen of a run: a progress bar or plain lines, TensorBoard events, `metrics.jsonl`.

Model FLOP utilization is arithmetic over time, with the operations that the stage counts for one
sample's step: `operations x samples / (seconds x chips x peak)`.
"""

import datetime
import io
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from animegamer_jax.devices import find_chip
from animegamer_jax.media.video import FRAMES_PER_SECOND
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import is_bucket, telling
from animegamer_jax.train.stages.base import Watched

METRICS_FILE = "metrics.jsonl"
EVENTS = "events"
_PLAIN_SECONDS = 5.0  # between plain lines
_GIF_COLUMNS = 8


def peak_tflops(given: float | None = None) -> float | None:
    """TFLOP/s of one chip at its best in bfloat16: as given, or from the table; None: unknown."""
    if given is not None:
        return given
    chip = find_chip(jax.devices()[0].device_kind)
    return chip and chip.peak_tflops


def utilization(
    *, sample_flops: float, samples_per_second: float, chips: int, peak: float
) -> float:
    """Model FLOP utilization, 0 to 1; `peak` in TFLOP/s a chip."""
    return sample_flops * samples_per_second / (chips * peak * 1e12)


def gif(clips: np.ndarray, *, fps: int = FRAMES_PER_SECOND) -> bytes:
    """Clips uint8 [n, f, h, w, 3], side by side in rows of eight, as one animated GIF."""
    count, frames, height, width, _ = clips.shape
    columns = min(count, _GIF_COLUMNS)
    rows = math.ceil(count / columns)
    sheet = np.zeros((frames, rows * height, columns * width, 3), np.uint8)
    for i, clip in enumerate(clips):
        y, x = (i // columns) * height, (i % columns) * width
        sheet[:, y : y + height, x : x + width] = clip
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


def read_lines(path: Path, *, step: int | None = None) -> list[str]:
    """The whole lines of a metrics file up to a step: a killed run may have written more."""
    kept = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:  # the last one, half-written
            continue
        if step is None or record.get("step", math.inf) <= step:
            kept.append(line)
    return kept


def is_clocked(name: str) -> bool:
    """Whether a scalar of the records depends on the clock: it differs between two equal runs."""
    return "second" in name or name in ("mfu", "goodput")


def _short(value: float) -> str:
    return f"{value:.4g}"


class Recorder:
    """Where a run's numbers go; outside process 0 it does nothing.

    Records grow line by line, which a bucket's files cannot: for a run in a bucket they are written
    to a temporary folder and copied with every checkpoint.

    Args:
        folder: of the run.
        step: steps done before; later lines of an earlier run are taken out of the files.
        steps: in all.
        name: of the stage, for the terminal.
        local: where the records grow; None: in `folder`, or for a bucket in a temporary folder.

    Raises:
        UserError: the records cannot be written.
    """

    def __init__(
        self, folder: epath.Path, *, step: int, steps: int, name: str, local: Path | None = None
    ):
        self._active = jax.process_index() == 0
        if not self._active:
            return
        from tensorboardX import SummaryWriter

        if local is None and is_bucket(folder):
            local = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
        self._copies = None if local is None else folder
        local = Path(folder) if local is None else local
        self._path = local / METRICS_FILE
        with self._telling():
            local.mkdir(parents=True, exist_ok=True)
        if self._copies is not None:
            with self._copying():
                if (folder / METRICS_FILE).exists():
                    self._path.write_bytes((folder / METRICS_FILE).read_bytes())
        with self._telling():
            lines = read_lines(self._path, step=step)
            write_whole(self._path, "".join(f"{line}\n" for line in lines).encode())
            self._file = open(self._path, "a")  # noqa: SIM115 - closed in `close`
            self._events = SummaryWriter(str(local / EVENTS), purge_step=step + 1)
        self._console = Console(stderr=True, highlight=False)
        self._name, self._steps, self._start = name, steps, step
        self._last_line = -math.inf
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(name, total=steps, completed=step, text="compiling")
            self._bar.start()
        if self._copies is not None:
            self.say(
                f"{name}: {METRICS_FILE} and {EVENTS}/ grow in {local}; they are copied with every "
                "checkpoint"
            )

    def _telling(self) -> Any:
        return telling(self._path, "cannot be written", mend="make room there, then start again")

    def _copying(self) -> Any:
        mend = "look for the bucket's room and rights, then start again"
        return telling(self._copies or self._path, "the records cannot be copied", mend=mend)

    def copy(self) -> None:
        """Brings the records to the run's folder, where they are written elsewhere.

        Raises:
            UserError: they cannot be written there.
        """
        if not self._active or self._copies is None:
            return
        with self._telling():
            if not self._file.closed:
                self._file.flush()
                self._events.flush()
        with self._copying():
            (self._copies / EVENTS).mkdir(parents=True, exist_ok=True)
            for file in (self._path, *(self._path.parent / EVENTS).iterdir()):
                place = file.relative_to(self._path.parent)
                (self._copies / place).write_bytes(file.read_bytes())

    def say(self, line: str) -> None:
        """A line above the bar."""
        if self._active:
            self._console.print(line, markup=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        """Moves the bar."""
        if self._active and self._bar is not None:
            self._bar.update(self._task, completed=step)

    def log(
        self, step: int, scalars: Mapping[str, float], *, steps_per_second: float | None
    ) -> None:
        """The numbers of a training step, to file, events and terminal.

        `steps_per_second`: None: not yet known.
        """
        if not self._active:
            return
        self._write(step, scalars, prefix="train/")
        loss = f"loss {_short(scalars['loss'])}"
        left = ""
        if steps_per_second:
            seconds = datetime.timedelta(seconds=round((self._steps - step) / steps_per_second))
            left = f"{_short(steps_per_second)} steps/s, {seconds} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=f"{loss}  {left}")
        elif time.monotonic() - self._last_line > _PLAIN_SECONDS or step == self._steps:
            self._last_line = time.monotonic()
            self.say(f"{self._name} {step}/{self._steps}  {loss}  {left}")

    def watched(self, step: int, watched: Watched) -> None:
        """Scores and clips of the held-out data."""
        if not self._active:
            return
        self._write(step, {f"watch/{k}": v for k, v in watched.scalars.items()}, prefix="")
        with self._telling():
            for name, clips in watched.clips.items():
                self._add_clips(f"watch/{name}", np.asarray(clips), step)
            self._events.flush()
        told = "  ".join(f"{name} {_short(value)}" for name, value in watched.scalars.items())
        self.say(f"{self._name} {step}/{self._steps}  held-out: {told}")

    def _write(self, step: int, scalars: Mapping[str, float], *, prefix: str) -> None:
        # NaN and infinity are no JSON: null.
        finite = {k: v if math.isfinite(v) else None for k, v in scalars.items()}
        with self._telling():
            self._file.write(json.dumps({"step": step, **finite}) + "\n")
            self._file.flush()
            for name, value in scalars.items():
                self._events.add_scalar(prefix + name, value, step)

    def _add_clips(self, tag: str, clips: np.ndarray, step: int) -> None:
        from tensorboardX.proto import summary_pb2

        Summary = getattr(summary_pb2, "Summary")  # noqa: B009 - protobuf makes it at run time
        image = Summary.Image(
            height=clips.shape[2],
            width=clips.shape[3],
            colorspace=3,
            encoded_image_string=gif(clips),
        )
        summary = Summary(value=[Summary.Value(tag=tag, image=image)])
        writer = self._events.file_writer
        assert writer is not None
        writer.add_summary(summary, step)

    def close(self) -> None:
        """Ends the bar and the files."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.stop()
        with self._telling():
            os.fsync(self._file.fileno())
            self._file.close()
            self._events.close()
        self.copy()
