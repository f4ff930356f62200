"""Times forms of attention, of the 3 x 3 x 3 convolution and of matrix products side by side.

    python scripts/bench/bench_operations.py attention [--tokens 512 2048 6976] [--backward]
    python scripts/bench/bench_operations.py conv3d
    python scripts/bench/bench_operations.py half
    python scripts/bench/bench_operations.py matmuls

The forms of a table take turns, so that other work on the machine affects all alike. Prints the
Markdown tables of `docs/decisions/`; compilation is not counted.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from animegamer_jax.devices import quiet_libtpu

quiet_libtpu()  # before JAX

import jax
import jax.numpy as jnp
from tyro.extras import SubcommandApp

from animegamer_jax.models.convolution import (
    conv3d_direct,
    conv3d_planes,
    stacked_planes,
    sum_of_planes,
)
from animegamer_jax.models.kernels.blocked import (
    blocked_attention,
    plain_attention,
    saving_attention,
)
from animegamer_jax.models.linear import affine
from animegamer_jax.sharding import make_mesh

app = SubcommandApp()
Form = Callable[..., jax.Array]

CONVOLUTIONS: Mapping[str, Form] = {
    "direct": conv3d_direct,
    "planes": sum_of_planes,
    "stacked": stacked_planes,
    "own gradient": conv3d_planes,
}
# Frames, rows, columns, channels in and out. The first two are wide, the others as in small VAEs.
CONVOLUTION_SHAPES = (
    (9, 48, 72, 64, 64),
    (5, 24, 36, 256, 256),
    (17, 48, 72, 3, 8),
    (17, 48, 72, 8, 8),
    (17, 48, 72, 16, 16),
    (9, 24, 36, 24, 24),
    (9, 24, 36, 32, 32),
    (5, 12, 18, 48, 48),
)
# Tokens, width in and out: of the first toy's transformer and language model, and a wide one.
PRODUCT_SHAPES = (
    (4608, 192, 576),
    (4608, 576, 192),
    (8272, 192, 512),
    (8272, 512, 192),
    (2048, 2048, 2048),
)


class Times(NamedTuple):
    """Milliseconds of every call: of the clock, and of all processor cores together."""

    wall: list[float]
    cpu: list[float]


def time_in_turns(
    calls: Mapping[str, Callable[[], jax.Array]], *, rounds: int, seconds: float = 0.0
) -> dict[str, Times]:
    """Runs each call once in each round, for at least these rounds and seconds per call."""
    for call in calls.values():
        jax.block_until_ready(call())
    times = {name: Times([], []) for name in calls}
    end = time.perf_counter() + seconds * len(calls)
    while rounds > 0 or time.perf_counter() < end:
        rounds -= 1
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(call())
            times[name].wall.append(1e3 * (time.perf_counter() - wall))
            times[name].cpu.append(1e3 * (time.process_time() - cpu))
    return times


def print_row(*cells: object) -> None:
    """Prints a row of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_head(*cells: str) -> None:
    """Prints the first two lines of a Markdown table."""
    print(f"\njax {jax.__version__}, {jax.devices()[0].device_kind}\n")
    print_row(*cells)
    print("|---" * len(cells) + "|")


