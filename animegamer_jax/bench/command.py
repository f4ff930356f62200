"""`animegamer bench`: times the parts of a turn and the training steps, and PyTorch if asked."""

import json as jsonlib
import os
import sys
import tempfile
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from animegamer_jax.bench.names import PLAY, ProgramName
from animegamer_jax.configs import Dtype
from animegamer_jax.errors import UserError, check_at_least

if TYPE_CHECKING:
    from animegamer_jax.bundle.bundle import Bundle

TorchMode = Literal["eager", "compiled"]
_WIDTH = 400  # of the tables, so that no row is cut


def bench(
    *,
    model: str = "toy",
    programs: tuple[ProgramName, ...] = (),
    repeats: int = 10,
    steps: int | None = None,
    skip: Path | None = None,
    window: int | None = None,
    dtype: Dtype | None = None,
    batch: int | None = None,
    threads: int | None = None,
    against: Literal["torch"] | None = None,
    torch: tuple[TorchMode, ...] = ("eager", "compiled"),
    json: Path | None = None,
) -> int:
    """Time the parts of a turn and the training steps; compare with PyTorch if asked.

    Args:
        model: Model folder; `toy` for the embedded model; `middle` for random weights of a size
            between it and the released one; `full` for random weights of the released size, made
            on the device.
        programs: Programs to time. Default: the parts of a turn, and the training step of every
            stage that the model has networks for; with --against only the parts of a turn.
        repeats: Timed calls of each program, after one that is not counted.
        steps: Denoising steps of the sampler and the turn. Default: the model's own.
        skip: File of denoising steps to skip, as `animegamer calibrate` writes it. Default: none.
        window: Turns of context, the current one included; all are filled. Default: the model's
            own.
        dtype: Number format of weights and computation. Default: float32 for the parts of a turn
            (bfloat16 for `full`), the recipe's for the training steps.
        batch: Samples of a training step. Default: the recipe's; 1 for `middle`.
        threads: Number of CPU cores to use. Default: all.
        against: Other implementation to compare with: `torch` builds the networks from diffusers'
            and transformers' parts with the same weights, checks that their outputs are equal, and
            times both in alternation, on the same CPU or GPU. For `full` the weights are other
            random ones, and outputs are not compared. Default: no comparison.
        torch: Modes of PyTorch: `eager`, `compiled` (torch.compile), or both.
        json: File to write the results to, with the seconds of every call. Default: none.

    Raises:
        UserError: A program, a number or the model does not fit, or PyTorch's outputs differ.
    """
    for option, value in (("--repeats", repeats), ("--steps", steps), ("--batch", batch)):
        check_at_least(option, value, 1)
    trained = [name for name in programs if name not in PLAY]
    if against and trained:
        raise UserError(
            f"--against {against}: {', '.join(trained)}: only the parts of a turn can be compared "
            f"with PyTorch: {', '.join(PLAY)}"
        )
    if model == "full" and trained:
        raise UserError(
            f"--model full: {', '.join(trained)}: only the parts of a turn have random weights: "
            "leave these programs out, or see `animegamer plan` for training"
        )
    if json is not None and not json.parent.is_dir():
        raise UserError(f"--json {json}: expected a file in an existing folder")
    if against and skip is not None:
        raise UserError(f"--against {against}: it computes every step: leave out --skip")
    cores = _use_threads(threads)
    if "jax" not in sys.modules:  # the reported compile times are without the cache
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        if against:  # PyTorch needs room on the same GPU
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if against:
        import diffusers as diffusers
        import torch as torch_library

        torch_library.set_num_threads(cores)

    from rich.console import Console

    from animegamer_jax.bench import report, run
    from animegamer_jax.bench.model import Model, open_model

    device = _torch_device() if against else "cpu"
    play_dtype = dtype or ("bfloat16" if model == "full" else "float32")
    with tempfile.TemporaryDirectory() as temporary:
        bundle = open_model(model, Path(temporary))
        wanted = dict.fromkeys(
            programs or _default_programs(bundle, play_only=bool(against) or model == "full")
        )
        playing = [name for name in wanted if name in PLAY]
        rows = []
        if playing:
            found = Model(bundle, dtype=play_dtype, window=window, steps=steps, skip=skip)
            modes = torch if against else ()
            others = run.torch_backends(found, dtype=play_dtype, modes=modes, device=device)
            rows += run.time_play(found, playing, others=others, dtype=play_dtype, repeats=repeats)
        size = 1 if model == "middle" and batch is None else batch
        rows += [
            run.time_stage(name, bundle, dtype=dtype, batch_size=size, repeats=repeats)
            for name in wanted
            if name not in PLAY
        ]
    libraries = ("jax", "jaxlib", *(("torch", "diffusers", "transformers") if against else ()))
    setup = run.describe_setup(
        bundle.name, threads=cores, dtype=play_dtype, repeats=repeats, libraries=libraries
    )
    if json is not None:
        json.write_text(jsonlib.dumps(report.as_object(setup, rows), indent=1) + "\n")
    console = Console(highlight=False, markup=False, soft_wrap=True, width=_WIDTH)
    report.show(setup, rows, console)
    return 0


def _use_threads(threads: int | None) -> int:
    """Limits this process to a number of cores, and returns it; None: all cores.

    Raises:
        UserError: There are fewer cores, or the system cannot limit a process.
    """
    pin = getattr(os, "sched_setaffinity", None)
    cores = sorted(os.sched_getaffinity(0)) if pin else list(range(os.cpu_count() or 1))
    if threads is None or threads == len(cores):
        return len(cores)
    if not 1 <= threads <= len(cores):
        raise UserError(f"--threads {threads}: expected 1 to {len(cores)}, the number of cores")
    if pin is None:
        raise UserError(f"--threads {threads}: this system cannot limit a process to some cores")
    if "jax" in sys.modules:
        raise UserError(f"--threads {threads}: JAX has already started with {len(cores)}")
    pin(0, cores[:threads])
    return threads


def _torch_device() -> str:
    """Returns PyTorch's name for the device that JAX computes on.

    Raises:
        UserError: PyTorch does not reach it.
    """
    import jax
    import torch

    backend = jax.default_backend()
    if backend == "cpu":
        return "cpu"
    if backend == "gpu" and torch.cuda.is_available():
        return "cuda"
    raise UserError(
        f"--against torch: PyTorch does not reach the {backend} that JAX computes on: install a "
        "build of PyTorch for it, or set JAX_PLATFORMS=cpu"
    )


def _default_programs(bundle: "Bundle", *, play_only: bool) -> tuple[str, ...]:
    if play_only or util.find_spec("grain") is None:
        return PLAY
    from animegamer_jax.bench.training import trainable

    return (*PLAY, *trainable(bundle))
