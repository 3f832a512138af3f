"""What a layer does between its products: sums of partial results, norms, RoPE, SwiGLU.

Units of a phase are dealt to the programs in turn. Values round where the separate kernels round,
after a product, the residual, silu and its product, but for the norm, whose gain comes before the
next product and whose divisor behind it: one rounding less. `zero` is the kernel's `unknown_zero`.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 - kernels know no unpacking
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lacache_trt.plugins.fp8 import E4M3_MAX, ZERO_AMAX
from lacache_trt.plugins.window_layers.grid import ROWS, owner
from lacache_trt.plugins.window_layers.stream import COLUMNS, HEAD, WARPS

TILE = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [WARPS.value, 1], [1, 0]))
HALF_HEAD = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [WARPS.value, 1], [1, 0]))
LARGEST = gl.constexpr(E4M3_MAX)
NEAR_ZERO = gl.constexpr(ZERO_AMAX)


@gluon.jit
def sum_of_tile(source, partial, tile, row, column, product):
    """float32: a tile's parts at rows [R, 1] and columns [1, C], added in their order."""
    first = owner(product.TOTAL, tile * product.STEPS, source.PROGRAMS)
    last = owner(product.TOTAL, tile * product.STEPS + product.STEPS - 1, source.PROGRAMS)
    place = partial + tile * COLUMNS + row * product.N + column
    found = gl.load(place)
    for i in gl.static_range(1, product.MOST):
        wanted = row * 0 + i <= last - first
        found += gl.load(place + i * (ROWS * product.N), mask=wanted, other=0.0)
    return found


@gluon.jit
def quantise(values):
    """(E4M3 [G, 128], float32 scales [G]) of float32 values; the rule of `fp8_kernel`."""
    bits = values.to(gl.int32, bitcast=True)
    amax = gl.max(bits & 0x7FFFFFFF, 1).to(gl.float32, bitcast=True)
    scale = gl.where(amax < NEAR_ZERO, 1.0, gl.div_rn(amax, gl.full_like(amax, LARGEST)))
    inverse = gl.div_rn(gl.full_like(amax, 1.0), scale)
    divisor = gl.where(scale < float("inf"), scale, 0.0)
    all_inverse = inverse[:, None] + gl.full_like(values, 0.0)
    all_divisors = divisor[:, None] + gl.full_like(values, 0.0)
    nearly = values * all_inverse
    quotient = gl.fma(gl.fma(-nearly, all_divisors, values), all_inverse, nearly)
    signed = quotient.to(gl.int32, bitcast=True) | (bits & -0x80000000)
    return signed.to(gl.float32, bitcast=True).to(gl.float8e4nv), scale


