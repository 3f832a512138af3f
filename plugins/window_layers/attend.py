"""The attention of a window inside the persistent kernel: one chunk of the columns of one head.

The cached keys and values arrive through the stream, 64 columns a tile. The window's own are
computed by the head's last chunk. The state is that of `attention.stream`.
"""

# mypy: ignore-errors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from lacache_trt.plugins.window_layers.grid import ROWS
from lacache_trt.plugins.window_layers.phases import HALF_HEAD, rope_head, row_factors
from lacache_trt.plugins.window_layers.stream import DEPTH, HALF_TILE, HEAD, TILE_KEYS, WARPS

SCORES = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, WARPS.value // 2], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SCORES.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, SCORES.value, 2))
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [WARPS.value, 1], [1, 0]))


@gluon.jit
def _state_after(maximum, found):
    """(new maximum, what to subtract from scores, what the state shrinks by)."""
    new_maximum = gl.maximum(maximum, found)
    anchor = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    return new_maximum, anchor, gl.exp2(maximum - anchor)


@gluon.jit
def own_keys(q, key_rows, value_rows, first, kept, low, high, SCALE: gl.constexpr):
    """The state over the window's own keys [32, d]: columns `first` on, `kept` of them real."""
    keys = gl.convert_layout(gl.permute(key_rows, (1, 0)), RIGHT)
    # Rows behind the window's may hold anything, and 0 times NaN is NaN.
    line = gl.arange(0, ROWS, gl.SliceLayout(1, RIGHT))
    values = gl.where((line < kept)[:, None], gl.convert_layout(value_rows, RIGHT), 0.0)
    index = gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
    keep = (index < kept) & (first + index >= low) & (first + index < high)
    scores = mma_v2(q, keys, gl.zeros([ROWS, ROWS], gl.float32, SCORES))
    scores = gl.where(keep[None, :], scores * SCALE, float("-inf"))
    maximum = gl.max(scores, 1)
    anchor = gl.where(maximum == float("-inf"), 0.0, maximum)
    weights = gl.exp2(scores - anchor[:, None])
    operand = gl.convert_layout(weights.to(q.dtype), LEFT)
    acc = mma_v2(operand, values, gl.zeros([ROWS, HEAD], gl.float32, SCORES))
    return maximum, gl.sum(weights, 1), acc


@gluon.jit
def _store_rows(values, target, rows):
    """Write the first `rows` of [32, d]."""
    lines = gl.convert_layout(values, LINES)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    column = gl.arange(0, HEAD, gl.SliceLayout(0, LINES))
    place = (row * HEAD)[:, None] + column[None, :]
    gl.store(target + place, lines, mask=(row < rows)[:, None])


