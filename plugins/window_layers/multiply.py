"""The products on the stream: tiles of a weight times all rows of the window, transposed.

acc[n, row] += weight[k, n] x[row, k]. Where a program's run of steps ends inside a tile of columns,
the sums of several programs make the tile: partial[i, row, n] of the i-th of them.
"""

# mypy: ignore-errors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lacache_trt.plugins.window_layers.grid import ROWS, first_step, grid_barrier, owner
from lacache_trt.plugins.window_layers.stream import (
    BYTE_TILE,
    COLUMNS,
    DEPTH,
    FACTORS,
    HALF_TILE,
    LINE,
    WARPS,
)

HALF_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, 32, 16]))
BYTE_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, 32, 32]))
SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [WARPS.value, 1], [1, 0]))
LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _operands(channel, taken, dtype: gl.constexpr, FP8: gl.constexpr):
    """Tile number `taken` and its activations once they have arrived, as operands of a product."""
    slot = taken % DEPTH
    mbarrier.wait(channel.full.index(slot), taken // DEPTH % 2)
    mbarrier.wait(channel.x_full.index(slot), taken // DEPTH % 2)
    if FP8:
        w_tile = channel.ring.index(slot)._reinterpret(gl.float8e4nv, [COLUMNS, 128], BYTE_TILE)
        x_tile = channel.x_ring.index(slot)._reinterpret(gl.float8e4nv, [ROWS, 128], BYTE_TILE)
        return w_tile, x_tile.permute((1, 0))
    else:
        w_tile = channel.ring.index(slot)._reinterpret(dtype, [64, COLUMNS], HALF_TILE)
        x_tile = channel.x_ring.index(slot)._reinterpret(dtype, [ROWS, 64], HALF_TILE)
        return w_tile.permute((1, 0)), x_tile.permute((1, 0))


@gluon.jit
def _factor(channel, taken, index):
    """float32 [32]: the scales of the rows of tile number `taken`, times the weight's."""
    rows = channel.scale_ring.index(taken % DEPTH)._reinterpret(gl.float32, [ROWS], LINE)
    block = channel.factors.index(index)
    return rows.load(gl.SliceLayout(0, BYTE_PRODUCT)) * block.load(gl.SliceLayout(0, BYTE_PRODUCT))


@gluon.jit
def _start(channel, taken, acc, dtype: gl.constexpr, FP8: gl.constexpr):
    """Start the product of tile number `taken` with its activations, added to acc but for FP8."""
    w, rows = _operands(channel, taken, dtype, FP8)
    return warpgroup_mma(w, rows, acc, use_acc=not FP8, is_async=True)


@gluon.jit
def _four(channel, taken, index, acc, dtype: gl.constexpr, FP8: gl.constexpr):
    """acc plus the products of the next four tiles, all under way at once."""
    if FP8:
        zero = gl.zeros([COLUMNS, ROWS], gl.float32, BYTE_PRODUCT)
        a = _start(channel, taken, zero, dtype, FP8)
        b = _start(channel, taken + 1, zero, dtype, FP8)
        c = _start(channel, taken + 2, zero, dtype, FP8)
        d = _start(channel, taken + 3, zero, dtype, FP8)
        scale_a = _factor(channel, taken, index)
        scale_b = _factor(channel, taken + 1, index + 1)
        scale_c = _factor(channel, taken + 2, index + 2)
        scale_d = _factor(channel, taken + 3, index + 3)
        a, b, c, d = warpgroup_mma_wait(0, deps=[a, b, c, d])
        return acc + (
            (a * scale_a[None, :] + b * scale_b[None, :])
            + (c * scale_c[None, :] + d * scale_d[None, :])
        )
    else:
        a = _start(channel, taken, acc, dtype, FP8)
        b = _start(channel, taken + 1, a, dtype, FP8)
        c = _start(channel, taken + 2, b, dtype, FP8)
        d = _start(channel, taken + 3, c, dtype, FP8)
        return warpgroup_mma_wait(0, deps=[d])


@gluon.jit
def _one(channel, taken, index, acc, dtype: gl.constexpr, FP8: gl.constexpr):
    """acc plus the product of the next tile."""
    if FP8:
        zero = gl.zeros([COLUMNS, ROWS], gl.float32, BYTE_PRODUCT)
        a = _start(channel, taken, zero, dtype, FP8)
        scale = _factor(channel, taken, index)
        return acc + warpgroup_mma_wait(0, deps=[a]) * scale[None, :]
    else:
        return warpgroup_mma_wait(0, deps=[_start(channel, taken, acc, dtype, FP8)])


@gluon.jit
def _accumulate(channel, taken, count, index, dtype: gl.constexpr, FP8: gl.constexpr):
    """float32 [128, 32]: the sum over the next `count` tiles of the stream.

    `index` is the place of the first one's scale of the weight in `factors`.
    """
    acc = gl.zeros([COLUMNS, ROWS], gl.float32, BYTE_PRODUCT if FP8 else HALF_PRODUCT)
    done = taken * 0
    while done + 4 <= count:
        acc = _four(channel, taken + done, index + done, acc, dtype, FP8)
        for i in gl.static_range(4):
            mbarrier.arrive(channel.empty.index((taken + done + i) % DEPTH))
        done += 4
    while done < count:
        acc = _one(channel, taken + done, index + done, acc, dtype, FP8)
        mbarrier.arrive(channel.empty.index((taken + done) % DEPTH))
        done += 1
    return acc


@gluon.jit
def _store_part(acc, part, column_tile, partial, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Write part number `part` of a tile of columns."""
    column = gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    target = partial + part * (ROWS * N) + column_tile * COLUMNS
    gl.store(target + (row * N)[None, :] + column[:, None], acc)


@gluon.jit
def multiply(
    source, channel, taken, w_scale, partial, counter, arrivals, product, dtype: gl.constexpr
):  # fmt: skip
    """This program's parts of partial[i, row, n] = sum_k weight[k, n] x[row, k].

    Waits for the grid first: x is complete when all have arrived. FP8: w_scale [N / 128, K / 128].
    Returns how many tiles have been taken.
    """
    FP8: gl.constexpr = product.FP8
    LAYOUT: gl.constexpr = BYTE_PRODUCT if FP8 else HALF_PRODUCT
    begin = first_step(product.TOTAL, source.program, source.programs)
    end = first_step(product.TOTAL, source.program + 1, source.programs)
    if FP8:
        some = gl.minimum(gl.arange(0, FACTORS, gl.SliceLayout(1, SCALES)) + begin, end - 1)
        scales = gl.load(w_scale + some)
        grid_barrier(counter, arrivals)
        mbarrier.arrive(channel.go.index(0))
        lane = gl.arange(0, ROWS, gl.SliceLayout(0, SCALES))
        factors = channel.factors._reinterpret(gl.float32, [FACTORS, ROWS], LINES)
        factors.store(scales[:, None] + (lane * 0).to(gl.float32)[None, :])
    else:
        grid_barrier(counter, arrivals)
        mbarrier.arrive(channel.go.index(0))
    position = begin
    while position < end:
        tile = position // product.STEPS
        count = gl.minimum((tile + 1) * product.STEPS, end) - position
        acc = _accumulate(channel, taken, count, position - begin, dtype, FP8)
        part = source.program - owner(product.TOTAL, tile * product.STEPS, source.programs)
        _store_part(acc, part, tile, partial, product.N, LAYOUT)
        position += count
        taken += count
    return taken
