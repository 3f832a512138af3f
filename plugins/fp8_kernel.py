"""What the quantising kernels share: groups of 128 to E4M3, with the bits of `fp8`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lacache_trt.plugins.fp8 import E4M3_MAX, GROUP, ZERO_AMAX

__all__ = ["E4M3_MAX", "GROUP", "ZERO_AMAX", "quantise_tile", "rule_constants", "scale_strides"]

SCALE_STRIDES = {"scale_row": "i32", "scale_group": "i32"}
_FIRST_DIRECT_SM = 90


@triton.jit
def odd_half(values):
    """float32 values cut to the 10 mantissa bits of float16; the last one is set if any was lost.

    Rounding to odd (Boldo and Melquiond 2008): with two bits more than the target, rounding the
    result once more gives what rounding the values once gives. E4M3 has 3 bits, 7 less. What
    float16 cannot hold any more, below 2^-14, rounds to zero in E4M3 either way; a NaN stays one.
    """
    bits = values.to(tl.int32, bitcast=True)
    odd = (bits | ((bits & 0x1FFF) + 0x1FFF)) & ~0x1FFF
    return odd.to(tl.float32, bitcast=True)


@triton.jit
def quantise_tile(values, MAX: tl.constexpr, ZERO: tl.constexpr, VIA_HALF: tl.constexpr):
    """(E4M3 [G, 128], float32 scales [G]) of float32 values [G, 128].

    The largest magnitude is found on the bits, which are ordered like the magnitudes with NaN above
    infinity, so that a NaN reaches the scale. One true division per group; the quotients are the
    product with its reciprocal, corrected with the exact remainder (Markstein 1990): the division
    rounded to nearest, in four instructions and without a branch. An infinite scale has no
    remainder to correct with; the sign is copied because the correction loses that of a zero.
    VIA_HALF: the compiler converts to E4M3 through float16, which must not round.
    """
    bits = values.to(tl.int32, bitcast=True)
    amax = tl.max(bits & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scale = tl.where(amax < ZERO, 1.0, tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32)))
    inverse = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)[:, None]
    divisor = tl.where(scale < float("inf"), scale, 0.0)[:, None]
    nearly = values * inverse
    remainder = tl.fma(-nearly, tl.broadcast_to(divisor, values.shape), values)
    quotient = tl.fma(remainder, tl.broadcast_to(inverse, values.shape), nearly)
    signed = quotient.to(tl.int32, bitcast=True) | (bits & -0x80000000)
    rounded = signed.to(tl.float32, bitcast=True)
    if VIA_HALF:
        rounded = odd_half(rounded)
    return rounded.to(tl.float8e4nv), scale


def rule_constants(sm: int) -> dict[str, object]:
    """The constants of `quantise_tile` on an SM.

    Triton converts float32 to E4M3 in one instruction from SM 90 on, and through float16 before.
    """
    return {"MAX": E4M3_MAX, "ZERO": ZERO_AMAX, "VIA_HALF": sm < _FIRST_DIRECT_SM}


def scale_strides(scale: Tensor) -> tuple[int, int]:
    """Elements from row to row and from group to group of scales [..., G], seen as [M, G].

    Graphs keep them row-major; the CUDA engine has M innermost, as cuBLASLt wants them.
    """
    row, group = scale.view(-1, scale.shape[-1]).stride()
    return row, group