@app.command
def attention(
    *,
    tokens: tuple[int, ...] = (512, 2048, 6976),
    block_rows: tuple[int, ...] = (512,),
    games: int = 1,
    heads: int = 8,
    head_width: int = 64,
    dtype: str = "float32",
    seconds: float = 5.0,
    backward: bool = False,
    shared: bool = False,
) -> None:
    """Time the forms of attention.

    Args:
        tokens: Numbers of tokens.
        block_rows: Numbers of score rows in a block of the blocked form.
        games: Batch size.
        heads: Number of heads.
        head_width: Features of a head.
        dtype: Number format.
        seconds: Least time for each form and number of tokens.
        backward: Time the gradients of all inputs.
        shared: Share the games among all devices, as training does.
    """
    mesh = make_mesh({"data": len(jax.devices()) if shared else 1})
    sharding = jax.NamedSharding(mesh, jax.P("data"))

    def tokens_first(form: Form) -> Form:
        return lambda *arrays: form(*(x.swapaxes(1, 2) for x in arrays)).swapaxes(1, 2)

    forms: dict[str, Form] = {
        "jax.nn.dot_product_attention": jax.nn.dot_product_attention,
        "plain": tokens_first(plain_attention),
        "saving": tokens_first(saving_attention),
    }
    for rows in block_rows:
        blocked = functools.partial(blocked_attention, block_rows=rows)
        forms[f"blocked, {rows} rows"] = tokens_first(blocked)
    print_head("tokens", "form", "ms, fastest", "ms, median", "CPU ms", "temporary MB", "x")
    for count in tokens:
        shape = (games, count, heads, head_width)
        inputs = [
            jax.device_put(jax.random.normal(k, shape, dtype), sharding)
            for k in jax.random.split(jax.random.key(0), 3)
        ]
        compiled = {}
        for name, form in forms.items():

            def loss(q, k, v, form: Form = form) -> jax.Array:  # depends on each output differently
                return jnp.sum(form(q, k, v) * jax.lax.stop_gradient(q))

            function = jax.grad(loss, argnums=(0, 1, 2)) if backward else form
            with jax.set_mesh(mesh) if shared else contextlib.nullcontext():
                compiled[name] = jax.jit(function).lower(*inputs).compile()
        calls = {name: functools.partial(c, *inputs) for name, c in compiled.items()}
        times = time_in_turns(calls, rounds=3, seconds=seconds)
        base = min(times["jax.nn.dot_product_attention"].wall)
        for name, (wall, cpu) in times.items():
            memory = compiled[name].memory_analysis().temp_size_in_bytes / 1e6
            numbers = (min(wall), statistics.median(wall), statistics.median(cpu), memory)
            print_row(count, name, *(f"{x:.1f}" for x in (*numbers, base / min(wall))))


@app.command
def conv3d(*, rounds: int = 7, dtype: str = "float32") -> None:
    """Time the forms of the 3D convolution, forward and with the gradients of input and kernel.

    Args:
        rounds: Number of calls of each form; the best one counts.
        dtype: Number format.
    """
    print_head(
        "frames x rows x columns, channels", "form", "forward, ms", "GFLOP/s", "gradients, ms",
        "of all cores, ms",
    )  # fmt: skip
    for frames, rows, columns, i, o in CONVOLUTION_SHAPES:
        keys = jax.random.split(jax.random.key(0))
        x = jax.random.normal(keys[0], (1, frames + 2, rows, columns, i), dtype)
        kernel = jax.random.normal(keys[1], (3, 3, 3, i, o), dtype)
        forward, gradients = {}, {}
        for name, form in CONVOLUTIONS.items():

            def loss(x: jax.Array, kernel: jax.Array, form: Form = form) -> jax.Array:
                return jnp.square(form(x, kernel)).sum()

            forward[name] = jax.tree_util.Partial(jax.jit(form), x, kernel)
            gradients[name] = jax.tree_util.Partial(jax.jit(jax.grad(loss, (0, 1))), x, kernel)
        forward_times = time_in_turns(forward, rounds=rounds)
        gradient_times = time_in_turns(gradients, rounds=rounds)
        for name in CONVOLUTIONS:
            best = min(forward_times[name].wall)
            rate = 2 * 27 * frames * rows * columns * i * o / best / 1e6
            wall, cpu = map(min, gradient_times[name])
            shape = f"{frames} x {rows} x {columns}, {i} to {o}"
            print_row(shape, name, f"{best:.1f}", f"{rate:.0f}", f"{wall:.1f}", f"{cpu:.1f}")


# Frames, rows, columns, channels: of the middle size's VAE.
HALF_SHAPES = ((9, 128, 192, 32), (9, 64, 96, 64), (5, 32, 48, 128))


def _in_float32(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return sum_of_planes(x.astype(jnp.float32), kernel.astype(jnp.float32)).astype(x.dtype)


def _by_products(x: jax.Array, kernel: jax.Array, *, rows: int = 16) -> jax.Array:
    """Convolves one clip by products of its copies, some rows of a frame at a time."""
    _, frames, height, width, i = x.shape
    blocks, o = height // rows, kernel.shape[-1]
    x = jnp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)))

    def one(n: jax.Array) -> jax.Array:
        start = 0, n // blocks, n % blocks * rows, 0, 0
        part = jax.lax.dynamic_slice(x, start, (1, 3, rows + 2, width + 2, i))[0]
        moved = [
            part[t, r : r + rows, c : c + width]
            for t in range(3)
            for r in range(3)
            for c in range(3)
        ]
        copies = jnp.concatenate(moved, axis=-1).reshape(rows * width, 27 * i)
        y = jnp.matmul(copies, kernel.reshape(-1, o), preferred_element_type=jnp.float32)
        return y.astype(x.dtype)

    out = jax.lax.map(one, jnp.arange((frames - 2) * blocks))
    return out.reshape(1, frames - 2, height, width, o)


