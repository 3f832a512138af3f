"""AttentionReuse as a TensorRT plugin: the launch rules of `kernel` over the node's dimensions."""

from __future__ import annotations

import torch

from lacache_trt.plugins.attention.plugin import (
    chunk_size,
    key_chunks,
    merge_launches,
    most_chunks,
    workspace_bytes,
)
from lacache_trt.plugins.attention_reuse.kernel import BLOCK_ROWS, TILES, configurations
from lacache_trt.plugins.expressions import ceil_div, constant, dimension
from lacache_trt.plugins.packing import InputRule, LaunchRule, OutputRule, PluginProgram


def plugin_program(dtype: torch.dtype, head_dim: int, sm: int) -> PluginProgram:
    """The op for activations of `dtype` on `sm`."""
    batch, heads, length = (dimension("q", axis) for axis in range(3))
    kv_heads, block = dimension("k", 1), dimension("q_c", 2)
    rows = batch * heads * block
    packed = heads // kv_heads * block
    chunks = key_chunks(length, packed, kv_heads, BLOCK_ROWS)
    block_programs = ceil_div(packed, BLOCK_ROWS) * (chunks + 1) * kv_heads
    programs = block_programs + ceil_div(length, TILES[sm].rows) * heads
    first, *merges = configurations(dtype, head_dim, sm)
    scalars = {
        "heads": heads,
        "kv_heads": kv_heads,
        "length": length,
        "block": block,
        "chunks": chunks,
        "chunk_keys": chunk_size(length, chunks),
        "rows": rows,
    }
    return PluginProgram(
        op="AttentionReuse",
        inputs=(
            *(InputRule(name, dtype, 4) for name in ("q_c", "k_c", "v_c", "q", "k", "v")),
            *(InputRule(name, torch.float32, 3) for name in ("fa_max", "fa_sum")),
            InputRule("fa_acc", torch.float32, 4),
            *(InputRule(name, torch.int32, 1) for name in ("valid_from", "valid_to")),
            InputRule("block_columns", torch.int32, 2),
        ),
        outputs=(OutputRule("out", dtype, (batch, length, heads * head_dim)),),
        workspace=workspace_bytes(rows, most_chunks(length, kv_heads) + 1, head_dim),
        launches=(
            LaunchRule(first, (programs, batch, constant(1)), scalars),
            *merge_launches(
                merges,
                rows=rows,
                scalars={"heads": heads, "count": block, "length": length},
                chunks=chunks + 1,
                first_columns="block_columns",
                condition=constant(1),
            ),
        ),
    )
