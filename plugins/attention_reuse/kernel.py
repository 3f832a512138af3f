"""Triton kernels of AttentionReuse: layer 0's attention of one denoising step, from FACache.

Rows outside the block continue from the cached state over the keys C of the block:
    m' = max(m, max_C s)    out = (e^(m - m') a + sum_C e^(s - m') v) / (e^(m - m') l + sum_C ...)
Rows of the block take their queries from q_c and stream every key: the keys outside the block from
k and v, split into chunks, and the block's own from k_c and v_c as one more chunk; a second kernel
merges the chunks (`attention.split`). The first kernel does both kinds of program in one launch,
the long ones first:
    programs [0, block_tiles * (chunks + 1) * Hkv)     partial states of the block's rows
    the rest                                           output tiles of the other rows
What q, k and v hold at the block's columns dates from the fill: those keys are never read, those
query rows and their (undefined) state are computed and thrown away.

Layout: q_c [B, Hq, Bk, d], k_c and v_c [B, Hkv, Bk, d], q [B, Hq, N, d], k and v [B, Hkv, N, d],
state [B, Hq, N] and [B, Hq, N, d] fp32, out [B, N, Hq * d], all contiguous. The block is a run of
consecutive columns; its first is read from device memory. Each output row is written once.
dtypes: T in, fp32 state, one rounding to T on the way out. A row without any key gives 0.
Error bound against float64: 3 ulp of T of max_j |v_j|.
Bytes: the state and q are read and out is written once, (4 + 2 + 2) * Hq * d per token in bf16,
k and v once: 25 us at N = 2048 for 32 heads of 128 at 4.3 TB/s.
Source: LaCache (arXiv 2607.16339), FACache and tile skipping; Flash-Decoding for the split.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lacache_trt.plugins.attention.split import (
    chunk_size,
    key_chunks,
    launch_merge,
    merge_configurations,
    store_partial,
    store_token_major,
    workspace_elements,
)
from lacache_trt.plugins.attention.stream import empty_state, outside_runs, stream_runs
from lacache_trt.plugins.triton_support import (
    LOG2_E,
    POINTER_TYPES,
    Configuration,
    Tiles,
    ceil_div,
    device_sm,
    dtype_label,
    unspecialised,
)

TILES = {89: Tiles(64, 32, 4, 2), 90: Tiles(64, 32, 4, 2)}
BLOCK_ROWS = 32  # packed query rows of the block per program


@triton.jit
def _block_partial(
    pid, batch, q_c, k_c, v_c, k, v, low, high, block_start, workspace,
    heads, kv_heads, length, block, chunks, chunk_keys, rows,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Partial state of one tile of the block's rows over one chunk of the keys."""
    packed = (heads // kv_heads) * block
    tiles = tl.cdiv(packed, ROWS)
    tile = pid % tiles
    chunk = (pid // tiles) % (chunks + 1)
    kv_row = (batch * kv_heads + pid // (tiles * (chunks + 1))).to(tl.int64)

    row = tile * ROWS + tl.arange(0, ROWS)
    in_range = row < packed
    offsets = row[:, None] * D + tl.arange(0, D)[None, :]
    q_tile = tl.load(q_c + kv_row * packed * D + offsets, mask=in_range[:, None], other=0.0)

    if chunk == chunks:
        k_base = k_c + kv_row * block * D
        v_base = v_c + kv_row * block * D
        a_start = tl.maximum(low - block_start, 0)
        a_count = tl.maximum(tl.minimum(high - block_start, block) - a_start, 0)
        b_start = a_start
        b_count = a_start * 0
    else:
        k_base = k + kv_row * length * D
        v_base = v + kv_row * length * D
        a_start, a_count, b_start, b_count = outside_runs(
            tl.maximum(low, chunk * chunk_keys),
            tl.minimum(high, (chunk + 1) * chunk_keys),
            block_start,
            block_start + block,
        )
    maximum, total, acc = empty_state(ROWS, D)
    maximum, total, acc = stream_runs(
        q_tile, k_base, v_base, a_start, a_count, b_start, b_count,
        maximum, total, acc, D, KEYS, SCALE,
    )  # fmt: skip
    store_partial(
        workspace, kv_row * packed, row, in_range, chunk, chunks + 1, rows.to(tl.int64),
        maximum, total, acc, D,
    )  # fmt: skip


@triton.jit
def _outer_rows(
    pid, batch, q, k_c, v_c, fa_max, fa_sum, fa_acc, low, high, block_start, out,
    heads, kv_heads, length, block,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """One tile of output rows outside the block, continued from the cached state."""
    tiles = tl.cdiv(length, ROWS)
    head = pid // tiles
    kv_row = (batch * kv_heads + head // (heads // kv_heads)).to(tl.int64)
    head_row = (batch * heads + head).to(tl.int64) * length

    row = (pid % tiles) * ROWS + tl.arange(0, ROWS)
    in_range = row < length
    offsets = row[:, None] * D + tl.arange(0, D)[None, :]
    q_tile = tl.load(q + head_row * D + offsets, mask=in_range[:, None], other=0.0)
    maximum = tl.load(fa_max + head_row + row, mask=in_range, other=0.0) * 1.4426950408889634
    total = tl.load(fa_sum + head_row + row, mask=in_range, other=0.0)
    acc = tl.load(fa_acc + head_row * D + offsets, mask=in_range[:, None], other=0.0)

    start = tl.maximum(low - block_start, 0)
    keys = tl.maximum(tl.minimum(high - block_start, block) - start, 0)
    maximum, total, acc = stream_runs(
        q_tile, k_c + kv_row * block * D, v_c + kv_row * block * D, start, keys, start, 0,
        maximum, total, acc, D, KEYS, SCALE,
    )  # fmt: skip
    keep = in_range & ((row < block_start) | (row >= block_start + block))
    store_token_major(out, batch, head, heads, length, row, keep, total, acc, D)


@unspecialised("heads", "kv_heads", "length", "block", "chunks", "chunk_keys", "rows")
def attention_reuse_kernel(
    q_c, k_c, v_c, q, k, v, fa_max, fa_sum, fa_acc, valid_from, valid_to, block_columns,
    workspace, out, heads, kv_heads, length, block, chunks, chunk_keys, rows,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Grid: (block programs + outer programs, B). `chunks` does not count the block's own keys."""
    pid = tl.program_id(0)
    batch = tl.program_id(1)
    low = tl.load(valid_from + batch)
    high = tl.load(valid_to + batch)
    block_start = tl.load(block_columns + batch * block)
    packed = (heads // kv_heads) * block
    block_programs = tl.cdiv(packed, BLOCK_ROWS) * (chunks + 1) * kv_heads
    if pid < block_programs:
        _block_partial(
            pid, batch, q_c, k_c, v_c, k, v, low, high, block_start, workspace,
            heads, kv_heads, length, block, chunks, chunk_keys, rows,
            D, BLOCK_ROWS, BLOCK_KEYS, SCALE,
        )  # fmt: skip
    else:
        _outer_rows(
            pid - block_programs, batch, q, k_c, v_c, fa_max, fa_sum, fa_acc, low, high,
            block_start, out, heads, kv_heads, length, block, D, ROWS, KEYS, SCALE,
        )  # fmt: skip


def chunks_for(length: int, block: int, heads: int, kv_heads: int, block_rows: int) -> int:
    """Chunks of the keys outside the block for the block's rows."""
    return key_chunks(length, heads // kv_heads * block, kv_heads, block_rows)


def workspace_size(
    batch: int, heads: int, kv_heads: int, length: int, block: int, head_dim: int
) -> int:
    """Float32 elements of workspace that `launch` needs."""
    chunks = chunks_for(length, block, heads, kv_heads, BLOCK_ROWS)
    return workspace_elements(batch * heads * block, chunks + 1, head_dim)


def launch(
    q_c: Tensor,
    k_c: Tensor,
    v_c: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fa_max: Tensor,
    fa_sum: Tensor,
    fa_acc: Tensor,
    valid_from: Tensor,
    valid_to: Tensor,
    block_columns: Tensor,
    workspace: Tensor,
    out: Tensor,
    tiles: Tiles | None = None,
    block_keys: int = 64,
) -> None:
    """Write `out` [B, N, Hq * d]. `workspace`: float32 of `workspace_size` elements."""
    batch, heads, length, head_dim = q.shape
    kv_heads, block = k.shape[1], q_c.shape[2]
    tiles = tiles or TILES[90 if device_sm(q) == 90 else 89]
    chunks = chunks_for(length, block, heads, kv_heads, BLOCK_ROWS)
    block_tiles = ceil_div(heads // kv_heads * block, BLOCK_ROWS)
    programs = block_tiles * (chunks + 1) * kv_heads + ceil_div(length, tiles.rows) * heads
    attention_reuse_kernel[(programs, batch)](
        q_c, k_c, v_c, q, k, v, fa_max, fa_sum, fa_acc, valid_from, valid_to, block_columns,
        workspace, out, heads, kv_heads, length, block, chunks, chunk_size(length, chunks),
        batch * heads * block,
        D=head_dim, ROWS=tiles.rows, KEYS=tiles.keys, BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_KEYS=block_keys, SCALE=head_dim**-0.5 * LOG2_E,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    launch_merge(workspace, block_columns, out, block, chunks + 1, head_dim, scatter=True)


def configurations(dtype: torch.dtype, head_dim: int, sm: int) -> list[Configuration]:
    """The instances that ship for a model on an SM."""
    pointer = POINTER_TYPES[dtype]
    arguments = dict.fromkeys(("q_c", "k_c", "v_c", "q", "k", "v"), pointer)
    arguments |= dict.fromkeys(("fa_max", "fa_sum", "fa_acc"), "*fp32")
    arguments |= dict.fromkeys(("valid_from", "valid_to", "block_columns"), "*i32")
    arguments |= {"workspace": "*fp32", "out": pointer}
    scalars = ("heads", "kv_heads", "length", "block", "chunks", "chunk_keys", "rows")
    arguments |= dict.fromkeys(scalars, "i32")
    tiles = TILES[sm]
    first = Configuration(
        name=f"attention_reuse.d{head_dim}.{dtype_label(dtype)}.{tiles.label}",
        kernel=attention_reuse_kernel,
        arguments=arguments,
        constants={
            "D": head_dim,
            "ROWS": tiles.rows,
            "KEYS": tiles.keys,
            "BLOCK_ROWS": BLOCK_ROWS,
            "BLOCK_KEYS": 64,
            "SCALE": head_dim**-0.5 * LOG2_E,
        },
        warps=tiles.warps,
        stages=tiles.stages,
    )
    return [first, *merge_configurations(dtype, head_dim, scatter=True)]
