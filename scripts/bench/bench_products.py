"""Times the forms of a linear layer side by side: `python scripts/bench/bench_products.py`.

The forms take turns within one run; the best of the rounds counts. The tables are those of
`docs/decisions/products.md`.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from animegamer_jax.models.linear import affine

# Tokens, width in and out: of the toy's transformer and language model, and a wide one.
SHAPES = (
    (4608, 192, 576),
    (4608, 576, 192),
    (8272, 192, 512),
    (8272, 512, 192),
    (2048, 2048, 2048),
)
Form = Callable[[jax.Array, jax.Array], jax.Array]


def _two_axes(x: jax.Array, dy: jax.Array) -> jax.Array:
    x, dy = (y.reshape(8, -1, y.shape[-1]) for y in (x, dy))
    return jnp.einsum("bti,bto->io", x, dy, preferred_element_type=jnp.float32)


def _first_axes(x: jax.Array, dy: jax.Array) -> jax.Array:
    return jnp.einsum("ti,to->io", x, dy, preferred_element_type=jnp.float32)


def _own(x: jax.Array, dy: jax.Array) -> jax.Array:
    kernel = jnp.zeros((x.shape[1], dy.shape[1]), x.dtype)
    return jax.vjp(lambda kernel: affine(x, kernel, None), kernel)[1](dy)[0]


def _sums_in(dtype: jnp.dtype | None) -> Form:
    return lambda x, kernel: jnp.matmul(x, kernel, preferred_element_type=dtype)


FORWARD: dict[str, tuple[str, Form]] = {
    "float32": ("float32", _sums_in(None)),
    "bfloat16, sums in bfloat16": ("bfloat16", _sums_in(None)),
    "bfloat16, sums in float32": ("bfloat16", _sums_in(jnp.dtype("float32"))),
}
GRADIENT: dict[str, Form] = {
    "over two axes of tokens": _two_axes,
    "over the first axes": _first_axes,
    "ours": _own,
}


def _milliseconds(functions: dict[str, Callable[[], jax.Array]], rounds: int) -> dict[str, float]:
    for function in functions.values():
        jax.block_until_ready(function())
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def main() -> None:
    """Prints two Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print(f"jax {jax.__version__}, {jax.default_backend()}, best of {rounds}, milliseconds\n")
    print("| forward: tokens, in, out | " + " | ".join(FORWARD) + " |")
    print("|---" * (1 + len(FORWARD)) + "|")
    for tokens, i, o in SHAPES:
        functions = {}
        for name, (dtype, form) in FORWARD.items():
            x = jax.random.normal(jax.random.key(0), (tokens, i), dtype)
            kernel = jax.random.normal(jax.random.key(1), (i, o), dtype)
            functions[name] = jax.tree_util.Partial(jax.jit(form), x, kernel)
        cells = (f"{value:.1f}" for value in _milliseconds(functions, rounds).values())
        print(f"| {tokens}, {i}, {o} | " + " | ".join(cells) + " |")
    names = [f"{name}, {dtype}" for dtype in ("float32", "bfloat16") for name in GRADIENT]
    print("\n| kernel's gradient: tokens, in, out | " + " | ".join(names) + " |")
    print("|---" * (1 + len(names)) + "|")
    for tokens, i, o in SHAPES:
        functions = {}
        for dtype in ("float32", "bfloat16"):
            x = jax.random.normal(jax.random.key(0), (tokens, i), dtype)
            dy = jax.random.normal(jax.random.key(1), (tokens, o), dtype)
            for name, form in GRADIENT.items():
                functions[f"{name}, {dtype}"] = jax.tree_util.Partial(jax.jit(form), x, dy)
        cells = (f"{value:.1f}" for value in _milliseconds(functions, rounds).values())
        print(f"| {tokens}, {i}, {o} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