@gluon.jit
def residual(
    source, sizes, work, zero, rows, gain, out, merge, product, NORM: gl.constexpr,
    FP8: gl.constexpr,
):  # fmt: skip
    """hidden += the product before it (with `merge`); with NORM, out = hidden * gain.

    A unit is eight rows of 128 columns, so that the whole grid takes part. What a norm divides by
    is known when all units are done, and is one factor per row: the phase behind the next product
    multiplies with it (`row_factors`), from squares[32, D / 128], the sums of this one's squares.
    """
    D: gl.constexpr = sizes.D
    PIECES: gl.constexpr = ROWS // 8
    dtype: gl.constexpr = work.hidden.dtype.element_ty
    lane = gl.arange(0, 8, gl.SliceLayout(1, TILE)) + zero
    inside = gl.arange(0, COLUMNS, gl.SliceLayout(0, TILE)) + zero
    for unit in range(source.program + zero, D // COLUMNS * PIECES, source.PROGRAMS):
        tile = unit // PIECES
        row = unit % PIECES * 8 + lane
        keep = (row < rows)[:, None]
        place = (row * D)[:, None] + (tile * COLUMNS + inside)[None, :]
        wide = gl.load(work.hidden + place, mask=keep, other=0.0).to(gl.float32)
        # Before the stores, which no load overtakes.
        weight = gl.load(gain + tile * COLUMNS + inside).to(gl.float32)
        if merge:
            wide += sum_of_tile(source, work.partial, tile, row[:, None], inside[None, :], product)
            rounded = wide.to(dtype)
            gl.store(work.hidden + place, rounded, mask=keep)
            wide = rounded.to(gl.float32)
        if NORM:
            gl.store(work.squares + row * (D // COLUMNS) + tile, gl.sum(wide * wide, 1))
            scaled = (wide * weight[None, :]).to(dtype)
            if FP8:
                values, scale = quantise(scaled.to(gl.float32))
                gl.store(out + place, values)
                gl.store(work.ffn_scale + tile * ROWS + row, scale)
            else:
                gl.store(out + place, scaled)


@gluon.jit
def row_factors(sizes, work, row, LAYOUT: gl.constexpr):
    """float32 [R, 1]: 1 / the root mean square of rows [R], as the norm before a product has it.

    LAYOUT is two-dimensional, with the rows along its first dimension.
    """
    TILES: gl.constexpr = sizes.D // COLUMNS
    tile = gl.arange(0, sizes.LANES, gl.SliceLayout(0, LAYOUT))
    place = (row * TILES)[:, None] + tile[None, :]
    known = (row * 0)[:, None] + tile[None, :] < TILES
    found = gl.load(work.squares + place, mask=known, other=0.0)
    return gl.rsqrt(gl.sum(found, 1) / sizes.D + sizes.EPS)[:, None]


@gluon.jit
def _silu_times(gate, up, dtype: gl.constexpr):
    """silu(gate) * up of float32 values that have the divisor of the norm."""
    gate = gate.to(dtype).to(gl.float32)
    up = up.to(dtype).to(gl.float32)
    silu = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
    return (silu * up).to(dtype)


@gluon.jit
def swiglu(source, sizes, work, zero, product):
    """x_down = silu(gate) * up, quantised with FP8. A unit is eight rows of 128 columns.

    Three at a time, all of whose loads come first; units beyond the last are the last again.
    """
    F: gl.constexpr = sizes.F
    PIECES: gl.constexpr = ROWS // 8
    UNITS: gl.constexpr = F // COLUMNS * PIECES
    dtype: gl.constexpr = work.hidden.dtype.element_ty
    lane = gl.arange(0, 8, gl.SliceLayout(1, TILE)) + zero
    column = (gl.arange(0, COLUMNS, gl.SliceLayout(0, TILE)) + zero)[None, :]
    for first in range(source.program + zero, UNITS, 3 * source.PROGRAMS):
        gates = ()
        ups = ()
        for i in gl.static_range(3):
            unit = gl.minimum(first + i * source.PROGRAMS, UNITS - 1)
            tile = unit // PIECES
            row = (unit % PIECES * 8 + lane)[:, None]
            gates = gates + (sum_of_tile(source, work.partial, tile, row, column, product),)
            tile += F // COLUMNS
            ups = ups + (sum_of_tile(source, work.partial, tile, row, column, product),)
        for i in gl.static_range(3):
            unit = gl.minimum(first + i * source.PROGRAMS, UNITS - 1)
            tile = unit // PIECES
            row = unit % PIECES * 8 + lane
            factor = row_factors(sizes, work, row, TILE)
            values = _silu_times(gates[i] * factor, ups[i] * factor, dtype)
            target = work.x_down + (row * F)[:, None] + tile * COLUMNS + column
            if sizes.FP8:
                rounded, scale = quantise(values.to(gl.float32))
                gl.store(target, rounded)
                gl.store(work.down_scale + tile * ROWS + row, scale)
            else:
                gl.store(target, values)


@gluon.jit
def rope_head(
    source, sizes, work, zero, head, factor, bias, cosine, sine, product, ROTATE: gl.constexpr
):  # fmt: skip
    """Both halves [32, 64] of a head of the fused projection: q, k or v, the first two after RoPE.

    factor [32, 1]: what the norm divides by; cosine and sine [32, 64].
    """
    HALF: gl.constexpr = HEAD // 2
    dtype: gl.constexpr = work.hidden.dtype.element_ty
    row = (gl.arange(0, ROWS, gl.SliceLayout(1, HALF_HEAD)) + zero)[:, None]
    column = gl.arange(0, HALF, gl.SliceLayout(0, HALF_HEAD)) + zero
    left = sum_of_tile(source, work.partial, head, row, column[None, :], product)
    right = sum_of_tile(source, work.partial, head, row, (HALF + column)[None, :], product)
    left = (left * factor).to(dtype)
    right = (right * factor).to(dtype)
    if sizes.BIAS:
        offset = bias + head * HEAD + column
        left = (left.to(gl.float32) + gl.load(offset).to(gl.float32)[None, :]).to(dtype)
        right = (right.to(gl.float32) + gl.load(offset + HALF).to(gl.float32)[None, :]).to(dtype)
    if ROTATE:
        wide = left.to(gl.float32)
        wide_right = right.to(gl.float32)
        left = (wide * cosine - wide_right * sine).to(dtype)
        right = (wide_right * cosine + wide * sine).to(dtype)
    return left, right


@gluon.jit
def merge_heads(source, sizes, work, zero, rows):
    """x_out = the states of every head, combined. A unit is eight rows of a head."""
    HEADS: gl.constexpr = sizes.Q // HEAD
    STATES: gl.constexpr = sizes.CHUNKS + 1
    dtype: gl.constexpr = work.hidden.dtype.element_ty
    column = gl.arange(0, HEAD, gl.SliceLayout(0, TILE)) + zero
    lane = gl.arange(0, 8, gl.SliceLayout(1, TILE)) + zero
    for unit in range(source.program + zero, HEADS * (ROWS // 8), source.PROGRAMS):
        head = unit // (ROWS // 8)
        row = unit % (ROWS // 8) * 8 + lane
        first = head * STATES * ROWS + row
        largest = gl.load(work.maxima + first)
        for i in gl.static_range(1, STATES):
            largest = gl.maximum(largest, gl.load(work.maxima + first + i * ROWS))
        anchor = gl.where(largest == float("-inf"), 0.0, largest)
        total = gl.zeros([8], gl.float32, gl.SliceLayout(1, TILE))
        acc = gl.zeros([8, HEAD], gl.float32, TILE)
        for i in gl.static_range(STATES):
            factor = gl.exp2(gl.load(work.maxima + first + i * ROWS) - anchor)
            total += gl.load(work.totals + first + i * ROWS) * factor
            place = work.state + (first + i * ROWS)[:, None] * HEAD + column[None, :]
            acc += gl.load(place) * factor[:, None]
        value = acc * gl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
        target = work.x_out + (row * sizes.Q)[:, None] + (head * HEAD + column)[None, :]
        gl.store(target, value.to(dtype), mask=(row < rows)[:, None])
