"""The stream of weights and cached keys that never stops at the end of a phase.

Every program has three groups of warps. One copies the program's weights, and the cached keys and
values of its attention unit, into a ring of tiles, as far ahead as the ring goes: while the program
waits for the grid, its next tiles arrive. A second one copies the activations that meet them, once
the grid has written them. The third computes (`multiply`, `attend`, `phases`). A tile is 16 KiB: 64
rows of k by 128 columns of a 16-bit weight [K, N], 128 rows by one group of an E4M3 weight [N, K],
half of 128 keys, or 64 values. A pair of keys' and a pair of values' tiles hold 128 columns.

The steps of a product are its tiles of columns times the tiles along k, and each program has a run
of them.

Copies under way delay everything else that a multiprocessor reads or writes, a grid's arrival too,
so only so many are: a ring full of tiles that have arrived is worth more than one of tiles asked
for.
"""

# mypy: ignore-errors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from lacache_trt.plugins.window_layers.grid import ROWS, first_step, wait_to_copy

# Columns of the table of addresses, one row per layer.
ATTN_NORM = gl.constexpr(0)
FFN_NORM = gl.constexpr(1)
QKV_BIAS = gl.constexpr(2)
GATE_UP_SCALE = gl.constexpr(3)
# Behind it, DOWN_SCALE.
TABLE_COLUMNS = gl.constexpr(5)

DEPTH = gl.constexpr(12)
X_DEPTH = gl.constexpr(6)
FIRST = gl.constexpr(4)
ARRIVALS = gl.constexpr(9)
TILE_BYTES = gl.constexpr(16384)
FACTORS = gl.constexpr(64)
TILE_KEYS = gl.constexpr(64)
COLUMNS = gl.constexpr(128)
HEAD = gl.constexpr(128)
WARPS = gl.constexpr(8)

HALF_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
BYTE_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
ROW_SCALES = gl.constexpr(gl.NVMMASharedLayout(0, 8, 2))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ALL_WARPS = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS.value], [0]))


@gluon.jit
def address(source, layer, column, dtype: gl.constexpr):
    """The pointer that the table holds for a layer."""
    found = gl.load(source.table + layer * TABLE_COLUMNS + column)
    return gl.multiple_of(found.to(gl.pointer_type(dtype)), 16)


