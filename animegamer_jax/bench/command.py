"""`animegamer bench`: the parts of a turn and the training steps, timed; PyTorch beside them."""

import json as jsonlib
import os
import sys
import tempfile
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from animegamer_jax.configs import Dtype
from animegamer_jax.errors import UserError

if TYPE_CHECKING:
    from animegamer_jax.bundle.bundle import Bundle

PlayName = Literal["mllm", "step", "sampler", "vae", "turn"]
ProgramName = Literal[
    PlayName,
    "train-clip",
    "train-t5",
    "train-vae",
    "train-dit",
    "train-warmup",
    "train-decoder",
    "train-mllm",
    "train-adapt",
]
TorchSide = Literal["eager", "compiled"]
PLAY: tuple[PlayName, ...] = ("mllm", "step", "sampler", "vae", "turn")
_WIDTH = 400  # of the tables: a row is never cut


def bench(
    *,
    model: str = "toy",
    programs: tuple[ProgramName, ...] = (),
    repeats: int = 10,
    steps: int | None = None,
    window: int | None = None,
    dtype: Dtype | None = None,
    batch: int | None = None,
    threads: int | None = None,
    against: Literal["torch"] | None = None,
    torch: tuple[TorchSide, ...] = ("eager", "compiled"),
    json: Path | None = None,
) -> int:
    """Time the parts of a turn and the stages' training steps, beside PyTorch where asked.

    Args:
        model: A model folder; `toy` for the embedded one; `middle` for random weights of a size
            between it and the released one.
        programs: What to time. Default: the parts of a turn and all of it, and the training step of
            every stage that the model has networks for; with --against the former only.
        repeats: Calls of each, after one that does not count.
        steps: Denoising steps of the sampler and the turn. Default: the model's own.
        window: Turns of context, this one included, all of them there. Default: the model's own.
        dtype: Number format of weights and computation. Default: float32 for the parts of a turn,
            the recipe's for the training steps.
        batch: Samples of a training step. Default: the recipe's; 1 for `middle`.
        threads: Cores to run on, of those there are. Default: all.
        against: Builds the networks that play from diffusers' and transformers' parts with the same
            weights, checks that they answer the same, and times both in turn. On a CPU.
        torch: How PyTorch runs: as it is, as torch.compile makes it, or both.
        json: A file to write, with the seconds of every call.

    Raises:
        UserError: a program, a number or the model does not fit, or PyTorch answers otherwise.
    """
    for option, value in (("--repeats", repeats), ("--steps", steps), ("--batch", batch)):
        if value is not None and value < 1:
            raise UserError(f"{option} {value}: expected 1 or more")
    trained = [name for name in programs if name not in PLAY]
    if against and trained:
        raise UserError(
            f"--against {against}: {', '.join(trained)}: only the parts of a turn are there in "
            f"PyTorch: {', '.join(PLAY)}"
        )
    if json is not None and not json.parent.is_dir():
        raise UserError(f"--json {json}: expected a file in a folder that is there")
    cores = _use_threads(threads)
    if "jax" not in sys.modules:  # compile times are those of a first time
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    if against:
        import diffusers as diffusers
        import torch as torch_library

        torch_library.set_num_threads(cores)

    from rich.console import Console

    from animegamer_jax.bench import report, run
    from animegamer_jax.bench.model import Model, opened

    if against:
        _check_cpu()
    format_ = dtype or "float32"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bundle = opened(model, folder)
        wanted = dict.fromkeys(programs or _default_programs(bundle, plays_only=bool(against)))
        playing = [name for name in wanted if name in PLAY]
        rows = []
        if playing:
            ours = Model(bundle, dtype=format_, window=window, steps=steps)
            sides = run.torch_sides(ours, folder, dtype=format_, names=torch) if against else {}
            rows += run.time_play(ours, playing, sides=sides, dtype=format_, repeats=repeats)
        size = 1 if model == "middle" and batch is None else batch
        rows += [
            run.time_stage(name, bundle, dtype=dtype, batch_size=size, repeats=repeats)
            for name in wanted
            if name not in PLAY
        ]
    libraries = ("jax", "jaxlib", *(("torch", "diffusers", "transformers") if against else ()))
    about = run.describe(
        bundle.name, threads=cores, dtype=format_, repeats=repeats, libraries=libraries
    )
    if json is not None:
        json.write_text(jsonlib.dumps(report.as_object(about, rows), indent=1) + "\n")
    console = Console(highlight=False, markup=False, soft_wrap=True, width=_WIDTH)
    report.show(about, rows, console)
    return 0


def _use_threads(threads: int | None) -> int:
    """Keeps this process to so many cores, and says how many it has.

    Raises:
        UserError: there are not so many, or the system cannot do it.
    """
    pin = getattr(os, "sched_setaffinity", None)
    cores = sorted(os.sched_getaffinity(0)) if pin else list(range(os.cpu_count() or 1))
    if threads is None or threads == len(cores):
        return len(cores)
    if not 1 <= threads <= len(cores):
        raise UserError(f"--threads {threads}: expected 1 to {len(cores)}, which are there")
    if pin is None:
        raise UserError(f"--threads {threads}: this system cannot keep a process to some cores")
    if "jax" in sys.modules:
        raise UserError(f"--threads {threads}: JAX has started with {len(cores)}")
    pin(0, cores[:threads])
    return threads


def _check_cpu() -> None:
    import jax

    if jax.default_backend() != "cpu":
        raise UserError(
            f"--against torch: PyTorch runs on the CPU here, and JAX on {jax.default_backend()}: "
            "set JAX_PLATFORMS=cpu"
        )


def _default_programs(bundle: "Bundle", *, plays_only: bool) -> tuple[str, ...]:
    if plays_only or util.find_spec("grain") is None:
        return PLAY
    from animegamer_jax.bench.training import trainable

    return (*PLAY, *trainable(bundle))
