"""Attention of a few query rows, split along the keys: partial states, then a deterministic merge.

A handful of query rows on thousands of keys would be one long serial stream. Here each program
streams one chunk of the keys and writes its state (m_s, l_s, a_s), and a second kernel combines
    m = max_s m_s      out = sum_s 2^(m_s - m) a_s / sum_s 2^(m_s - m) l_s
in a fixed order: no atomics, bitwise repeatable. Query heads that share a key head are packed into
one tile: with G = Hq / Hkv heads of M rows, packed row r is head r // M, row r % M, and because q
is [B, Hq, M, d] the packed rows of a key head are contiguous.

Workspace: float32, `workspace_elements` of them: a [rows, S, d], then m [rows, S] (log2 units),
then l [rows, S], with rows = B * Hq * M and S chunks. It need not be cleared.
Error bound: that of `attention.stream`; the merge adds at most S ulp of float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lacache_trt.plugins.attention.stream import normalised
from lacache_trt.plugins.triton_support import (
    POINTER_TYPES,
    Configuration,
    ceil_div,
    dtype_label,
    safe_anchor,
    unspecialised,
)

MAX_CHUNKS = 64
MIN_CHUNK_KEYS = 256
TARGET_PROGRAMS = 512
MERGE_WARPS = {16: 1, MAX_CHUNKS: 4}
"""Warps of a merge by its capacity: with one, a column's chunks are summed in one thread."""


def key_chunks(
    length: int,
    rows: int,
    kv_heads: int,
    tile_rows: int,
    min_keys: int = MIN_CHUNK_KEYS,
    programs: int = TARGET_PROGRAMS,
) -> int:
    """Number of key chunks for `rows` packed query rows per key head.

    About `programs` programs for a batch of one row, none with fewer than `min_keys` keys. The
    batch does not enter, so that a batch equals its rows run alone.
    """
    tiles = ceil_div(rows, tile_rows) * kv_heads
    wanted = min(ceil_div(programs, tiles), ceil_div(length, min_keys))
    return max(1, min(wanted, MAX_CHUNKS - 1))


def chunk_size(length: int, chunks: int) -> int:
    """Keys per chunk, a multiple of 64 so that only the last chunk has a ragged end."""
    return ceil_div(ceil_div(length, chunks), 64) * 64


def workspace_elements(rows: int, chunks: int, head_dim: int) -> int:
    """Float32 elements for `rows` = B * Hq * M query rows in `chunks` partial states."""
    return rows * chunks * (head_dim + 2)


@triton.jit
def store_partial(
    workspace, first_row, row, keep, chunk, chunks, rows, maximum, total, acc, D: tl.constexpr
):
    """Write the state of rows first_row + row for one chunk."""
    slot = (first_row + row) * chunks + chunk
    all_slots = rows * chunks
    offsets = slot[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(workspace + offsets, acc, mask=keep[:, None])
    tl.store(workspace + all_slots * D + slot, maximum, mask=keep)
    tl.store(workspace + all_slots * (D + 1) + slot, total, mask=keep)


@unspecialised("heads", "count", "length", "chunks", "rows")
def attention_merge_kernel(
    workspace, first_columns, out, heads, count, length, chunks, rows,
    D: tl.constexpr, CHUNKS: tl.constexpr, SCATTER: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,). Row (b, h, j) goes to out[b, j] or, with SCATTER, to out[b, first[b] + j].

    `first_columns` is block_columns [B, count]; `length` is the number of rows of `out`.
    """
    row = tl.program_id(0)
    index = row % count
    head = (row // count) % heads
    batch = row // (count * heads)
    target = index
    if SCATTER:
        target = tl.load(first_columns + batch * count) + index

    chunk = tl.arange(0, CHUNKS)
    keep = chunk < chunks
    column = tl.arange(0, D)
    slot = row.to(tl.int64) * chunks + chunk
    all_slots = rows.to(tl.int64) * chunks
    maxima = tl.load(workspace + all_slots * D + slot, mask=keep, other=float("-inf"))
    totals = tl.load(workspace + all_slots * (D + 1) + slot, mask=keep, other=0.0)
    offsets = slot[:, None] * D + column[None, :]
    partial = tl.load(workspace + offsets, mask=keep[:, None], other=0.0)

    factor = tl.exp2(maxima - safe_anchor(tl.max(maxima, 0)))
    total = tl.sum(totals * factor, 0)
    acc = tl.sum(partial * factor[:, None], 0)
    value = acc * tl.where(total > 0.0, 1.0 / total, 0.0)
    position = (batch.to(tl.int64) * length + target) * heads + head
    tl.store(out + position * D + column, value.to(out.dtype.element_ty))


@triton.jit
def store_token_major(out, batch, head, heads, length, row, keep, total, acc, D: tl.constexpr):
    """Normalise the state of rows `row` of one head and write them to out [B, length, Hq * D]."""
    base = batch.to(tl.int64) * length * heads * D + head * D
    offsets = row[:, None].to(tl.int64) * (heads * D) + tl.arange(0, D)[None, :]
    value = normalised(total, acc).to(out.dtype.element_ty)
    tl.store(out + base + offsets, value, mask=keep[:, None])


def launch_merge(
    workspace: Tensor, first_columns: Tensor, out: Tensor, count: int, chunks: int, head_dim: int,
    *, scatter: bool, warps: int | None = None,
) -> None:  # fmt: skip
    """Combine `chunks` partial states of `count` rows per head into `out` [B, N, Hq * d]."""
    capacity = merge_capacity(chunks)
    batch, length, width = out.shape
    heads = width // head_dim
    rows = batch * heads * count
    attention_merge_kernel[(rows,)](
        workspace, first_columns, out, heads, count, length, chunks, rows,
        D=head_dim, CHUNKS=capacity, SCATTER=scatter,
        num_warps=warps or MERGE_WARPS[capacity], num_stages=1,
    )  # fmt: skip


def merge_capacity(chunks: int) -> int:
    """Chunks that one merge instance can combine: a small one and the general one."""
    return 16 if chunks <= 16 else MAX_CHUNKS


def merge_configurations(
    dtype: torch.dtype, head_dim: int, *, scatter: bool
) -> list[Configuration]:
    """The merge instances that ship for a model."""
    arguments = {"workspace": "*fp32", "first_columns": "*i32", "out": POINTER_TYPES[dtype]}
    arguments |= dict.fromkeys(("heads", "count", "length", "chunks", "rows"), "i32")
    kind = "scatter" if scatter else "rows"
    return [
        Configuration(
            name=f"attention_merge.{kind}.d{head_dim}.{dtype_label(dtype)}.c{capacity}",
            kernel=attention_merge_kernel,
            arguments=arguments,
            constants={"D": head_dim, "CHUNKS": capacity, "SCATTER": scatter},
            warps=warps,
            stages=1,
        )
        for capacity, warps in MERGE_WARPS.items()
    ]
