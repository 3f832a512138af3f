"""Triton kernels of AttentionWindow: a window's rows on cached keys and on the window's own.

    out[b, i, h] = sum_j softmax_j(q_i . k_j / sqrt(d)) v_j   over valid_from[b] <= j < valid_to[b]
A program streams a run of columns in their order and takes each key from the cache or from the
window, so that a window of any width is spread over the chunks as its columns are. Two ways, chosen
by the number M of query rows and not by the batch:
    - tiled (M > 64): one program per tile of query rows of a head streams all columns;
    - split (M <= 64): programs stream chunks of the columns and a second kernel merges them
      (`attention.split`); needs a workspace.

Layout: q [B, Hq, M, d], k_w and v_w [B, Hkv, W, d], k and v [B, Hkv, N, d], out [B, M, Hq * d]
token-major, all contiguous. window_columns [B, W] int32: a run of columns, then pads of -1; read
from device memory, so one captured graph serves every window of its width.
dtypes: T in, fp32 state, one rounding to T on the way out. A row without valid keys gives 0.
Error bound against float64: 3 ulp of T of max_j |v_j|.
Bytes at W = M = 32: k and v once, 2 * N * Hkv * d * size(T) a layer.
Source: FlashAttention-2 (Dao 2023), Flash-Decoding for the split.
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
from lacache_trt.plugins.attention.stream import empty_state, stream_constants
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
SPLIT = {89: Tiles(32, 32, 4, 2), 90: Tiles(32, 64, 4, 3)}
SPLIT_ROWS = 64  # up to this many query rows the keys are split
MIN_CHUNK_KEYS = 128
CHUNK_PROGRAMS = 256
"""Two programs for each multiprocessor of an H100 or H200: more would run in a second wave."""


@triton.jit
def window_run(window_columns, batch, width):
    """(first column, one past the last) of a row's window, its pads left out."""
    base = window_columns + batch.to(tl.int64) * width
    start = tl.load(base)
    last = tl.load(base + width - 1)
    if last < 0:
        last = start
        slot = tl.arange(0, 128)
        for first in range(0, width, 128):
            columns = tl.load(base + first + slot, mask=first + slot < width, other=-1)
            last = tl.maximum(last, tl.max(columns, 0))
    return start, last + 1


