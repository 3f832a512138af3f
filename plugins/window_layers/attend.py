"""The attention of a window inside the persistent kernel: one chunk of the columns of one head.

The cached keys and values arrive through the stream, 128 columns in four tiles. The window's own
are computed by the head's last chunk and have a state of their own. A state is that of
`attention.stream`, and the scores over the cache are transposed, keys times queries, so that the
tensor cores take keys and values as they arrive. The ring of activations, which has none to hold
meanwhile, holds what a product needs in shared memory: slots 0 and 1 the queries, 2 and 3 the
weights or the window's keys, 4 and 5 its values.
"""

# mypy: ignore-errors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lacache_trt.plugins.window_layers.grid import ROWS, wait
from lacache_trt.plugins.window_layers.phases import HALF_HEAD, rope_head, row_factors
from lacache_trt.plugins.window_layers.stream import (
    DEPTH,
    HALF_TILE,
    HEAD,
    TILE_KEYS,
    WARPS,
    X_DEPTH,
    wait_for_tile,
)

STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, 32, 16]))
OWN = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, WARPS.value // 2], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, OWN.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, OWN.value, 2))
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [WARPS.value, 1], [1, 0]))


@gluon.jit
def share_of_keys(low, high, chunk, CHUNKS: gl.constexpr):
    """(first column, pairs of tiles of 64 columns) of a chunk of the valid columns.

    The last chunk has the window's own keys as well, which cost as much as a pair.
    """
    PAIR: gl.constexpr = 2 * TILE_KEYS
    begin = low // PAIR
    pairs = gl.maximum(gl.cdiv(high, PAIR) - begin, 0)
    first = gl.cdiv(chunk * (pairs + 1), CHUNKS)
    last = gl.minimum(gl.cdiv((chunk + 1) * (pairs + 1), CHUNKS), pairs)
    return (begin + first) * PAIR, gl.maximum(last - first, 0)


