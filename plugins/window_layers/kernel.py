"""The layers of a window step in one persistent kernel."""

# mypy: ignore-errors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from lacache_trt.plugins.window_layers.attend import attend, share_of_keys
from lacache_trt.plugins.window_layers.grid import ROWS, arrive, wait
from lacache_trt.plugins.window_layers.multiply import multiply, take_first
from lacache_trt.plugins.window_layers.parts import (
    Channel,
    Product,
    Sizes,
    Source,
    Window,
    Work,
)
from lacache_trt.plugins.window_layers.phases import merge_heads, residual, swiglu
from lacache_trt.plugins.window_layers.stream import (
    ALL_WARPS,
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
    address,
    produce,
    produce_rows,
)


@gluon.jit
def unknown_zero(number):
    """Zero, which no compiler knows: indices that are made from it are computed where it is made.

    Else all of them are computed before the loop over layers, and spilled, and every read of one
    misses: a wait for the grid empties the L1 cache. Phases took up to three times as long.
    """
    return (number >> 20) * 128


@gluon.jit
def attention_half(
    source, sizes, channel, products, window, work, taken, keys_taken, arrivals, layer, second
):  # fmt: skip
    """Of a layer, first norm, q, k and v and the attention's states; then their sum and projection.

    Two turns of a loop, because they share the code of the product. Returns the counts of tiles, of
    those with keys and values, and of arrivals.
    """
    dtype: gl.constexpr = work.hidden.dtype.element_ty
    zero = unknown_zero(layer + second)
    first = take_first(channel, taken, dtype, False)
    wait(work.counter, arrivals)
    if second == 0:
        gain = address(source, layer, ATTN_NORM, dtype)
        residual(
            source, sizes, work, zero, window.rows, gain, work.x_attn, layer > 0, products[3], True,
            False,
        )  # fmt: skip
    else:
        merge_heads(source, sizes, work, zero, window.rows)
    arrive(work.counter)
    mbarrier.arrive(channel.go.index(0))
    taken = multiply(
        source, channel, work, zero, taken, keys_taken, first, work.squares,
        (products[0], products[1]), second, dtype,
    )  # fmt: skip
    arrive(work.counter)
    arrivals += 2 * source.PROGRAMS
    if second == 0:
        bias = address(source, layer, QKV_BIAS, dtype)
        attend(
            source, sizes, channel, window, work, zero, taken, layer, bias, products[0], arrivals
        )
        taken += 4 * source.key_pairs
        keys_taken += 4 * source.key_pairs
        arrive(work.counter)
        arrivals += source.PROGRAMS
    return taken, keys_taken, arrivals


@gluon.jit
def ffn_half(
    source, sizes, channel, products, window, work, taken, keys_taken, arrivals, layer, second
):  # fmt: skip
    """Of a layer, first norm, gate and up; then SwiGLU and down. As `attention_half`."""
    dtype: gl.constexpr = work.hidden.dtype.element_ty
    zero = unknown_zero(layer + second)
    first = take_first(channel, taken, dtype, sizes.FP8)
    wait(work.counter, arrivals)
    if second == 0:
        gain = address(source, layer, FFN_NORM, dtype)
        residual(
            source, sizes, work, zero, window.rows, gain, work.x_ffn, True, products[1], True,
            sizes.FP8,
        )  # fmt: skip
    else:
        swiglu(source, sizes, work, zero, products[2])
    arrive(work.counter)
    mbarrier.arrive(channel.go.index(0))
    scales = address(source, layer, GATE_UP_SCALE + second, gl.float32)
    taken = multiply(
        source, channel, work, zero, taken, keys_taken, first, scales, (products[2], products[3]),
        second, dtype,
    )  # fmt: skip
    arrive(work.counter)
    return taken, arrivals + 2 * source.PROGRAMS


