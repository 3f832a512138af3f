"""GroupLinear for many rows: output tiles whose K loop promotes every group to float32.

Hopper's FP8 products accumulate with about 14 bits inside a matrix instruction chain; every chain
here is one group of 128, whose sum is then scaled and added in float32 (DeepSeek-V3's promotion).

The scales of the next group are read into registers while the current one is multiplied, and not
used before: they never pass through the pipeline's shared memory, so no number of stages can
overtake them, and no warp waits for them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lacache_trt.plugins.group_linear.finish import write_tile
from lacache_trt.plugins.triton_support import unspecialised


@triton.jit
def tile_of_program(program, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                    BAND: tl.constexpr):  # fmt: skip
    """(row tile, column tile): even bands of up to BAND row tiles, rows first, so that L2 serves
    both operands."""
    row_tiles = tl.cdiv(rows, ROWS)
    even = tl.cdiv(row_tiles, tl.cdiv(row_tiles, BAND))
    in_band = even * tl.cdiv(columns, COLUMNS)
    first = program // in_band * even
    height = tl.minimum(row_tiles - first, even)
    inside = program % in_band
    return first + inside % height, inside // height


@triton.jit
def group_tile(base, first, limit, width, group, COUNT: tl.constexpr, GROUP: tl.constexpr):
    """E4M3 [COUNT, 128]: one group of the rows from `first`; zeros behind the last row."""
    local = tl.arange(0, COUNT)
    start = base + first.to(tl.int64) * width + group * GROUP
    inside = local[:, None] * width + tl.arange(0, GROUP)[None, :]
    return tl.load(start + inside, mask=(local < limit - first)[:, None], other=0.0)


@triton.jit
def row_scales(base, first, limit, row_stride, place, COUNT: tl.constexpr):
    """float32 [COUNT]: the scales at `place` of the rows from `first`; 0 behind the last."""
    local = tl.arange(0, COUNT)
    start = base + first.to(tl.int64) * row_stride + place
    return tl.load(start + local * row_stride, mask=local < limit - first, other=0.0)


@unspecialised("rows", "columns", "groups", "split_groups", "scale_row", "scale_group")
def tiled_kernel(
    quantised, scale, weight, weight_scale, residual, workspace, out,
    rows, columns, groups, split_groups, scale_row, scale_group,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, BAND: tl.constexpr,
    SPLIT: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of M and N, splits). COLUMNS is at most 128."""
    row_tile, column_tile = tile_of_program(tl.program_id(0), rows, columns, ROWS, COLUMNS, BAND)
    split = tl.program_id(1)
    width = groups * GROUP
    first_row = row_tile * ROWS
    first_column = column_tile * COLUMNS
    block = (first_column // GROUP) * groups
    begin = split * split_groups
    end = tl.minimum(begin + split_groups, groups)
    xs = row_scales(scale, first_row, rows, scale_row, begin * scale_group, ROWS)
    ws = tl.load(weight_scale + block + begin)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for group in range(begin, end):
        following = tl.minimum(group + 1, end - 1)
        next_xs = row_scales(scale, first_row, rows, scale_row, following * scale_group, ROWS)
        next_ws = tl.load(weight_scale + block + following)
        x = group_tile(quantised, first_row, rows, width, group, ROWS, GROUP)
        w = group_tile(weight, first_column, columns, width, group, COLUMNS, GROUP)
        acc += tl.dot(x, tl.trans(w)) * (xs * ws)[:, None]
        xs = next_xs
        ws = next_ws
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    write_tile(acc, row, column, split, residual, workspace, out, rows, columns, SPLIT, ADD)
