"""Attention's FLOPs by arithmetic."""

from animegamer_jax.plan.compiled.costs import Cost, Kernel
from animegamer_jax.plan.compiled.estimate import attention_flops, kernel_flops, unknown_kernels
from animegamer_jax.plan.compiled.hlo import Array


def kernel(name: str, heads: int, width: int, length: int = 1024) -> Kernel:
    part = Array("bf16", (1, heads, width, length), True)
    schedule = Array("s8", (1, 7, 4), True)
    return Kernel(name, (schedule, part, part, part), (part,))


def test_attention_by_arithmetic():
    """Two products of 1024 x 1024 scores and heads of 64, which fill half of a unit of 128."""
    one = kernel("splash_mha_fwd_no_residuals", 3, 64)
    flops, width = attention_flops(one) or (0, 0)
    assert (flops, width) == (2 * 2 * 3 * 1024 * 1024 * 64, 64)
    backward = attention_flops(kernel("splash_mha_dkv_segmented", 3, 64))
    assert backward == (flops * 5 / 2, 64)
    assert attention_flops(kernel("another_kernel", 3, 64)) is None
    cost = Cost()
    cost.kernels[one] += 10
    cost.kernels[kernel("another_kernel", 3, 64)] += 5
    assert unknown_kernels(cost) == {"another_kernel": 5}
    assert kernel_flops(cost) == 10 * flops
    assert attention_flops(kernel("jvp_flash_attention_", 3, 64)) == (flops, 64)
    backward = attention_flops(kernel("transpose_jvp_flash_backward__", 3, 64))
    assert backward == (flops * 5 / 2, 64)
