"""Triton kernel of AttentionFill: the online-softmax state over the keys outside the block.

For query i of head h and U = {n : valid_from[b] <= n < valid_to[b], n not in the block},
    fa_max_i = max_{j in U} s_ij      fa_sum_i = sum_U e^(s_ij - fa_max_i)
    fa_acc_i = sum_U e^(s_ij - fa_max_i) v_j      with s_ij = q_i . k_j / sqrt(d)
and (-inf, 0, 0) for an empty U. One program computes one tile of query rows of one head; query
tiles of a head are neighbours in launch order, so its keys stay in L2. The loop is
`attention.stream`: it works in log2 units and the maximum is converted on the way out (one fp32
rounding, relative 6e-8).

Layout: q [B, Hq, N, d], k and v [B, Hkv, N, d], state [B, Hq, N] and [B, Hq, N, d], contiguous.
dtypes: q, k, v in T; state fp32. The block is a run of consecutive columns: only its first column
is read, from device memory, so a captured graph follows it. Every row is written.
Error bound against float64: fa_sum and fa_acc within 2 ulp of T relative to sum |w_j v_j|.
Source: LaCache (arXiv 2607.16339), FACache; FlashAttention-2's online softmax.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from lacache_trt.plugins.attention.stream import (
    empty_state,
    outside_runs,
    stream_constants,
    stream_runs,
)
from lacache_trt.plugins.triton_support import (
    POINTER_TYPES,
    Configuration,
    Tiles,
    ceil_div,
    device_sm,
    dtype_label,
    unspecialised,
)

TILES = {89: Tiles(64, 32, 4, 2), 90: Tiles(64, 64, 4, 3)}


@unspecialised("heads", "kv_heads", "length", "block")
def attention_fill_kernel(
    q, k, v, valid_from, valid_to, block_columns, fa_max, fa_sum, fa_acc,
    heads, kv_heads, length, block,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Grid: (query tiles, Hq, B)."""
    first = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    batch = tl.program_id(2)
    kv_head = head // (heads // kv_heads)
    head_row = (batch * heads + head).to(tl.int64) * length
    kv_base = (batch * kv_heads + kv_head).to(tl.int64) * length * D

    row = first + tl.arange(0, ROWS)
    in_range = row < length
    offsets = row[:, None] * D + tl.arange(0, D)[None, :]
    q_tile = tl.load(q + head_row * D + offsets, mask=in_range[:, None], other=0.0)

    low = tl.load(valid_from + batch)
    high = tl.load(valid_to + batch)
    block_start = tl.load(block_columns + batch * block)
    a_start, a_count, b_start, b_count = outside_runs(low, high, block_start, block_start + block)
    maximum, total, acc = empty_state(ROWS, D)
    maximum, total, acc = stream_runs(
        q_tile, k + kv_base, v + kv_base, a_start, a_count, b_start, b_count,
        maximum, total, acc, D, KEYS, SCALE
    )  # fmt: skip
    tl.store(fa_max + head_row + row, maximum * 0.6931471805599453, mask=in_range)
    tl.store(fa_sum + head_row + row, total, mask=in_range)
    tl.store(fa_acc + head_row * D + offsets, acc, mask=in_range[:, None])


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid_from: Tensor,
    valid_to: Tensor,
    block_columns: Tensor,
    fa_max: Tensor,
    fa_sum: Tensor,
    fa_acc: Tensor,
    tiles: Tiles | None = None,
) -> None:
    """Write the state (last three tensors). All tensors contiguous, indices int32."""
    batch, heads, length, head_dim = q.shape
    tiles = tiles or TILES[90 if device_sm(q) == 90 else 89]
    attention_fill_kernel[(ceil_div(length, tiles.rows), heads, batch)](
        q, k, v, valid_from, valid_to, block_columns, fa_max, fa_sum, fa_acc,
        heads, k.shape[1], length, block_columns.shape[1],
        **stream_constants(tiles, head_dim), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def configurations(dtype: torch.dtype, head_dim: int, sm: int) -> list[Configuration]:
    """The instances that ship for a model on an SM."""
    pointer = POINTER_TYPES[dtype]
    arguments = dict.fromkeys(("q", "k", "v"), pointer)
    arguments |= dict.fromkeys(("valid_from", "valid_to", "block_columns"), "*i32")
    arguments |= dict.fromkeys(("fa_max", "fa_sum", "fa_acc"), "*fp32")
    arguments |= dict.fromkeys(("heads", "kv_heads", "length", "block"), "i32")
    tiles = TILES[sm]
    return [
        Configuration(
            name=f"attention_fill.d{head_dim}.{dtype_label(dtype)}.{tiles.label}",
            kernel=attention_fill_kernel,
            arguments=arguments,
            constants=stream_constants(tiles, head_dim),
            warps=tiles.warps,
            stages=tiles.stages,
        )
    ]
