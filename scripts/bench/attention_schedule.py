"""Estimates the time of attention on a TPU core by its compiler's schedule.

    python scripts/bench/attention_schedule.py    # 3 minutes; needs the extra `plan`

libtpu can write down how it packs a kernel's instructions into bundles, one for each cycle. A
kernel without branches takes as many cycles for a block as it has bundles, if memory keeps up. This
script compiles our flash kernel and JAX's splash attention, with the blocks that training gives it,
for heads of 64 and the released clip's 7,168 tokens. It makes the table of
`docs/decisions/attention.md` and `flash_cycles` of `devices.py`. For splash attention the result is
an upper bound: its first and last blocks of keys do more than the others, and all instructions are
counted for each block.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HEADS, WIDTH, TOKENS = 4, 64, 7168
LAYER_CALLS = 50 * 30  # in a turn of 50 steps
ROWS = 2  # with guidance
KERNELS = ("flash", "splash")
PARTS = {"all": TOKENS, "a quarter": TOKENS // 4}


def compile_kernel(chip: str, kernel: str, queries: int) -> int:
    """Compiles a kernel for one chip; returns the number of scores in one of its blocks."""
    import jax
    import jax.numpy as jnp

    from animegamer_jax.models.kernels import flash, splash
    from animegamer_jax.plan.topology import describe_devices, parse_topology
    from animegamer_jax.sharding import has_wide_unit, make_mesh

    topology = parse_topology(f"{chip}:1x1" + ("x1" if chip == "v5p" else ""))
    mesh = make_mesh(devices=describe_devices(topology))
    one = jax.NamedSharding(mesh, jax.P())
    shapes = ((1, HEADS, WIDTH, n) for n in (queries, TOKENS, TOKENS))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=one) for shape in shapes]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        if kernel == "flash":
            wide = has_wide_unit()
            function = jax.jit(lambda *x: flash.flash_attention(*x, wide=wide), out_shardings=one)
            scores = flash.rows_at_once(queries) * TOKENS
        else:
            function = jax.jit(
                lambda *x: splash.splash_attention(
                    *(y.swapaxes(2, 3) for y in x), tokens_last=True
                ).swapaxes(2, 3),
                out_shardings=one,
            )
            blocks = splash.choose_blocks(queries, TOKENS)
            scores = blocks.queries * blocks.keys
        function.lower(*arrays).compile()
    return scores


def schedule(chip: str, kernel: str, queries: int) -> float:
    """Returns the cycles of a core for 1,024 scores."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = ("--xla_jf_dump_to=", "--xla_jf_dump_llo_text=true")
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "LIBTPU_INIT_ARGS": f"{wanted[0]}{folder} {wanted[1]}",
        }
        command = [sys.executable, __file__, "--one", chip, kernel, str(queries)]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        (path,) = Path(folder).glob(f"*-{kernel}_*schedule-analysis_final_bundles.txt")
        bundles = re.search(r"total scheduled bundles:\s+(\d+)", path.read_text())
        assert bundles is not None, path
        return int(bundles[1]) / (int(done.stdout.split()[-1]) / 1024)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chips", nargs="+", default=["v5e", "v5p", "v6e"])
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(compile_kernel(args.one[0], args.one[1], int(args.one[2])))
        return
    from animegamer_jax.devices import CHIPS

    print("| chip | kernel | queries | cycles of a core for 1,024 scores | 50 steps on a chip, s |")
    print("|---|---|---|---|---|")
    for name in args.chips:
        chip = CHIPS[name]
        for kernel in KERNELS:
            for part, queries in PARTS.items():
                cycles = schedule(name, kernel, queries)
                scores = ROWS * 30 * TOKENS**2 * LAYER_CALLS
                seconds = scores / 1024 * cycles / chip.cores / (chip.clock_ghz * 1e9)
                whole = f"{seconds:.2f}" if queries == TOKENS else ""
                print(f"| {name} | {kernel} | {part} | {cycles:.2f} | {whole} |", flush=True)


if __name__ == "__main__":
    main()
