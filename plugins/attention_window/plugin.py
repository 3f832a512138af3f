"""AttentionWindow as a TensorRT plugin: the launch rules of `kernel` over the node's dimensions."""

from __future__ import annotations

import torch

from lacache_trt.plugins.attention.plugin import (
    chunk_size,
    key_chunks,
    merge_launches,
    most_chunks,
    workspace_bytes,
)
from lacache_trt.plugins.attention_window.kernel import (
    CHUNK_PROGRAMS,
    MIN_CHUNK_KEYS,
    SPLIT,
    SPLIT_ROWS,
    TILES,
    configurations,
)
from lacache_trt.plugins.expressions import ceil_div, dimension, minimum, negation
from lacache_trt.plugins.packing import InputRule, LaunchRule, OutputRule, PluginProgram


def plugin_program(dtype: torch.dtype, head_dim: int, sm: int) -> PluginProgram:
    """The op for activations of `dtype` on `sm`."""
    batch, heads, count = (dimension("q_w", axis) for axis in range(3))
    kv_heads, length = dimension("k", 1), dimension("k", 2)
    sizes = {
        "heads": heads,
        "kv_heads": kv_heads,
        "count": count,
        "width": dimension("k_w", 2),
        "length": length,
    }
    packed, rows, tile_rows = heads // kv_heads * count, batch * heads * count, SPLIT[sm].rows
    chunks = key_chunks(length, packed, kv_heads, tile_rows, MIN_CHUNK_KEYS, CHUNK_PROGRAMS)
    chunking = {"chunks": chunks, "chunk_keys": chunk_size(length, chunks), "rows": rows}
    few = count < SPLIT_ROWS + 1
    most = most_chunks(length, kv_heads, MIN_CHUNK_KEYS, CHUNK_PROGRAMS)
    tiled, split, *merges = configurations(dtype, head_dim, sm)
    return PluginProgram(
        op="AttentionWindow",
        inputs=(
            *(InputRule(name, dtype, 4) for name in ("q_w", "k_w", "v_w", "k", "v")),
            InputRule("window_columns", torch.int32, 2),
            *(InputRule(name, torch.int32, 1) for name in ("valid_from", "valid_to")),
        ),
        outputs=(OutputRule("out", dtype, (batch, count, heads * head_dim)),),
        workspace=workspace_bytes(batch * heads * minimum(count, SPLIT_ROWS), most, head_dim),
        launches=(
            LaunchRule(
                tiled,
                (ceil_div(count, TILES[sm].rows), heads, batch),
                sizes,
                condition=negation(few),
            ),
            LaunchRule(
                split,
                (ceil_div(packed, tile_rows) * chunks, kv_heads, batch),
                {**sizes, **chunking},
                condition=few,
            ),
            *merge_launches(
                merges,
                rows=rows,
                scalars={"heads": heads, "count": count, "length": count},
                chunks=chunks,
                first_columns="valid_from",
                condition=few,
            ),
        ),
    )