@gluon.jit
def consume(source, sizes, channel, products, window, work):
    """All phases of all layers, on the tiles that the other warps bring."""
    taken = source.program * 0
    keys_taken = source.program * 0
    arrivals = source.program * 0
    for layer in range(source.layers):
        for second in range(2):
            taken, keys_taken, arrivals = attention_half(
                source, sizes, channel, products, window, work, taken, keys_taken, arrivals, layer,
                second,
            )  # fmt: skip
        for second in range(2):
            taken, arrivals = ffn_half(
                source, sizes, channel, products, window, work, taken, keys_taken, arrivals, layer,
                second,
            )  # fmt: skip
    wait(work.counter, arrivals)
    zero = unknown_zero(source.layers)
    residual(
        source, sizes, work, zero, window.rows, work.hidden, work.x_attn, True, products[3], False,
        False,
    )  # fmt: skip


@gluon.jit
def window_of(
    cos, sin, kept_keys, kept_values, window_columns, valid_from, valid_to, length, rows, chunk,
    CHUNKS: gl.constexpr,
):  # fmt: skip
    """The window, and how many pairs of key tiles a chunk has."""
    lane = gl.arange(0, ROWS, ALL_WARPS)
    found = gl.load(window_columns + lane, mask=lane < rows, other=-1)
    kept = gl.sum((found >= 0).to(gl.int32), 0)
    low = gl.load(valid_from)
    high = gl.minimum(gl.load(valid_to), length)
    first_key, key_pairs = share_of_keys(low, high, chunk, CHUNKS)
    start = gl.load(window_columns)
    window = Window(cos, sin, kept_keys, kept_values, rows, start, kept, low, high, first_key)
    return window, key_pairs


@gluon.jit
def open_channel():
    """The rings and their barriers, all slots empty."""
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
    for i in gl.static_range(2 * DEPTH):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(DEPTH):
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(X_DEPTH):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=1)
    mbarrier.init(go.index(0), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return Channel(ring, x_ring, scale_ring, full, x_full, empty, x_empty, go, factors)


@gluon.jit(do_not_specialize=["layers", "length", "rows"])
def window_layers_kernel(
    table, places, qkv, attn_out, gate_up, down, keys, values, kept_keys, kept_values,
    hidden, cos, sin, window_columns, valid_from, valid_to,
    x_attn, x_out, x_ffn, x_down, x_attn_box, x_out_box, x_ffn_box, x_down_box,
    ffn_scale_box, down_scale_box, ffn_scale, down_scale, partial, squares, state, maxima, totals,
    counter, layers, length, rows,
    D: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr, F: gl.constexpr, FP8: gl.constexpr,
    BIAS: gl.constexpr, EPS: gl.constexpr, SCALE: gl.constexpr, LANES: gl.constexpr,
    CHUNKS: gl.constexpr, PROGRAMS: gl.constexpr, IN_FLIGHT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid: (PROGRAMS,), all resident at once. counter: an int32 zero."""
    program = gl.program_id(0)
    head = program // CHUNKS
    window, key_pairs = window_of(
        cos, sin, kept_keys, kept_values, window_columns, valid_from, valid_to, length, rows,
        program % CHUNKS, CHUNKS,
    )  # fmt: skip
    key_pairs = gl.where(head < Q // HEAD, key_pairs, 0)
    head_row = (head // (Q // KV)) * length + window.first_key
    source = Source(
        table, places, head_row, length * (KV // HEAD), key_pairs, program, layers, PROGRAMS,
        IN_FLIGHT, EARLY,
    )  # fmt: skip
    sizes = Sizes(D, Q, KV, F, FP8, BIAS, EPS, SCALE, LANES, CHUNKS)
    work = Work(
        hidden, x_attn, x_out, x_ffn, x_down, ffn_scale, down_scale, partial, squares, state,
        maxima, totals, counter,
    )  # fmt: skip
    products = (
        Product(D, Q + 2 * KV, False, PROGRAMS),
        Product(Q, D, False, PROGRAMS),
        Product(D, 2 * F, FP8, PROGRAMS),
        Product(F, D, FP8, PROGRAMS),
    )
    channel = open_channel()
    boxes = (x_attn_box, x_out_box, x_ffn_box, x_down_box)
    gl.warp_specialize(
        [
            (consume, (source, sizes, channel, products, window, work)),
            (produce, (source, channel, products, (qkv, attn_out, gate_up, down), keys, values)),
            (
                produce_rows,
                (source, channel, products, boxes, ffn_scale_box, down_scale_box, counter),
            ),
        ],
        [1, 1],
        [72, 72],
    )