@gluon.jit
def _lines(channel, taken, dtype: gl.constexpr):
    """Tile number `taken` once it has arrived, as 64 keys or values.

    The activations' warp brings nothing to it, but must have passed it: behind one that was given
    back too early it would wait for the turn after.
    """
    slot = taken % DEPTH
    mbarrier.wait(channel.full.index(slot), taken // DEPTH % 2)
    mbarrier.wait(channel.x_full.index(slot), taken // DEPTH % 2)
    return channel.ring.index(slot)._reinterpret(dtype, [TILE_KEYS, HEAD], HALF_TILE)


@gluon.jit
def _values(channel, taken, first, low, high, dtype: gl.constexpr):
    """Values [64, d] of the columns from `first`, as right operand.

    Memory behind the valid columns may hold anything, and 0 times NaN is NaN.
    """
    column = first + gl.arange(0, TILE_KEYS, gl.SliceLayout(1, RIGHT))
    inside = (column >= low) & (column < high)
    return gl.where(inside[:, None], _lines(channel, taken, dtype).load(RIGHT), 0.0)


@gluon.jit
def _masked(scores, first, start, kept, low, high):
    """Scores of the columns from `first`; -inf outside the valid ones and inside the window."""
    column = first + gl.arange(0, TILE_KEYS, gl.SliceLayout(0, SCORES))
    keep = (column >= low) & (column < high) & ((column < start) | (column >= start + kept))
    return gl.where(keep[None, :], scores, float("-inf"))


@gluon.jit
def _own_state(
    source, layer, head, rows, q, partial, factor, bias, cos, sin, product, fresh_keys,
    fresh_values, start, kept, low, high, dtype: gl.constexpr, BIAS: gl.constexpr,
    SCALE: gl.constexpr, MOST: gl.constexpr,
):  # fmt: skip
    """The state over the window's own keys, which the first head of a key head also keeps."""
    HEADS: gl.constexpr = source.Q // HEAD
    KV_HEADS: gl.constexpr = source.KV // HEAD
    kv_head = head // (HEADS // KV_HEADS)
    key_rows = rope_head(
        source, HEADS + kv_head, rows, partial, factor, bias, cos, sin, product, dtype, BIAS,
        True, MOST,
    )  # fmt: skip
    value_rows = rope_head(
        source, HEADS + KV_HEADS + kv_head, rows, partial, factor, bias, cos, sin, product, dtype,
        BIAS, False, MOST,
    )  # fmt: skip
    fresh = (layer * KV_HEADS + kv_head) * rows * HEAD
    if head % (HEADS // KV_HEADS) == 0:
        _store_rows(key_rows, fresh_keys + fresh, rows)
        _store_rows(value_rows, fresh_values + fresh, rows)
    return own_keys(q, key_rows, value_rows, start, kept, low, high, SCALE)


@gluon.jit
def _absorb(
    channel, taken, q, first, start, kept, low, high, maximum, total, acc, SCALE: gl.constexpr
):  # fmt: skip
    """The state after the 128 cached columns from `first`; gives their four tiles back.

    `total` [32, 64] has a sum for every 64th key, so that only the maximum crosses warps.
    """
    dtype: gl.constexpr = q.dtype
    second = first + TILE_KEYS
    empty = gl.zeros([ROWS, TILE_KEYS], gl.float32, SCORES)
    keys = _lines(channel, taken, dtype).permute((1, 0)).load(RIGHT)
    scores = _masked(mma_v2(q, keys, empty) * SCALE, first, start, kept, low, high)
    keys2 = _lines(channel, taken + 2, dtype).permute((1, 0)).load(RIGHT)
    scores2 = _masked(mma_v2(q, keys2, empty) * SCALE, second, start, kept, low, high)
    maximum, anchor, decay = _state_after(maximum, gl.max(gl.maximum(scores, scores2), 1))
    weights = gl.exp2(scores - anchor[:, None])
    weights2 = gl.exp2(scores2 - anchor[:, None])
    total = total * decay[:, None] + (weights + weights2)
    acc = acc * decay[:, None]
    values = _values(channel, taken + 1, first, low, high, dtype)
    acc = mma_v2(gl.convert_layout(weights.to(dtype), LEFT), values, acc)
    values2 = _values(channel, taken + 3, second, low, high, dtype)
    acc = mma_v2(gl.convert_layout(weights2.to(dtype), LEFT), values2, acc)
    gl.thread_barrier()
    for i in gl.static_range(4):
        mbarrier.arrive(channel.empty.index((taken + i) % DEPTH))
    return maximum, total, acc


@gluon.jit
def attend(
    source, channel, taken, layer, head, rows, partial, squares, bias, cos, sin, product,
    fresh_keys, fresh_values, first_key, start, kept, low, high, own, state, maxima, totals,
    dtype: gl.constexpr, BIAS: gl.constexpr, SCALE: gl.constexpr, EPS: gl.constexpr,
    LANES: gl.constexpr, MOST: gl.constexpr,
):  # fmt: skip
    """The state of a query head over this unit's tiles and, with `own`, over the window itself.

    Columns [start, start + kept) of the cache are stale and left out. Writes state [32, d], maxima
    and totals [32] and, with `own`, the window's keys and values of a key head into fresh ones
    [layers, Hkv, rows, d]; the caller counts the tiles.
    """
    factor = row_factors(source, squares, EPS, LANES, gl.SliceLayout(1, HALF_HEAD))[:, None]
    q_rows = rope_head(
        source, head, rows, partial, factor, bias, cos, sin, product, dtype, BIAS, True, MOST
    )
    q = gl.convert_layout(q_rows, LEFT)
    maximum = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    own_total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([ROWS, TILE_KEYS], gl.float32, SCORES)
    acc = gl.zeros([ROWS, HEAD], gl.float32, SCORES)
    if own:
        maximum, own_total, acc = _own_state(
            source, layer, head, rows, q, partial, factor, bias, cos, sin, product, fresh_keys,
            fresh_values, start, kept, low, high, dtype, BIAS, SCALE, MOST,
        )  # fmt: skip
    own_maximum = maximum
    for pair in range(source.key_tiles // 2):
        first = first_key + pair * (2 * TILE_KEYS)
        maximum, total, acc = _absorb(
            channel, taken + 4 * pair, q, first, start, kept, low, high, maximum, total, acc, SCALE
        )
    row = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    inside = gl.arange(0, HEAD, gl.SliceLayout(0, SCORES))
    gl.store(state + (row * HEAD)[:, None] + inside[None, :], acc)
    gl.store(maxima + row, maximum)
    anchor = gl.where(maximum == float("-inf"), 0.0, maximum)
    gl.store(totals + row, gl.sum(total, 1) + own_total * gl.exp2(own_maximum - anchor))
