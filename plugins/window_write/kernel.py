"""Triton kernel that puts a window's K and V of all layers into the cache, one launch a step.

    keys[l, b, h, window_columns[b, j]] = window_keys[l, b, h, j]     likewise values
for every j whose column is not a pad (-1). Columns of a row are distinct, so each row of the cache
is written at most once.

Layout: keys and values [L, B, Hkv, N, d], window_keys and window_values [L, B, Hkv, W, d], all
contiguous and of one dtype. Bytes: 4 * L * B * Hkv * W * d * size(T), read and written.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from lacache_trt.plugins.triton_support import (
    POINTER_TYPES,
    Configuration,
    ceil_div,
    dtype_label,
    unspecialised,
)

ROWS = 16
WARPS = 4


@unspecialised("batch", "kv_heads", "width", "length")
def window_write_kernel(
    window_keys, window_values, window_columns, keys, values, batch, kv_heads, width, length,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (L * B * Hkv, window tiles)."""
    head = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < width
    b = (head // kv_heads) % batch
    column = tl.load(window_columns + b * width + row, mask=inside, other=-1)
    keep = (inside & (column >= 0))[:, None]
    element = tl.arange(0, D)[None, :]
    source = head.to(tl.int64) * width * D + row[:, None] * D + element
    target = head.to(tl.int64) * length * D + column[:, None] * D + element
    tl.store(keys + target, tl.load(window_keys + source, mask=keep), mask=keep)
    tl.store(values + target, tl.load(window_values + source, mask=keep), mask=keep)


def launch(
    window_keys: Tensor,
    window_values: Tensor,
    window_columns: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Write the window's columns of `keys` and `values`."""
    layers, batch, kv_heads, length, head_dim = keys.shape
    width = window_columns.shape[1]
    window_write_kernel[(layers * batch * kv_heads, ceil_div(width, ROWS))](
        window_keys, window_values, window_columns, keys, values, batch, kv_heads, width, length,
        D=head_dim, ROWS=ROWS, num_warps=WARPS, num_stages=1,
    )  # fmt: skip


def configurations(dtype: torch.dtype, head_dim: int) -> list[Configuration]:
    """The instances that ship for a model (any SM)."""
    pointer = POINTER_TYPES[dtype]
    arguments = dict.fromkeys(("window_keys", "window_values"), pointer)
    arguments |= {"window_columns": "*i32", "keys": pointer, "values": pointer}
    arguments |= dict.fromkeys(("batch", "kv_heads", "width", "length"), "i32")
    return [
        Configuration(
            name=f"window_write.d{head_dim}.{dtype_label(dtype)}",
            kernel=window_write_kernel,
            arguments=arguments,
            constants={"D": head_dim, "ROWS": ROWS},
            warps=WARPS,
            stages=1,
        )
    ]
