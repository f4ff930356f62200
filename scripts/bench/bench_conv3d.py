"""Times the forms of the 3 x 3 x 3 convolution side by side: `python scripts/bench/bench_conv3d.py`.

The forms take turns within one run, so that other work on the machine meets all alike; the best of
the rounds counts. "gradients" is the forward pass with the gradients of input and kernel, also in
seconds of all cores together, which depend less on what else runs. The table for
`docs/decisions/conv3d.md`.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from animegamer_jax.models.convolution import (
    conv3d_direct,
    conv3d_planes,
    stacked_planes,
    sum_of_planes,
)

FORMS = {
    "direct": conv3d_direct,
    "planes": sum_of_planes,
    "stacked": stacked_planes,
    "own gradient": conv3d_planes,
}
# Frames, rows, columns, channels in and out. The first two are wide, the others as in small VAEs.
SHAPES = (
    (9, 48, 72, 64, 64),
    (5, 24, 36, 256, 256),
    (17, 48, 72, 3, 8),
    (17, 48, 72, 8, 8),
    (17, 48, 72, 16, 16),
    (9, 24, 36, 24, 24),
    (9, 24, 36, 32, 32),
    (5, 12, 18, 48, 48),
)


def _seconds(
    functions: dict[str, Callable[[], jax.Array]], rounds: int
) -> dict[str, tuple[float, float]]:
    """Of the clock, and of all cores."""
    for function in functions.values():
        jax.block_until_ready(function())
    best = dict.fromkeys(functions, (float("inf"), float("inf")))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter(), time.process_time()
            jax.block_until_ready(function())
            passed = time.perf_counter() - start[0], time.process_time() - start[1]
            best[name] = min(best[name][0], passed[0]), min(best[name][1], passed[1])
    return best


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()

    print(f"jax {jax.__version__}, {jax.default_backend()}, {args.dtype}, best of {args.rounds}\n")
    print(
        "| frames x rows x columns, channels | form | forward, ms | GFLOP/s | gradients, ms "
        "| of all cores, ms |"
    )
    print("|---|---|---|---|---|---|")
    for frames, rows, columns, i, o in SHAPES:
        keys = jax.random.split(jax.random.key(0))
        x = jax.random.normal(keys[0], (1, frames + 2, rows, columns, i), args.dtype)
        kernel = jax.random.normal(keys[1], (3, 3, 3, i, o), args.dtype)
        forward, gradients = {}, {}
        for name, form in FORMS.items():

            def loss(x: jax.Array, kernel: jax.Array, form: Callable = form) -> jax.Array:
                return jnp.square(form(x, kernel)).sum()

            forward[name] = jax.tree_util.Partial(jax.jit(form), x, kernel)
            gradients[name] = jax.tree_util.Partial(jax.jit(jax.grad(loss, (0, 1))), x, kernel)
        forward, gradients = _seconds(forward, args.rounds), _seconds(gradients, args.rounds)
        for name in FORMS:
            rate = 2 * 27 * frames * rows * columns * i * o / forward[name][0] / 1e9
            print(
                f"| {frames} x {rows} x {columns}, {i} to {o} | {name} "
                f"| {forward[name][0] * 1e3:.1f} | {rate:.0f} | {gradients[name][0] * 1e3:.1f} "
                f"| {gradients[name][1] * 1e3:.1f} |"
            )


if __name__ == "__main__":
    main()
