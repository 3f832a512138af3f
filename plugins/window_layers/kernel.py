"""The layers of a window step in one persistent kernel."""

# mypy: ignore-errors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from lacache_trt.plugins.window_layers.attend import attend, share_of_keys
from lacache_trt.plugins.window_layers.grid import ROWS, arrive, wait
from lacache_trt.plugins.window_layers.multiply import multiply, take_first
from lacache_trt.plugins.window_layers.phases import merge_heads, residual, swiglu
from lacache_trt.plugins.window_layers.stream import (
    ALL_WARPS,
    ARRIVALS,
    ATTN_NORM,
    BYTE_TILE,
    DEPTH,
    FACTORS,
    FFN_NORM,
    GATE_UP_SCALE,
    HEAD,
    LINE,
    QKV_BIAS,
    ROW_SCALES,
    X_DEPTH,
    Channel,
    Product,
    Source,
    address,
    either,
    produce,
    produce_rows,
)


@gluon.jit
def unknown_zero(number):
    """Zero, which no compiler knows: indices that are made from it are computed where it is made.

    They would all be computed before the loop over layers, and spilled: every read of them would
    miss, since each wait for the grid empties the L1 cache.
    """
    return (number >> 20) * 128


@gluon.jit
def consume(
    source, channel, products, hidden, cos, sin, window_columns, kept_keys, kept_values, low,
    high, first_key, x, ffn_scale, down_scale, partial, squares, state, maxima, totals,
    counter, rows,
    BIAS: gl.constexpr, EPS: gl.constexpr, SCALE: gl.constexpr, LANES: gl.constexpr,
    MOST_QKV: gl.constexpr, MOST_OUT: gl.constexpr, MOST_UP: gl.constexpr,
    CHUNKS: gl.constexpr,
):  # fmt: skip
    """All phases of all layers, on the tiles that the other warps bring."""
    FP8: gl.constexpr = source.FP8
    dtype: gl.constexpr = hidden.dtype.element_ty
    program = source.program
    start = gl.load(window_columns)
    lane = gl.arange(0, ROWS, ALL_WARPS)
    found = gl.load(window_columns + lane, mask=lane < rows, other=-1)
    kept = gl.sum((found >= 0).to(gl.int32), 0)
    taken = program * 0
    keys_taken = program * 0
    arrivals = program * 0
    for layer in range(source.layers):
        # Products in loops, one piece of code for two: the kernel fits the cache of instructions.
        for second in range(2):
            zero = unknown_zero(layer + second)
            first = take_first(channel, taken, dtype, False)
            wait(counter, arrivals)
            if second == 0:
                gain = address(source, layer, ATTN_NORM, dtype)
                residual(
                    source, zero, rows, hidden, partial, gain, x[0], ffn_scale, squares, layer > 0,
                    products[3], True, False, MOST_OUT,
                )  # fmt: skip
            else:
                merge_heads(
                    source, zero, rows, state, maxima, totals, x[1], CHUNKS + 1
                )
            arrive(counter)
            mbarrier.arrive(channel.go.index(0))
            n, steps, total = either(products[0], products[1], second)
            taken = multiply(
                source, channel, zero, taken, keys_taken, first, squares, partial, n, steps, total,
                dtype, False,
            )  # fmt: skip
            arrive(counter)
            arrivals += 2 * source.programs
            if second == 0:
                bias = address(source, layer, QKV_BIAS, dtype)
                attend(
                    source, channel, zero, taken, layer, program + zero, rows, partial, squares, bias, cos,
                    sin, products[0], kept_keys, kept_values, first_key + zero, start, kept, low, high,
                    state, maxima, totals, counter, arrivals,
                    dtype, BIAS, SCALE, EPS, LANES, MOST_QKV, CHUNKS,
                )  # fmt: skip
                taken += 4 * source.key_pairs
                keys_taken += 4 * source.key_pairs
                arrive(counter)
                arrivals += source.programs
        for second in range(2):
            zero = unknown_zero(layer + second)
            first_ffn = take_first(channel, taken, dtype, FP8)
            wait(counter, arrivals)
            if second == 0:
                gain = address(source, layer, FFN_NORM, dtype)
                residual(
                    source, zero, rows, hidden, partial, gain, x[2], ffn_scale, squares, True,
                    products[1], True, FP8, MOST_OUT,
                )  # fmt: skip
            else:
                swiglu(
                    source, zero, partial, squares, x[3], down_scale, products[2], dtype, FP8,
                    MOST_UP, EPS, LANES,
                )  # fmt: skip
            arrive(counter)
            mbarrier.arrive(channel.go.index(0))
            scales = address(source, layer, GATE_UP_SCALE + second, gl.float32)
            n, steps, total = either(products[2], products[3], second)
            taken = multiply(
                source, channel, zero, taken, keys_taken, first_ffn, scales, partial, n, steps,
                total, dtype, FP8,
            )  # fmt: skip
            arrive(counter)
            arrivals += 2 * source.programs
    wait(counter, arrivals)
    residual(
        source, unknown_zero(source.layers), rows, hidden, partial, hidden, x[0], ffn_scale, squares, True, products[3],
        False, False, MOST_OUT,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["layers", "length", "rows"])