@app.command
def half(*, rounds: int = 3) -> None:
    """Time the 3D convolution in bfloat16, next to float32 and PyTorch: ms of all cores together.

    Args:
        rounds: Number of calls of each form; the best one counts.
    """
    import torch

    forms = {
        "float32": (sum_of_planes, "float32"),
        "bfloat16": (sum_of_planes, "bfloat16"),
        "cast to float32": (_in_float32, "bfloat16"),
        "products": (_by_products, "bfloat16"),
    }
    print_head("frames x rows x columns, channels", *forms, "PyTorch, bfloat16")
    for frames, rows, columns, channels in HALF_SHAPES:
        shape = (1, frames + 2, rows, columns, channels)
        calls = {}
        for name, (form, dtype) in forms.items():
            x = jax.random.normal(jax.random.key(0), shape, dtype)
            kernel = jax.random.normal(jax.random.key(1), (3, 3, 3, channels, channels), dtype)
            calls[name] = jax.tree_util.Partial(jax.jit(form), x, kernel)
        given = torch.randn(1, channels, *shape[1:4], dtype=torch.bfloat16)
        weight = torch.randn(channels, channels, 3, 3, 3, dtype=torch.bfloat16)
        convolve = functools.partial(torch.nn.functional.conv3d, given, weight, padding=(0, 1, 1))
        calls["PyTorch, bfloat16"] = lambda convolve=convolve: convolve().numel()
        with torch.inference_mode():
            times = time_in_turns(calls, rounds=rounds)
        cells = (f"{min(t.cpu):.0f}" for t in times.values())
        print_row(f"{frames} x {rows} x {columns}, {channels}", *cells)


def _two_axes(x: jax.Array, dy: jax.Array) -> jax.Array:
    x, dy = (y.reshape(8, -1, y.shape[-1]) for y in (x, dy))
    return jnp.einsum("bti,bto->io", x, dy, preferred_element_type=jnp.float32)


def _first_axes(x: jax.Array, dy: jax.Array) -> jax.Array:
    return jnp.einsum("ti,to->io", x, dy, preferred_element_type=jnp.float32)


def _own(x: jax.Array, dy: jax.Array) -> jax.Array:
    kernel = jnp.zeros((x.shape[1], dy.shape[1]), x.dtype)
    return jax.vjp(lambda kernel: affine(x, kernel, None), kernel)[1](dy)[0]


def _sum_in(dtype: str | None) -> Form:
    return lambda x, kernel: jnp.matmul(x, kernel, preferred_element_type=dtype)


FORWARD: Mapping[str, tuple[str, Form]] = {
    "float32": ("float32", _sum_in(None)),
    "bfloat16, sums in bfloat16": ("bfloat16", _sum_in(None)),
    "bfloat16, sums in float32": ("bfloat16", _sum_in("float32")),
}
GRADIENT: Mapping[str, tuple[str, Form]] = {
    f"{name}, {dtype}": (dtype, form)
    for dtype in ("float32", "bfloat16")
    for name, form in (
        ("two axes of tokens", _two_axes),
        ("first axes", _first_axes),
        ("own", _own),
    )
}


@app.command
def matmuls(*, rounds: int = 9) -> None:
    """Time the forms of a linear layer, forward and for its kernel's gradient, in milliseconds.

    Args:
        rounds: Number of calls of each form; the best one counts.
    """
    for title, forms in (("forward", FORWARD), ("kernel's gradient", GRADIENT)):
        print_head(f"{title}: tokens, in, out", *forms)
        for tokens, i, o in PRODUCT_SHAPES:
            second = (i, o) if title == "forward" else (tokens, o)
            calls = {}
            for name, (dtype, form) in forms.items():
                x = jax.random.normal(jax.random.key(0), (tokens, i), dtype)
                y = jax.random.normal(jax.random.key(1), second, dtype)
                calls[name] = jax.tree_util.Partial(jax.jit(form), x, y)
            times = time_in_turns(calls, rounds=rounds)
            print_row(f"{tokens}, {i}, {o}", *(f"{min(t.wall):.1f}" for t in times.values()))


if __name__ == "__main__":
    app.cli()
