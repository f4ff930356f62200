"""Times the forms of attention side by side, in one process and interleaved.

    python scripts/bench/bench_attention.py [--tokens 512 2048 6976] [--backward]

Prints a table: wall-clock milliseconds of the fastest call (other work on the machine only adds),
of the median call, processor milliseconds of the median call, and the compiled function's
temporary memory. Compilation is not counted.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from animegamer_jax.models.kernels.blocked import blocked_attention, plain_attention


def make_forms(block_rows: list[int]) -> dict[str, Callable[..., jax.Array]]:
    """Returns the functions to compare, of [b, t, h, d] arrays, by name."""

    def tokens_first(attention: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda *arrays: attention(*(x.swapaxes(1, 2) for x in arrays)).swapaxes(1, 2)

    forms = {
        "jax.nn.dot_product_attention": jax.nn.dot_product_attention,
        "plain": tokens_first(plain_attention),
    }
    for rows in block_rows:
        blocked = functools.partial(blocked_attention, block_rows=rows)
        forms[f"blocked, {rows} rows"] = tokens_first(blocked)
    return forms


def with_gradients(form: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """All three gradients of a loss that depends on every output differently."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = form(q, k, v)
        return jnp.sum(out * jax.lax.stop_gradient(q))

    return jax.grad(loss, argnums=(0, 1, 2))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Times the forms of attention.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 6976])
    parser.add_argument("--block-rows", type=int, nargs="+", default=[512])
    parser.add_argument("--games", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-width", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each form and length")
    parser.add_argument("--backward", action="store_true", help="time gradients")
    args = parser.parse_args()

    what = "gradients" if args.backward else "forward"
    table = Table(
        title=f"{what}: {args.games} x t x {args.heads} heads of {args.head_width}, {args.dtype}, "
        f"{jax.devices()[0].device_kind}"
    )
    for column in ("tokens", "form", "ms, fastest", "ms, median", "CPU ms", "temporary MB", "x"):
        table.add_column(column, justify="left" if column == "form" else "right")

    for tokens in args.tokens:
        shape = (args.games, tokens, args.heads, args.head_width)
        keys = jax.random.split(jax.random.key(0), 3)
        inputs = [jax.random.normal(key, shape, args.dtype) for key in keys]
        compiled, times = {}, {}
        for name, form in make_forms(args.block_rows).items():
            function = with_gradients(form) if args.backward else form
            compiled[name] = jax.jit(function).lower(*inputs).compile()
            jax.block_until_ready(compiled[name](*inputs))
            times[name] = []
        end = time.perf_counter() + args.seconds * len(compiled)
        while time.perf_counter() < end or min(map(len, times.values())) < 3:
            for name, function in compiled.items():
                start, start_cpu = time.perf_counter(), time.process_time()
                jax.block_until_ready(function(*inputs))
                wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
                times[name].append((1e3 * wall, 1e3 * cpu))
        base = min(wall for wall, _ in times["jax.nn.dot_product_attention"])
        for name, runs in times.items():
            walls, cpus = zip(*runs, strict=True)
            table.add_row(
                str(tokens),
                name,
                f"{min(walls):.1f}",
                f"{statistics.median(walls):.1f}",
                f"{statistics.median(cpus):.1f}",
                f"{compiled[name].memory_analysis().temp_size_in_bytes / 1e6:.1f}",
                f"{base / min(walls):.1f}",
            )
        table.add_section()
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
