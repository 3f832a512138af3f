"""Triton kernels of Attention: bidirectional attention with a valid key range per batch row.

    out[b, i, h] = sum_j softmax_j(q_i . k_j / sqrt(d)) v_j   over valid_from[b] <= j < valid_to[b]
Two ways, chosen by the number M of query rows and not by the batch:
    - tiled (M > 64): one program per tile of query rows of a head streams the keys
      (`attention.stream`), reading only the valid range: left padding costs nothing;
    - split (M <= 64, the last layer's rows): programs stream chunks of the keys and a second
      kernel merges them (`attention.split`); needs a workspace.

Layout: q [B, Hq, M, d], k and v [B, Hkv, N, d], out [B, M, Hq * d] token-major, all contiguous.
dtypes: T in, fp32 state, one rounding to T on the way out. A row without valid keys gives 0.
Error bound against float64: 3 ulp of T of max_j |v_j|.
Source: FlashAttention-2 (Dao 2023).
"""

from __future__ import annotations

import torch
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
from lacache_trt.plugins.attention.stream import (
    empty_state,
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
SPLIT = {89: Tiles(64, 32, 4, 2), 90: Tiles(64, 64, 4, 3)}
SPLIT_ROWS = 64  # up to this many query rows the keys are split


@unspecialised("heads", "kv_heads", "count", "length")
def attention_kernel(
    q, k, v, valid_from, valid_to, out, heads, kv_heads, count, length,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Grid: (query tiles, Hq, B)."""
    head = tl.program_id(1)
    batch = tl.program_id(2)
    kv_head = head // (heads // kv_heads)
    q_base = (batch * heads + head).to(tl.int64) * count * D
    kv_base = (batch * kv_heads + kv_head).to(tl.int64) * length * D

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_range = row < count
    offsets = row[:, None] * D + tl.arange(0, D)[None, :]
    q_tile = tl.load(q + q_base + offsets, mask=in_range[:, None], other=0.0)

    low = tl.load(valid_from + batch)
    keys = tl.maximum(tl.load(valid_to + batch) - low, 0)
    maximum, total, acc = empty_state(ROWS, D)
    maximum, total, acc = stream_runs(
        q_tile, k + kv_base, v + kv_base, low, keys, low, 0, maximum, total, acc, D, KEYS, SCALE,
    )  # fmt: skip
    store_token_major(out, batch, head, heads, count, row, in_range, total, acc, D)


@unspecialised("heads", "kv_heads", "count", "length", "chunks", "chunk_keys", "rows")
def attention_split_kernel(
    q, k, v, valid_from, valid_to, workspace,
    heads, kv_heads, count, length, chunks, chunk_keys, rows,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Grid: (packed query tiles * chunks, Hkv, B)."""
    chunk = tl.program_id(0) % chunks
    tile = tl.program_id(0) // chunks
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    packed = (heads // kv_heads) * count
    first_row = (batch * kv_heads + kv_head).to(tl.int64) * packed
    kv_base = (batch * kv_heads + kv_head).to(tl.int64) * length * D

    row = tile * ROWS + tl.arange(0, ROWS)
    in_range = row < packed
    offsets = row[:, None] * D + tl.arange(0, D)[None, :]
    q_tile = tl.load(q + first_row * D + offsets, mask=in_range[:, None], other=0.0)

    low = tl.maximum(tl.load(valid_from + batch), chunk * chunk_keys)
    high = tl.minimum(tl.load(valid_to + batch), (chunk + 1) * chunk_keys)
    keys = tl.maximum(high - low, 0)
    maximum, total, acc = empty_state(ROWS, D)
    maximum, total, acc = stream_runs(
        q_tile, k + kv_base, v + kv_base, low, keys, low, 0, maximum, total, acc, D, KEYS, SCALE,
    )  # fmt: skip
    store_partial(
        workspace, first_row, row, in_range, chunk, chunks, rows.to(tl.int64),
        maximum, total, acc, D,
    )  # fmt: skip


def chunks_for(count: int, length: int, heads: int, kv_heads: int, tile_rows: int) -> int:
    """Key chunks of the split way."""
    return key_chunks(length, heads // kv_heads * count, kv_heads, tile_rows)


def workspace_size(
    batch: int, heads: int, kv_heads: int, count: int, length: int, head_dim: int
) -> int:
    """Float32 elements of workspace that `launch` needs; 0 for the tiled way."""
    if count > SPLIT_ROWS:
        return 0
    chunks = chunks_for(count, length, heads, kv_heads, SPLIT[90].rows)
    return workspace_elements(batch * heads * count, chunks, head_dim)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid_from: Tensor,
    valid_to: Tensor,
    workspace: Tensor | None,
    out: Tensor,
    tiles: Tiles | None = None,
) -> None:
    """Write `out` [B, M, Hq * d]. `workspace`: float32 of `workspace_size` elements or None."""
    count = q.shape[2]
    if count <= SPLIT_ROWS and workspace is not None:
        _launch_split(q, k, v, valid_from, valid_to, workspace, out, tiles)
        return
    batch, heads, _, head_dim = q.shape
    tiles = tiles or TILES[90 if device_sm(q) == 90 else 89]
    attention_kernel[(ceil_div(count, tiles.rows), heads, batch)](
        q, k, v, valid_from, valid_to, out, heads, k.shape[1], count, k.shape[2],
        **stream_constants(tiles, head_dim), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def _launch_split(
    q: Tensor, k: Tensor, v: Tensor, valid_from: Tensor, valid_to: Tensor, workspace: Tensor,
    out: Tensor, tiles: Tiles | None,
) -> None:  # fmt: skip
    batch, heads, count, head_dim = q.shape
    kv_heads, length = k.shape[1], k.shape[2]
    tiles = tiles or SPLIT[90 if device_sm(q) == 90 else 89]
    chunks = chunks_for(count, length, heads, kv_heads, tiles.rows)
    query_tiles = ceil_div(heads // kv_heads * count, tiles.rows)
    attention_split_kernel[(query_tiles * chunks, kv_heads, batch)](
        q, k, v, valid_from, valid_to, workspace,
        heads, kv_heads, count, length, chunks, chunk_size(length, chunks), batch * heads * count,
        **stream_constants(tiles, head_dim), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    launch_merge(workspace, valid_from, out, count, chunks, head_dim, scatter=False)


def configurations(dtype: torch.dtype, head_dim: int, sm: int) -> list[Configuration]:
    """The instances that ship for a model on an SM."""
    pointer = POINTER_TYPES[dtype]
    inputs = dict.fromkeys(("q", "k", "v"), pointer)
    inputs |= dict.fromkeys(("valid_from", "valid_to"), "*i32")
    shape = dict.fromkeys(("heads", "kv_heads", "count", "length"), "i32")
    chunking = dict.fromkeys(("chunks", "chunk_keys", "rows"), "i32")

    def instance(
        name: str, kernel: object, tiles: Tiles, arguments: dict[str, str]
    ) -> Configuration:
        return Configuration(
            name=f"{name}.d{head_dim}.{dtype_label(dtype)}.{tiles.label}",
            kernel=kernel,
            arguments=arguments,
            constants=stream_constants(tiles, head_dim),
            warps=tiles.warps,
            stages=tiles.stages,
        )

    tiled = inputs | {"out": pointer} | shape
    split = inputs | {"workspace": "*fp32"} | shape | chunking
    return [
        instance("attention", attention_kernel, TILES[sm], tiled),
        instance("attention_split", attention_split_kernel, SPLIT[sm], split),
        *merge_configurations(dtype, head_dim, scatter=False),
    ]