@gluon.jit
def _copy_tile(
    channel, issued, under_way, box, row, byte, ROW_STEP: gl.constexpr, BYTE_STEP: gl.constexpr
):  # fmt: skip
    """Start the copies of a tile's halves, each when at most `under_way` are, it included."""
    slot = issued % DEPTH
    mbarrier.wait(channel.empty.index(slot), (issued // DEPTH + 1) % 2)
    halves = channel.ring._reinterpret(gl.int8, [2 * DEPTH, 64, 128], BYTE_TILE)
    for half in gl.static_range(2):
        before = 2 * issued + half - under_way
        before_slot = gl.maximum(before, 0) % (2 * DEPTH)
        parity = gl.maximum(before, 0) // (2 * DEPTH) % 2
        mbarrier.wait(channel.full.index(before_slot), parity, pred=before >= 0)
        arrived = channel.full.index(2 * slot + half)
        mbarrier.expect(arrived, TILE_BYTES // 2)
        place = [row + half * ROW_STEP, byte + half * BYTE_STEP]
        tma.async_copy_global_to_shared(box, place, arrived, halves.index(2 * slot + half))


@gluon.jit
def wait_for_tile(channel, tile):
    """Wait until both halves of a tile have arrived; returns its slot."""
    slot = tile % DEPTH
    for half in gl.static_range(2):
        mbarrier.wait(channel.full.index(2 * slot + half), tile // DEPTH % 2)
    return slot


@gluon.jit
def _weight_of_product(source, channel, issued, box, layer, kind, product):
    """Copy this program's steps of a weight; returns how many tiles have been issued."""
    place = source.places + (layer * 4 + kind) * 2
    row = gl.load(place)
    byte = gl.load(place + 1)
    begin = first_step(product.TOTAL, source.program, source.PROGRAMS)
    end = first_step(product.TOTAL, source.program + 1, source.PROGRAMS)
    for position in range(begin, end):
        column = position // product.STEPS
        step = position % product.STEPS
        # The first ones come while the grid finishes the phase before, and leave it more room.
        early = position - begin < DEPTH + FIRST
        under_way = gl.where(early, source.EARLY, source.IN_FLIGHT)
        if product.FP8:
            _copy_tile(
                channel, issued, under_way, box, row + column * COLUMNS, byte + step * 128, 64, 0
            )
        else:
            _copy_tile(
                channel, issued, under_way, box, row + step * 64, byte + column * 256, 0, 128
            )
        issued += 1
    return issued


@gluon.jit
def produce(source, channel, products, boxes, keys, values):
    """A warp of its own copies the whole stream, as fast as slots become empty.

    The boxes describe the memory of the weights and the cached keys and values as bytes, in pieces
    of 64 rows by 128 bytes: half a tile.
    """
    issued = source.program * 0
    for layer in range(source.layers):
        issued = _weight_of_product(source, channel, issued, boxes[0], layer, 0, products[0])
        for pair in range(source.key_pairs):
            row = layer * source.layer_rows + source.head_row + pair * (2 * TILE_KEYS)
            for half in range(2):
                _copy_tile(channel, issued, source.EARLY, keys, row, half * 128, TILE_KEYS, 0)
                issued += 1
            for half in range(2):
                line = row + half * TILE_KEYS
                _copy_tile(channel, issued, source.EARLY, values, line, 0, 0, 128)
                issued += 1
        issued = _weight_of_product(source, channel, issued, boxes[1], layer, 1, products[1])
        issued = _weight_of_product(source, channel, issued, boxes[2], layer, 2, products[2])
        issued = _weight_of_product(source, channel, issued, boxes[3], layer, 3, products[3])


@gluon.jit
def _copy_rows(channel, issued, x, scale, place, product):
    """Start the copy of the activations at step `place` of K, the `issued`-th of all."""
    slot = issued % X_DEPTH
    mbarrier.wait(channel.x_empty.index(slot), (issued // X_DEPTH + 1) % 2)
    arrived = channel.x_full.index(slot)
    if product.FP8:
        mbarrier.expect(arrived, ROWS * 128 + ROWS * 4)
        tma.async_copy_global_to_shared(scale, [place, 0], arrived, channel.scale_ring.index(slot))
    else:
        mbarrier.expect(arrived, ROWS * 128)
    tma.async_copy_global_to_shared(x, [0, place * 128], arrived, channel.x_ring.index(slot))


@gluon.jit
def _rows_of_product(source, channel, issued, parity, x, scale, product, counter, arrivals):
    """Copy the activations of what `_weight_of_product` copies, once the grid has written them."""
    begin = first_step(product.TOTAL, source.program, source.PROGRAMS)
    end = first_step(product.TOTAL, source.program + 1, source.PROGRAMS)
    mbarrier.wait(channel.go.index(0), parity)
    wait_to_copy(counter, arrivals * source.PROGRAMS)
    for position in range(begin, end):
        _copy_rows(channel, issued, x, scale, position % product.STEPS, product)
        issued += 1
    return issued


@gluon.jit
def produce_rows(source, channel, products, x, ffn_scale, down_scale, counter):
    """A warp of its own copies the activations that the tiles of the products meet.

    Each product's are complete when all programs have arrived at the grid's counter so often.
    """
    issued = source.program * 0
    for layer in range(source.layers):
        at = layer * ARRIVALS
        issued = _rows_of_product(
            source, channel, issued, 0, x[0], ffn_scale, products[0], counter, at + 1
        )
        issued = _rows_of_product(
            source, channel, issued, 1, x[1], ffn_scale, products[1], counter, at + 4
        )
        issued = _rows_of_product(
            source, channel, issued, 0, x[2], ffn_scale, products[2], counter, at + 6
        )
        issued = _rows_of_product(
            source, channel, issued, 1, x[3], down_scale, products[3], counter, at + 8
        )
