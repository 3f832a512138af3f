"""GroupLinear for few rows: streams the weight once, with the weight as the first operand.

A program multiplies COLUMNS rows of the weight with all rows of a tile of activations, transposed:
acc[n, r] += scale[r, g] * weight_scale[n / 128, g] * (weight[n, g] . quantised[r, g]). So the
weight fills the 64-row side of Hopper's matrix instructions, and few activations cost few
registers, which leaves room for many programs and bytes in flight.

An iteration multiplies STEP groups; a last one that is too short repeats a group with a factor of
zero. The scales of the next group are read into registers while the current one is multiplied, and
not used before: they never pass through the pipeline's shared memory, so no number of stages can
overtake them, and no warp waits for them.
"""

from __future__ import annotations

import triton.language as tl

from lacache_trt.plugins.group_linear.finish import write_tile
from lacache_trt.plugins.triton_support import unspecialised


@unspecialised("rows", "columns", "groups", "split_groups", "scale_row", "scale_group")
def stream_kernel(
    quantised, scale, weight, weight_scale, residual, workspace, out,
    rows, columns, groups, split_groups, scale_row, scale_group,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr,
    SPLIT: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of N, splits, tiles of M)."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    inside = tl.arange(0, GROUP)[None, :]
    width = groups * GROUP
    known_row = tl.minimum(row, rows - 1).to(tl.int64)
    w_source = weight + tl.minimum(column, columns - 1)[:, None].to(tl.int64) * width + inside
    x_source = quantised + known_row[:, None] * width + inside
    ws_source = weight_scale + (tl.program_id(0) * COLUMNS // GROUP) * groups
    xs_source = scale + known_row * scale_row

    begin = split * split_groups
    end = tl.minimum(begin + split_groups, groups)
    xs = tl.load(xs_source + begin * scale_group)
    ws = tl.load(ws_source + begin)
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    for first in range(begin, end, STEP):
        for index in tl.static_range(STEP):
            group = first + index
            following = tl.minimum(group + 1, end - 1)
            next_xs = tl.load(xs_source + following * scale_group)
            next_ws = tl.load(ws_source + following)
            known = group
            if index > 0:
                known = tl.minimum(group, end - 1)
                ws = tl.where(group < end, ws, 0.0)
            w = tl.load(w_source + known * GROUP)
            x = tl.load(x_source + known * GROUP)
            acc += tl.dot(w, tl.trans(x)) * (xs * ws)[None, :]
            xs = next_xs
            ws = next_ws
    write_tile(
        tl.trans(acc), row, column, split, residual, workspace, out, rows, columns, SPLIT, ADD
    )
