"""Attention as a TensorRT plugin: the launch rules of `kernel` over the node's dimensions."""

from __future__ import annotations

import torch

from lacache_trt.plugins.attention.kernel import SPLIT, SPLIT_ROWS, TILES, configurations
from lacache_trt.plugins.attention.split import MAX_CHUNKS, MIN_CHUNK_KEYS, TARGET_PROGRAMS
from lacache_trt.plugins.expressions import (
    Expression,
    ceil_div,
    constant,
    dimension,
    maximum,
    minimum,
    negation,
)
from lacache_trt.plugins.packing import InputRule, LaunchRule, OutputRule, PluginProgram
from lacache_trt.plugins.triton_support import Configuration

FLOAT_BYTES = 4
SMALL_MERGE = 16


def plugin_program(dtype: torch.dtype, head_dim: int, sm: int) -> PluginProgram:
    """The op for activations of `dtype` on `sm`."""
    batch, heads, count = (dimension("q", axis) for axis in range(3))
    tiled, *split = configurations(dtype, head_dim, sm)
    few_rows = batch * heads * minimum(count, SPLIT_ROWS)
    most = most_chunks(dimension("k", 2), dimension("k", 1))
    return PluginProgram(
        op="Attention",
        inputs=(
            *(InputRule(name, dtype, 4) for name in ("q", "k", "v")),
            *(InputRule(name, torch.int32, 1) for name in ("valid_from", "valid_to")),
        ),
        outputs=(OutputRule("out", dtype, (batch, count, heads * head_dim)),),
        workspace=workspace_bytes(few_rows, most, head_dim),
        launches=(
            LaunchRule(
                tiled,
                (ceil_div(count, TILES[sm].rows), heads, batch),
                _shape_scalars(),
                condition=negation(count < SPLIT_ROWS + 1),
            ),
            *_split_launches(split, SPLIT[sm].rows),
        ),
    )


def _shape_scalars() -> dict[str, Expression]:
    return {
        "heads": dimension("q", 1),
        "kv_heads": dimension("k", 1),
        "count": dimension("q", 2),
        "length": dimension("k", 2),
    }


def _split_launches(configurations: list[Configuration], tile_rows: int) -> tuple[LaunchRule, ...]:
    """`kernel._launch_split`."""
    first, *merges = configurations
    scalars = _shape_scalars()
    heads, kv_heads, count, length = scalars.values()
    batch, packed = dimension("q", 0), heads // kv_heads * count
    rows = batch * heads * count
    chunks = key_chunks(length, packed, kv_heads, tile_rows)
    chunking = {"chunks": chunks, "chunk_keys": chunk_size(length, chunks), "rows": rows}
    few = count < SPLIT_ROWS + 1
    grid = (ceil_div(packed, tile_rows) * chunks, kv_heads, batch)
    return (
        LaunchRule(first, grid, scalars | chunking, condition=few),
        *merge_launches(
            merges,
            rows=rows,
            scalars={"heads": heads, "count": count, "length": count},
            chunks=chunks,
            first_columns="valid_from",
            condition=few,
        ),
    )


def key_chunks(
    length: Expression,
    rows: Expression,
    kv_heads: Expression,
    tile_rows: int,
    min_keys: int = MIN_CHUNK_KEYS,
    programs: int = TARGET_PROGRAMS,
) -> Expression:
    """`split.key_chunks`."""
    tiles = ceil_div(rows, tile_rows) * kv_heads
    wanted = minimum(ceil_div(programs, tiles), ceil_div(length, min_keys))
    return maximum(1, minimum(wanted, MAX_CHUNKS - 1))


def most_chunks(
    length: Expression,
    kv_heads: Expression,
    min_keys: int = MIN_CHUNK_KEYS,
    programs: int = TARGET_PROGRAMS,
) -> Expression:
    """The most that `key_chunks` gives for any number of rows; grows with the length."""
    return key_chunks(length, constant(1), kv_heads, 1, min_keys, programs)


def chunk_size(length: Expression, chunks: Expression) -> Expression:
    """`split.chunk_size`."""
    return ceil_div(ceil_div(length, chunks), 64) * 64


def workspace_bytes(rows: Expression, chunks: Expression, head_dim: int) -> Expression:
    """`split.workspace_elements` in bytes."""
    return rows * chunks * ((head_dim + 2) * FLOAT_BYTES)


def merge_launches(
    merges: list[Configuration],
    *,
    rows: Expression,
    scalars: dict[str, Expression],
    chunks: Expression,
    first_columns: str,
    condition: Expression,
) -> tuple[LaunchRule, ...]:
    """`split.launch_merge`: the small instance or the general one."""
    small, general = merges
    fits = chunks < SMALL_MERGE + 1
    arguments = {**scalars, "chunks": chunks, "rows": rows}
    grid = (rows, constant(1), constant(1))
    tensors = {"first_columns": first_columns}
    return (
        LaunchRule(small, grid, arguments, tensors, condition * fits),
        LaunchRule(general, grid, arguments, tensors, condition * negation(fits)),
    )