def window_layers_kernel(
    table, places, qkv, attn_out, gate_up, down, keys, values, kept_keys, kept_values,
    hidden, cos, sin, window_columns, valid_from, valid_to,
    x_attn, x_out, x_ffn, x_down, x_attn_box, x_out_box, x_ffn_box, x_down_box,
    ffn_scale_box, down_scale_box, ffn_scale, down_scale, partial, squares, state, maxima, totals,
    counter, layers, length, rows,
    D: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr, F: gl.constexpr, FP8: gl.constexpr,
    BIAS: gl.constexpr, EPS: gl.constexpr, SCALE: gl.constexpr, LANES: gl.constexpr,
    MOST_QKV: gl.constexpr, MOST_OUT: gl.constexpr, MOST_UP: gl.constexpr,
    CHUNKS: gl.constexpr, PROGRAMS: gl.constexpr, IN_FLIGHT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid: (PROGRAMS,), all resident at once. counter: an int32 zero."""
    program = gl.program_id(0)
    head = program // CHUNKS
    low = gl.load(valid_from)
    high = gl.minimum(gl.load(valid_to), length)
    first_key, key_pairs = share_of_keys(low, high, program % CHUNKS, CHUNKS)
    key_pairs = gl.where(head < Q // HEAD, key_pairs, 0)
    head_row = (head // (Q // KV)) * length + first_key
    source = Source(
        table, places, head_row, length * (KV // HEAD), key_pairs, program, layers,
        PROGRAMS, D, Q, KV, F, FP8, IN_FLIGHT, EARLY,
    )  # fmt: skip
    products = (
        Product(D, Q + 2 * KV, False),
        Product(Q, D, False),
        Product(D, 2 * F, FP8),
        Product(F, D, FP8),
    )
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    ring = gl.allocate_shared_memory(gl.int8, [DEPTH, 128, 128], BYTE_TILE)
    x_ring = gl.allocate_shared_memory(gl.int8, [X_DEPTH, ROWS, 128], BYTE_TILE)
    scale_ring = gl.allocate_shared_memory(gl.int8, [X_DEPTH, 1, 4 * ROWS], ROW_SCALES)
    factors = gl.allocate_shared_memory(gl.float32, [FACTORS, 1], LINE)
    full = gl.allocate_shared_memory(gl.int64, [2 * DEPTH, 1], barrier_layout)
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], barrier_layout)
    x_full = gl.allocate_shared_memory(gl.int64, [X_DEPTH, 1], barrier_layout)
    x_empty = gl.allocate_shared_memory(gl.int64, [X_DEPTH, 1], barrier_layout)
    go = gl.allocate_shared_memory(gl.int64, [1, 1], barrier_layout)
    mbarrier.init(go.index(0), count=1)
    for i in gl.static_range(2 * DEPTH):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(DEPTH):
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(X_DEPTH):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    channel = Channel(ring, x_ring, scale_ring, full, x_full, empty, x_empty, go, factors)
    gl.warp_specialize(
        [
            (
                consume,
                (
                    source, channel, products, hidden, cos, sin, window_columns, kept_keys,
                    kept_values, low, high, first_key,
                    (x_attn, x_out, x_ffn, x_down), ffn_scale, down_scale, partial, squares,
                    state, maxima, totals, counter, rows, BIAS, EPS, SCALE, LANES, MOST_QKV, MOST_OUT,
                    MOST_UP, CHUNKS,
                ),
            ),
            (produce, (source, channel, products, (qkv, attn_out, gate_up, down), keys, values)),
            (
                produce_rows,
                (
                    source, channel, products, (x_attn_box, x_out_box, x_ffn_box, x_down_box),
                    ffn_scale_box, down_scale_box, counter,
                ),
            ),
        ],
        [1, 1],
        [72, 72],
    )  # fmt: skip
