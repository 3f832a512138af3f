"""The noise of `noise` on the device: the same integer bits, in 32-bit arithmetic.

A product of two residues modulo p = 2^31 - 1 is high * 2^32 + low, and 2^31 is 1 modulo p, so it
folds to (low mod 2^31) + (high * 2 + low // 2^31). Only the two logarithms round.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lacache_trt.plugins.sample_block import noise

_P = tl.constexpr(noise.PRIME)
_K0, _K1, _K2, _K3, _K4 = (tl.constexpr(key) for key in noise.KEYS)


@triton.jit
def _fold(value):
    """A uint32 below 2^32 - 1 modulo 2^31 - 1."""
    value = (value & _P) + (value >> 31)
    return tl.where(value >= _P, value - _P, value)


@triton.jit
def _times(left, right):
    """Product of two residues modulo 2^31 - 1, in 32-bit arithmetic."""
    low = left * right
    high = tl.umulhi(left, right)
    return _fold((low & _P) + ((high << 1) | (low >> 31)))


@triton.jit
def _mix(state, word, KEY: tl.constexpr):
    """(state + word + KEY)^5 modulo 2^31 - 1."""
    total = _fold(_fold(state + word) + KEY)
    square = _times(total, total)
    return _times(_times(square, square), total)


@triton.jit
def _residue(word):
    """A signed 32-bit word modulo 2^31 - 1, non-negative."""
    wide = word.to(tl.int64)
    wide = tl.where(wide < 0, wide + _P, wide)
    wide = tl.where(wide < 0, wide + _P, wide)
    return tl.where(wide >= _P, wide - _P, wide).to(tl.uint32)


@triton.jit
def gumbel_noise(seed, step, position, ids):
    """Gumbel noise of each id in float32."""
    state = _mix(_residue(seed), tl.zeros_like(_residue(seed)), _K0)
    state = _mix(state, _residue(step), _K1)
    state = _mix(state, _residue(position), _K2)
    state = _mix(state, ids.to(tl.uint32), _K3)
    state = _mix(state, tl.zeros_like(state), _K4)
    uniform = ((state >> 8).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))