@gluon.jit
def _half(channel, place, dtype: gl.constexpr):
    """Slot `place` of the ring of activations as [32, 64]."""
    return channel.x_ring.index(place)._reinterpret(dtype, [ROWS, HEAD // 2], HALF_TILE)


@gluon.jit
def _head(channel, place, dtype: gl.constexpr):
    """Slots 2 place and 2 place + 1 as [32, 128], the left half in the first."""
    heads = channel.x_ring._reinterpret(dtype, [X_DEPTH // 2, ROWS, HEAD], HALF_TILE)
    return heads.index(place)


@gluon.jit
def _tile(channel, taken, shape: gl.constexpr, dtype: gl.constexpr):
    """Tile number `taken` once it has arrived."""
    slot = wait_for_tile(channel, taken)
    return channel.ring.index(slot)._reinterpret(dtype, shape, HALF_TILE)


@gluon.jit
def _usable(window, column):
    """Whether columns are valid and not the window's: memory of all others may hold anything."""
    valid = (column >= window.low) & (column < window.high)
    return valid & ((column < window.start) | (column >= window.start + window.kept))


@gluon.jit
def _all_usable(window, first, COUNT: gl.constexpr):
    """Whether the columns from `first` are."""
    last = first + COUNT
    valid = (first >= window.low) & (last <= window.high)
    return valid & ((first >= window.start + window.kept) | (last <= window.start))


@gluon.jit
def _values(channel, window, taken, first, dtype: gl.constexpr):
    """Tile number `taken`: values [64, d] of the columns from `first`, zero where not used.

    Their weights are zero there, and 0 times NaN is NaN.
    """
    tile = _tile(channel, taken, [TILE_KEYS, HEAD], dtype)
    if not _all_usable(window, first, TILE_KEYS):
        keep = _usable(window, first + gl.arange(0, TILE_KEYS, gl.SliceLayout(1, LINES)))
        tile.store(gl.where(keep[:, None], tile.load(LINES), 0.0))
    return tile


@gluon.jit
def _masked(window, scores, first):
    """Scores [128, 32] of the columns from `first`; -inf where not valid or in the window."""
    if not _all_usable(window, first, 2 * TILE_KEYS):
        keep = _usable(window, first + gl.arange(0, 2 * TILE_KEYS, gl.SliceLayout(1, STATE)))
        scores = gl.where(keep[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def _absorb(
    channel, window, zero, taken, first, maximum, total, acc, dtype: gl.constexpr,
    SCALE: gl.constexpr,
):  # fmt: skip
    """The state after the 128 cached columns from `first`; gives their four tiles back.

    `total` [128, 32] has a sum for every 128th key, so that only the maximum crosses warps.
    """
    PAIR: gl.constexpr = 2 * TILE_KEYS
    scores = gl.zeros([PAIR, ROWS], gl.float32, STATE)
    for half in gl.static_range(2):
        keys = _tile(channel, taken + half, [PAIR, HEAD // 2], dtype)
        queries = _half(channel, zero + half, dtype).permute((1, 0))
        scores = warpgroup_mma(keys, queries, scores, use_acc=half > 0, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    scores = _masked(window, scores * SCALE, first)
    new_maximum = gl.maximum(maximum, gl.max(scores, 0))
    anchor = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    decay = gl.exp2(maximum - anchor)
    weights = gl.exp2(scores - anchor[None, :])
    total = total * decay[None, :] + weights
    acc = acc * decay[None, :]
    _head(channel, zero + 1, dtype).permute((1, 0)).store(weights.to(dtype))
    values = _values(channel, window, taken + 2, first, dtype)
    values2 = _values(channel, window, taken + 3, first + TILE_KEYS, dtype)
    fence_async_shared()
    gl.thread_barrier()
    left = _half(channel, zero + 2, dtype).permute((1, 0))
    right = _half(channel, zero + 3, dtype).permute((1, 0))
    acc = warpgroup_mma(values.permute((1, 0)), left, acc, is_async=True)
    acc = warpgroup_mma(values2.permute((1, 0)), right, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    for i in gl.static_range(4):
        mbarrier.arrive(channel.empty.index((taken + i) % DEPTH))
    return new_maximum, total, acc


@gluon.jit
def _attend_cached(source, sizes, channel, window, work, zero, taken, place):
    """Write state number `place`, that of the unit's cached columns."""
    dtype: gl.constexpr = work.hidden.dtype.element_ty
    maximum = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, STATE))
    total = gl.zeros([2 * TILE_KEYS, ROWS], gl.float32, STATE)
    acc = gl.zeros([HEAD, ROWS], gl.float32, STATE)
    for pair in range(source.key_pairs):
        first = window.first_key + zero + pair * (2 * TILE_KEYS)
        maximum, total, acc = _absorb(
            channel, window, zero, taken + 4 * pair, first, maximum, total, acc, dtype, sizes.SCALE
        )
    row = place * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, STATE)) + zero
    inside = gl.arange(0, HEAD, gl.SliceLayout(1, STATE)) + zero
    gl.store(work.state + (row * HEAD)[None, :] + inside[:, None], acc)
    gl.store(work.maxima + row, maximum)
    gl.store(work.totals + row, gl.sum(total, 0))


@gluon.jit
def _keep(channel, window, zero, line, dtype: gl.constexpr):
    """Put the window's keys and values where the cache has them, from its row number `line` on."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LINES)) + zero
    column = gl.arange(0, HEAD, gl.SliceLayout(0, LINES)) + zero
    place = ((line + row).to(gl.int64) * HEAD)[:, None] + column[None, :]
    real = (row < window.kept)[:, None]
    gl.store(window.kept_keys + place, _head(channel, zero + 1, dtype).load(LINES), mask=real)
    gl.store(window.kept_values + place, _head(channel, zero + 2, dtype).load(LINES), mask=real)


@gluon.jit
def _attend_own(sizes, channel, window, work, zero, place):
    """Write state number `place`, that of the window's own keys."""
    dtype: gl.constexpr = work.hidden.dtype.element_ty
    queries = _head(channel, zero + 0, dtype).load(LEFT)
    keys = _head(channel, zero + 1, dtype).permute((1, 0)).load(RIGHT)
    # Rows behind the window's may hold anything, and 0 times NaN is NaN.
    own = gl.arange(0, ROWS, gl.SliceLayout(1, RIGHT)) + zero
    rows = _head(channel, zero + 2, dtype).load(RIGHT)
    values = gl.where((own < window.kept)[:, None], rows, 0.0)
    index = gl.arange(0, ROWS, gl.SliceLayout(0, OWN)) + zero
    column = window.start + index
    keep = (index < window.kept) & (column >= window.low) & (column < window.high)
    scores = mma_v2(queries, keys, gl.zeros([ROWS, ROWS], gl.float32, OWN))
    scores = gl.where(keep[None, :], scores * sizes.SCALE, float("-inf"))
    maximum = gl.max(scores, 1)
    anchor = gl.where(maximum == float("-inf"), 0.0, maximum)
    weights = gl.exp2(scores - anchor[:, None])
    operand = gl.convert_layout(weights.to(dtype), LEFT)
    acc = mma_v2(operand, values, gl.zeros([ROWS, HEAD], gl.float32, OWN))
    row = place * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, OWN)) + zero
    inside = gl.arange(0, HEAD, gl.SliceLayout(0, OWN)) + zero
    gl.store(work.state + (row * HEAD)[:, None] + inside[None, :], acc)
    gl.store(work.maxima + row, maximum)
    gl.store(work.totals + row, gl.sum(weights, 1))


@gluon.jit
def attend(source, sizes, channel, window, work, zero, taken, layer, bias, product, arrivals):
    """This program's states of the attention, once the grid has arrived so often.

    A program has a chunk of a query head's cached columns, the head's last one the window's own
    keys and values as well: CHUNKS + 1 states. Columns of the cache that the window stands for are
    left out; the first query head of a key head writes them meanwhile. The caller counts the tiles.
    """
    HEADS: gl.constexpr = sizes.Q // HEAD
    KV_HEADS: gl.constexpr = sizes.KV // HEAD
    GROUP: gl.constexpr = HEADS // KV_HEADS
    CHUNKS: gl.constexpr = sizes.CHUNKS
    HALF: gl.constexpr = HEAD // 2
    dtype: gl.constexpr = work.hidden.dtype.element_ty
    head = (source.program + zero) // CHUNKS
    chunk = (source.program + zero) % CHUNKS
    row = gl.arange(0, ROWS, gl.SliceLayout(1, HALF_HEAD)) + zero
    column = gl.arange(0, HALF, gl.SliceLayout(0, HALF_HEAD)) + zero
    factor = row_factors(sizes, work, row, HALF_HEAD)
    inside = (gl.minimum(row, window.rows - 1) * HALF)[:, None] + column[None, :]
    cosine = gl.load(window.cos + inside)
    sine = gl.load(window.sin + inside)
    wait(work.counter, arrivals)
    if head < HEADS:
        left, right = rope_head(
            source, sizes, work, zero, head, factor, bias, cosine, sine, product, True
        )
        _half(channel, zero + 0, dtype).store(left)
        _half(channel, zero + 1, dtype).store(right)
        if chunk == CHUNKS - 1:
            kv_head = head // GROUP
            left, right = rope_head(
                source, sizes, work, zero, HEADS + kv_head, factor, bias, cosine, sine, product,
                True,
            )  # fmt: skip
            left2, right2 = rope_head(
                source, sizes, work, zero, HEADS + KV_HEADS + kv_head, factor, bias, cosine, sine,
                product, False,
            )  # fmt: skip
            _half(channel, zero + 2, dtype).store(left)
            _half(channel, zero + 3, dtype).store(right)
            _half(channel, zero + 4, dtype).store(left2)
            _half(channel, zero + 5, dtype).store(right2)
            gl.thread_barrier()
            if head % GROUP == 0:
                line = layer * source.layer_rows + kv_head * (source.layer_rows // KV_HEADS)
                _keep(channel, window, zero, line + window.start, dtype)
            _attend_own(sizes, channel, window, work, zero, head * (CHUNKS + 1) + CHUNKS)
        fence_async_shared()
        gl.thread_barrier()
        place = head * (CHUNKS + 1) + chunk
        _attend_cached(source, sizes, channel, window, work, zero, taken, place)
    # Before the copies of activations that follow.
    fence_async_shared()
