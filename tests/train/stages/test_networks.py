"""FLOPs of products and convolutions, counted in a function's program."""

import jax
import jax.numpy as jnp

from animegamer_jax.train.stages.networks import count_matmul_flops


def test_products_are_counted():
    x, w = jax.ShapeDtypeStruct((5, 6), jnp.float32), jax.ShapeDtypeStruct((6, 7), jnp.float32)
    product = 2 * 5 * 6 * 7
    assert count_matmul_flops(lambda x, w: jax.nn.silu(x @ w) + 1, x, w) == product
    square = jax.ShapeDtypeStruct((5, 5), jnp.float32)
    loop = jax.jit(lambda a: jax.lax.scan(lambda c, _: (c @ a, None), a, None, length=3)[0])
    assert count_matmul_flops(loop, square) == 3 * 2 * 5**3
    frames = jax.ShapeDtypeStruct((2, 8, 9, 3), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 3, 4), jnp.float32)

    def convolve(x: jax.Array, k: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    assert count_matmul_flops(convolve, frames, kernel) == 2 * (2 * 8 * 9 * 4) * (3 * 3 * 3)