@triton.jit
def _stream_window(
    q_tile, k_w, v_w, k, v, low, high, start, stop, D: tl.constexpr, KEYS: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """State over the columns [low, high): cached outside [start, stop), fresh inside.

    One pass in the order of the columns: each row of a tile has its own base pointer, so a window
    costs no tile of its own and what the cache holds there is not read.
    """
    maximum, total, acc = empty_state(q_tile.shape[0], D)
    element = tl.arange(0, D)[None, :]
    for first in range(low, high, KEYS):
        column = first + tl.arange(0, KEYS)
        keep = column < high
        own = (column >= start) & (column < stop)
        fresh = (column - start) * D
        cached = column * D
        keys = tl.where(own, k_w + fresh, k + cached)
        tile = tl.load(keys[:, None] + element, mask=keep[:, None], other=0.0)
        scores = tl.dot(q_tile, tl.trans(tile), input_precision="ieee")
        scores = tl.where(keep[None, :], scores * SCALE, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        decay = tl.exp2(maximum - new_maximum)
        values = tl.where(own, v_w + fresh, v + cached)
        tile = tl.load(values[:, None] + element, mask=keep[:, None], other=0.0)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(tile.dtype), tile, acc, input_precision="ieee")
        maximum = new_maximum
    return maximum, total, acc


@unspecialised("heads", "kv_heads", "count", "width", "length")
def attention_window_kernel(
    q_w, k_w, v_w, k, v, window_columns, valid_from, valid_to, out,
    heads, kv_heads, count, width, length,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Grid: (query tiles, Hq, B)."""
    head = tl.program_id(1)
    batch = tl.program_id(2)
    kv_row = (batch * kv_heads + head // (heads // kv_heads)).to(tl.int64)
    q_base = (batch * heads + head).to(tl.int64) * count * D

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_range = row < count
    offsets = row[:, None] * D + tl.arange(0, D)[None, :]
    q_tile = tl.load(q_w + q_base + offsets, mask=in_range[:, None], other=0.0)

    start, stop = window_run(window_columns, batch, width)
    _, total, acc = _stream_window(
        q_tile, k_w + kv_row * width * D, v_w + kv_row * width * D,
        k + kv_row * length * D, v + kv_row * length * D,
        tl.load(valid_from + batch), tl.load(valid_to + batch), start, stop, D, KEYS, SCALE,
    )  # fmt: skip
    store_token_major(out, batch, head, heads, count, row, in_range, total, acc, D)


@unspecialised("heads", "kv_heads", "count", "width", "length", "chunks", "chunk_keys", "rows")
def attention_window_split_kernel(
    q_w, k_w, v_w, k, v, window_columns, valid_from, valid_to, workspace,
    heads, kv_heads, count, width, length, chunks, chunk_keys, rows,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Grid: (packed query tiles * chunks, Hkv, B)."""
    chunk = tl.program_id(0) % chunks
    tile = tl.program_id(0) // chunks
    batch = tl.program_id(2)
    kv_row = (batch * kv_heads + tl.program_id(1)).to(tl.int64)
    packed = (heads // kv_heads) * count

    row = tile * ROWS + tl.arange(0, ROWS)
    in_range = row < packed
    offsets = row[:, None] * D + tl.arange(0, D)[None, :]
    q_tile = tl.load(q_w + kv_row * packed * D + offsets, mask=in_range[:, None], other=0.0)

    start, stop = window_run(window_columns, batch, width)
    low = tl.maximum(tl.load(valid_from + batch), chunk * chunk_keys)
    high = tl.minimum(tl.load(valid_to + batch), (chunk + 1) * chunk_keys)
    maximum, total, acc = _stream_window(
        q_tile, k_w + kv_row * width * D, v_w + kv_row * width * D,
        k + kv_row * length * D, v + kv_row * length * D,
        low, high, start, stop, D, KEYS, SCALE,
    )  # fmt: skip
    store_partial(
        workspace, kv_row * packed, row, in_range, chunk, chunks, rows.to(tl.int64),
        maximum, total, acc, D,
    )  # fmt: skip


def chunks_for(
    count: int,
    length: int,
    heads: int,
    kv_heads: int,
    tile_rows: int,
    min_keys: int = MIN_CHUNK_KEYS,
) -> int:
    """Column chunks of the split way."""
    packed = heads // kv_heads * count
    return key_chunks(length, packed, kv_heads, tile_rows, min_keys, CHUNK_PROGRAMS)


def workspace_size(
    batch: int, heads: int, kv_heads: int, count: int, length: int, head_dim: int
) -> int:
    """Float32 elements of workspace that `launch` needs; 0 for the tiled way."""
    if count > SPLIT_ROWS:
        return 0
    chunks = chunks_for(count, length, heads, kv_heads, SPLIT[90].rows)
    return workspace_elements(batch * heads * count, chunks, head_dim)


def launch(
    q_w: Tensor,
    k_w: Tensor,
    v_w: Tensor,
    k: Tensor,
    v: Tensor,
    window_columns: Tensor,
    valid_from: Tensor,
    valid_to: Tensor,
    workspace: Tensor | None,
    out: Tensor,
    tiles: Tiles | None = None,
    min_keys: int = MIN_CHUNK_KEYS,
    merge_warps: int | None = None,
) -> None:
    """Write `out` [B, M, Hq * d]. `workspace`: float32 of `workspace_size` elements or None.

    Benchmarks and tests set the last three; with `tiles` a workspace alone decides for the split.
    """
    batch, heads, count, head_dim = q_w.shape
    kv_heads, length = k.shape[1], k.shape[2]
    sm = 90 if device_sm(q_w) == 90 else 89
    inputs = (q_w, k_w, v_w, k, v, window_columns, valid_from, valid_to)
    sizes = (heads, kv_heads, count, window_columns.shape[1], length)
    if workspace is None or (tiles is None and count > SPLIT_ROWS):
        tiles = tiles or TILES[sm]
        attention_window_kernel[(ceil_div(count, tiles.rows), heads, batch)](
            *inputs, out, *sizes,
            **stream_constants(tiles, head_dim), num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        return
    tiles = tiles or SPLIT[sm]
    chunks = chunks_for(count, length, heads, kv_heads, tiles.rows, min_keys)
    query_tiles = ceil_div(heads // kv_heads * count, tiles.rows)
    attention_window_split_kernel[(query_tiles * chunks, kv_heads, batch)](
        *inputs, workspace, *sizes, chunks, chunk_size(length, chunks), batch * heads * count,
        **stream_constants(tiles, head_dim), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    launch_merge(
        workspace, valid_from, out, count, chunks, head_dim, scatter=False, warps=merge_warps
    )


def configurations(dtype: torch.dtype, head_dim: int, sm: int) -> list[Configuration]:
    """The instances that ship for a model on an SM."""
    pointer = POINTER_TYPES[dtype]
    inputs = dict.fromkeys(("q_w", "k_w", "v_w", "k", "v"), pointer)
    inputs |= dict.fromkeys(("window_columns", "valid_from", "valid_to"), "*i32")
    shape = dict.fromkeys(("heads", "kv_heads", "count", "width", "length"), "i32")
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
        instance("attention_window", attention_window_kernel, TILES[sm], tiled),
        instance("attention_window_split", attention_window_split_kernel, SPLIT[sm], split),
        *merge_configurations(dtype, head_dim, scatter=False),
    ]
