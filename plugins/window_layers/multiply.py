"""The products on the stream: tiles of a weight times all rows of the window, transposed.

acc[n, row] += weight[k, n] x[row, k]. Where a program's run of steps ends inside a tile of columns,
the sums of several programs make the tile: partial[i, row, n] of the i-th of them.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 - kernels know no unpacking
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lacache_trt.plugins.window_layers.grid import ROWS, first_step, owner
from lacache_trt.plugins.window_layers.stream import (
    BYTE_TILE,
    COLUMNS,
    DEPTH,
    FACTORS,
    FIRST,
    HALF_TILE,
    LINE,
    WARPS,
    X_DEPTH,
    wait_for_tile,
)

HALF_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, 32, 16]))
BYTE_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, 32, 32]))
SCALES = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS.value], [0]))


@gluon.jit
def _weight(channel, tile, dtype: gl.constexpr, FP8: gl.constexpr):
    """A tile [128, k] once it has arrived, as left operand of a product."""
    slot = wait_for_tile(channel, tile)
    if FP8:
        return channel.ring.index(slot)._reinterpret(gl.float8e4nv, [COLUMNS, 128], BYTE_TILE)
    else:
        found = channel.ring.index(slot)._reinterpret(dtype, [64, COLUMNS], HALF_TILE)
        return found.permute((1, 0))


@gluon.jit
def _rows(channel, step, dtype: gl.constexpr, FP8: gl.constexpr):
    """The activations [k, 32] of a step once they have arrived, as right operand of a product."""
    slot = step % X_DEPTH
    mbarrier.wait(channel.x_full.index(slot), step // X_DEPTH % 2)
    if FP8:
        found = channel.x_ring.index(slot)._reinterpret(gl.float8e4nv, [ROWS, 128], BYTE_TILE)
    else:
        found = channel.x_ring.index(slot)._reinterpret(dtype, [ROWS, 64], HALF_TILE)
    return found.permute((1, 0))


@gluon.jit
def _factor(channel, step, index):
    """float32 [32]: the scales of the rows of a step, times the weight's."""
    rows = channel.scale_ring.index(step % X_DEPTH)._reinterpret(gl.float32, [ROWS], LINE)
    block = channel.factors.index(index)
    return rows.load(gl.SliceLayout(0, BYTE_PRODUCT)) * block.load(gl.SliceLayout(0, BYTE_PRODUCT))


@gluon.jit
def _start(channel, tile, step, acc, dtype: gl.constexpr, FP8: gl.constexpr):
    """Start the product of a tile with its activations, added to acc but for FP8."""
    w = _weight(channel, tile, dtype, FP8)
    rows = _rows(channel, step, dtype, FP8)
    return warpgroup_mma(w, rows, acc, use_acc=not FP8, is_async=True)


@gluon.jit
def _four(channel, tile, step, index, acc, dtype: gl.constexpr, FP8: gl.constexpr):
    """acc plus the products of the next four tiles, all under way at once."""
    if FP8:
        zero = gl.zeros([COLUMNS, ROWS], gl.float32, BYTE_PRODUCT)
        a = _start(channel, tile, step, zero, dtype, FP8)
        b = _start(channel, tile + 1, step + 1, zero, dtype, FP8)
        c = _start(channel, tile + 2, step + 2, zero, dtype, FP8)
        scale_a = _factor(channel, step, index)
        scale_b = _factor(channel, step + 1, index + 1)
        a, b = warpgroup_mma_wait(1, deps=[a, b])
        acc += a * scale_a[None, :] + b * scale_b[None, :]
        d = _start(channel, tile + 3, step + 3, zero, dtype, FP8)
        scale_c = _factor(channel, step + 2, index + 2)
        scale_d = _factor(channel, step + 3, index + 3)
        c, d = warpgroup_mma_wait(0, deps=[c, d])
        return acc + (c * scale_c[None, :] + d * scale_d[None, :])
    else:
        a = _start(channel, tile, step, acc, dtype, FP8)
        b = _start(channel, tile + 1, step + 1, a, dtype, FP8)
        c = _start(channel, tile + 2, step + 2, b, dtype, FP8)
        d = _start(channel, tile + 3, step + 3, c, dtype, FP8)
        return warpgroup_mma_wait(0, deps=[d])


@gluon.jit
def _one(channel, tile, step, index, acc, dtype: gl.constexpr, FP8: gl.constexpr):
    """acc plus the product of the next tile."""
    if FP8:
        zero = gl.zeros([COLUMNS, ROWS], gl.float32, BYTE_PRODUCT)
        a = _start(channel, tile, step, zero, dtype, FP8)
        scale = _factor(channel, step, index)
        return acc + warpgroup_mma_wait(0, deps=[a]) * scale[None, :]
    else:
        return warpgroup_mma_wait(0, deps=[_start(channel, tile, step, acc, dtype, FP8)])


@gluon.jit
def _give_back(channel, tile, step):
    """The slots of a tile and of its activations may be filled again."""
    mbarrier.arrive(channel.empty.index(tile % DEPTH))
    mbarrier.arrive(channel.x_empty.index(step % X_DEPTH))


