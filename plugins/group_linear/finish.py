"""How a tile of GroupLinear leaves the registers, and the second phase of a split product.

Split over the groups of K, every program writes its partial sums as float32 to the workspace
[splits, M, N]; `merge_kernel` adds them in the order of the splits, so that the result is the same
in every run. The residual is added in float32, before the only rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lacache_trt.plugins.triton_support import unspecialised

MERGE_ELEMENTS = 256
MERGE_WARPS = 4
MOST_SPLITS = 16


@triton.jit
def write_tile(
    acc, row, column, split, residual, workspace, out, rows, columns,
    SPLIT: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """acc float32 [rows of the tile, columns of the tile] at these rows and columns."""
    keep = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    if SPLIT:
        base = split.to(tl.int64) * rows * columns
        tl.store(workspace + base + place, acc, mask=keep)
    else:
        if ADD:
            acc += tl.load(residual + place, mask=keep, other=0.0).to(tl.float32)
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=keep)


@unspecialised("total", "splits")
def merge_kernel(
    residual, workspace, out, total, splits,
    ELEMENTS: tl.constexpr, MOST: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of the M * N elements,). total = M * N."""
    place = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    keep = place < total
    acc = tl.zeros((ELEMENTS,), tl.float32)
    for split in tl.static_range(MOST):
        source = workspace + tl.cast(total, tl.int64) * split + place
        acc += tl.load(source, mask=keep & (split < splits), other=0.0)
    if ADD:
        acc += tl.load(residual + place, mask=keep, other=0.0).to(tl.float32)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=keep)
