"""Estimates the time of attention on a TPU chip by its compiler's schedule.

    python scripts/bench/attention_schedule.py [--chips v6e --kernels bounded training]

libtpu can write down how it packs a kernel's instructions into bundles, one for each cycle
(`animegamer_jax/plan/compiled/schedule.py`). This script compiles our kernels for play and for
training, and JAX's splash attention with the blocks that training gives it, for heads of 64 and the
released clip's 7,168 tokens. It makes a table of `docs/decisions/attention.md`. For splash
attention the result is an upper bound: its first and last blocks of keys do more than the others,
and all instructions are counted for each block.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

HEADS, WIDTH, TOKENS = 4, 64, 7168
LAYER_CALLS = 50 * 30  # in a turn of 50 steps
ROWS = 2  # with guidance
KERNELS = ("play", "bounded", "training", "splash")


def compile_kernel(chip: str, kernel: str) -> None:
    """Compiles a kernel, with its gradient if it has one, for one chip."""
    import jax
    import jax.numpy as jnp

    from animegamer_jax.models.kernels.attend import kernel_attention
    from animegamer_jax.plan.topology import describe_devices, parse_topology
    from animegamer_jax.sharding import make_mesh

    topology = parse_topology(f"{chip}:1x1" + ("x1" if chip == "v5p" else ""))
    mesh = make_mesh(devices=describe_devices(topology))
    one = jax.NamedSharding(mesh, jax.P())
    shape = jax.ShapeDtypeStruct((1, HEADS, WIDTH, TOKENS), jnp.bfloat16, sharding=one)

    def run(*parts: jax.Array) -> jax.Array:
        parts = tuple(x.swapaxes(2, 3) for x in parts)
        out = kernel_attention(*parts, scale=0.125, tokens_last=True, kernel=kernel)
        return out.swapaxes(2, 3)

    def gradients(*parts: jax.Array) -> tuple[jax.Array, ...]:
        out, backward = jax.vjp(run, *parts)
        return backward(out)

    function = gradients if kernel in ("training", "splash") else run
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(function, out_shardings=one).lower(*(shape,) * 3).compile()


def schedule(chip: str, kernel: str) -> dict[str, float]:
    """Returns the chip's cycles for 1,024 scores, forward and, for training, backward."""
    from animegamer_jax.plan.compiled.schedule import compiler_flags, read_schedules

    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "LIBTPU_INIT_ARGS": compiler_flags(Path(folder)),
        }
        command = [sys.executable, __file__, "--one", chip, kernel]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        found: dict[str, float] = defaultdict(float)
        for name, one in read_schedules(Path(folder)).items():
            if "flash" in name or "splash" in name:
                is_backward = "backward" in name or "dkv" in name
                found["backward" if is_backward else "forward"] += one.cycles
    return {phase: cycles / (HEADS * TOKENS**2 / 1024) for phase, cycles in found.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chips", nargs="+", default=["v5e", "v5p", "v6e"])
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=KERNELS)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        compile_kernel(*args.one)
        return
    from animegamer_jax.devices import CHIPS

    print("| chip | kernel | pass | cycles of a chip for 1,024 scores | 50 steps on a chip, s |")
    print("|---|---|---|---|---|")
    for name in args.chips:
        for kernel in args.kernels:
            for phase, cycles in sorted(schedule(name, kernel).items(), reverse=True):
                scores = ROWS * 30 * TOKENS**2 * LAYER_CALLS
                seconds = scores / 1024 * cycles / (CHIPS[name].clock_ghz * 1e9)
                whole = f"{seconds:.2f}" if phase == "forward" else ""
                print(f"| {name} | {kernel} | {phase} | {cycles:.2f} | {whole} |", flush=True)


if __name__ == "__main__":
    main()