@gluon.jit
def take_first(channel, taken, dtype: gl.constexpr, FP8: gl.constexpr):
    """The first tiles of a product, into registers: their slots can be filled again.

    Between two products this is room for that many more tiles.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(
        0, BYTE_PRODUCT if FP8 else HALF_PRODUCT, 4 if FP8 else 2
    )
    found = ()
    for i in gl.static_range(FIRST):
        found = found + (_weight(channel, taken + i, dtype, FP8).load(OPERAND),)
    gl.thread_barrier()
    for i in gl.static_range(FIRST):
        mbarrier.arrive(channel.empty.index((taken + i) % DEPTH))
    return found


@gluon.jit
def _multiply_first(channel, step, first, inside, dtype: gl.constexpr, FP8: gl.constexpr):
    """The products of the first tiles: (sum over `inside` of them, sum over the others)."""
    LAYOUT: gl.constexpr = BYTE_PRODUCT if FP8 else HALF_PRODUCT
    zero = gl.zeros([COLUMNS, ROWS], gl.float32, LAYOUT)
    found = ()
    for i in gl.static_range(FIRST):
        rows = _rows(channel, step + i, dtype, FP8)
        found = found + (warpgroup_mma(first[i], rows, zero, use_acc=False, is_async=True),)
    found = warpgroup_mma_wait(0, deps=found)
    here = zero
    beyond = zero
    for i in gl.static_range(FIRST):
        part = found[i]
        if FP8:
            part = part * _factor(channel, step + i, i)[None, :]
        here = here + gl.where(inside > i, part, zero)
        beyond = beyond + gl.where(inside > i, zero, part)
    for i in gl.static_range(FIRST):
        mbarrier.arrive(channel.x_empty.index((step + i) % X_DEPTH))
    return here, beyond


@gluon.jit
def _accumulate(channel, tile, step, count, index, acc, dtype: gl.constexpr, FP8: gl.constexpr):
    """acc plus the sum over `count` tiles of the stream from number `tile`.

    `index` is the place of the first one's scale of the weight in `factors`.
    """
    done = tile * 0
    while done + 4 <= count:
        acc = _four(channel, tile + done, step + done, index + done, acc, dtype, FP8)
        for i in gl.static_range(4):
            _give_back(channel, tile + done + i, step + done + i)
        done += 4
    while done < count:
        acc = _one(channel, tile + done, step + done, index + done, acc, dtype, FP8)
        _give_back(channel, tile + done, step + done)
        done += 1
    return acc


@gluon.jit
def _store_part(acc, source, work, zero, tile, N, STEPS, TOTAL, LAYOUT: gl.constexpr):
    """Write this program's part of a tile of columns."""
    column = gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT)) + zero
    row = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT)) + zero
    part = source.program - owner(TOTAL, tile * STEPS, source.PROGRAMS)
    target = work.partial + (part * ROWS * N + tile * COLUMNS)
    gl.store(target + (row * N)[None, :] + column[:, None], acc)


@gluon.jit
def multiply(
    source, channel, work, zero, taken, keys_taken, first, w_scale, products, second,
    dtype: gl.constexpr,
):  # fmt: skip
    """This program's parts of partial[i, row, n] = sum_k weight[k, n] x[row, k].

    The product is the first of the two or, if `second` is not 0, the other; `first` are its first
    tiles. `taken` tiles of the stream were taken before, `keys_taken` of them keys and values;
    returns how many have been then. FP8: w_scale [N / 128, K / 128].
    """
    FP8: gl.constexpr = products[0].FP8
    LAYOUT: gl.constexpr = BYTE_PRODUCT if FP8 else HALF_PRODUCT
    N = gl.where(second == 0, products[0].N, products[1].N)
    STEPS = gl.where(second == 0, products[0].STEPS, products[1].STEPS)
    TOTAL = gl.where(second == 0, products[0].TOTAL, products[1].TOTAL)
    begin = first_step(TOTAL, source.program, source.PROGRAMS)
    end = first_step(TOTAL, source.program + 1, source.PROGRAMS)
    if FP8:
        some = gl.minimum(gl.arange(0, FACTORS, SCALES) + begin, end - 1)
        channel.factors._reinterpret(gl.float32, [FACTORS], LINE).store(gl.load(w_scale + some))
        gl.thread_barrier()
    inside = STEPS - begin % STEPS
    acc, beyond = _multiply_first(channel, taken - keys_taken, first, inside, dtype, FP8)
    column = begin // STEPS
    position = begin + FIRST
    if inside < FIRST:
        _store_part(acc, source, work, zero, column, N, STEPS, TOTAL, LAYOUT)
        acc = beyond
        column += 1
    while column * STEPS < end:
        stop = gl.minimum((column + 1) * STEPS, end)
        count = stop - position
        tile = taken + position - begin
        acc = _accumulate(
            channel, tile, tile - keys_taken, count, position - begin, acc, dtype, FP8
        )  # fmt: skip
        _store_part(acc, source, work, zero, column, N, STEPS, TOTAL, LAYOUT)
        acc = gl.zeros([COLUMNS, ROWS], gl.float32, LAYOUT)
        position = stop
        column += 1
    return taken + end - begin
