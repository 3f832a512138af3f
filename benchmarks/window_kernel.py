"""Parts of a window step alone: AttentionWindow, the cache write, and the linears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

import torch
from kernel_timing import Bench, rotations
from torch import Tensor

from lacache_trt.engines.cuda.capture import capture, replay_milliseconds
from lacache_trt.engines.cuda.floor import floor_calls
from lacache_trt.engines.cuda.fp8 import Fp8Table
from lacache_trt.engines.cuda.gemm import GemmTable
from lacache_trt.model.config import ModelConfig
from lacache_trt.plugins.attention_window import kernel
from lacache_trt.plugins.triton_support import Tiles
from lacache_trt.plugins.window_write import kernel as write

SPLIT_TILES = (
    kernel.SPLIT[90],
    Tiles(32, 64, 4, 2),
    Tiles(32, 32, 4, 3),
    Tiles(32, 32, 4, 4),
    Tiles(32, 128, 4, 2),
    Tiles(32, 64, 2, 3),
    Tiles(16, 64, 4, 3),
    Tiles(16, 64, 2, 3),
    Tiles(64, 64, 4, 3),
)
TILED_TILES = (kernel.TILES[90], Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 3))


def bench_kernels(config: ModelConfig, lengths: Sequence[int], widths: Sequence[int]) -> Bench:
    """Every tiling at every length and width."""
    bench = Bench(set())
    for length in lengths:
        for width in widths:
            bench_window(bench, config, length, width)
        bench_write(bench, config, length, widths[0])
    return bench


def default_times(bench: Bench) -> dict[str, float]:
    """Microseconds of the tilings that ship, as metrics."""
    found = {}
    for row in bench.rows:
        default = kernel.SPLIT[90] if row.shape.endswith("W32") else kernel.TILES[90]
        if row.configuration in (default.label, "default"):
            name = f"{row.op}.{row.shape.replace(' ', '.')}".lower()
            found[f"h200.kernel.{name}.us"] = row.microseconds
    return found


def bench_window(bench: Bench, config: ModelConfig, length: int, width: int) -> None:
    """The attention of a window at the end of the canvas, in bf16."""
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    moved = 2.0 * length * kv_heads * head_dim * 2
    flops = 4.0 * width * length * heads * head_dim

    def draw(count: int, rows: int) -> Tensor:
        return torch.randn(1, count, rows, head_dim, device="cuda", dtype=torch.bfloat16)

    sets = [(draw(kv_heads, length), draw(kv_heads, length)) for _ in range(rotations(int(moved)))]
    q, k_w, v_w = draw(heads, width), draw(kv_heads, width), draw(kv_heads, width)
    columns = torch.arange(length - width, length, dtype=torch.int32, device="cuda")[None]
    ranges = [torch.full((1,), edge, dtype=torch.int32, device="cuda") for edge in (0, length)]
    out = q.new_empty(1, width, heads * head_dim)
    split = width <= kernel.SPLIT_ROWS
    # Fewer rows to a tile make more tiles and never more chunks than one row to a tile would.
    chunks = kernel.chunks_for(width, length, heads, kv_heads, 1 << 16)
    elements = 4 * heads * width * max(chunks, 64) * (head_dim + 2)
    workspace = torch.empty(elements, device="cuda") if split else None
    for tiles in SPLIT_TILES if split else TILED_TILES:
        calls = [
            partial(kernel.launch, q, k_w, v_w, *pair, columns, *ranges, workspace, out, tiles)
            for pair in sets
        ]
        bench.time("AttentionWindow", f"N{length} W{width}", tiles.label, calls, flops, moved)


def bench_write(bench: Bench, config: ModelConfig, length: int, width: int) -> None:
    """All layers of one window into the cache."""
    shape = (config.num_layers, 1, config.num_kv_heads)
    kept = [
        torch.zeros(*shape, length, config.head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    ]
    fresh = [
        torch.randn(*shape, width, config.head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    ]
    columns = torch.arange(length - width, length, dtype=torch.int32, device="cuda")[None]
    call = partial(write.launch, *fresh, columns, *kept)
    moved = 4.0 * fresh[0].numel() * 2
    bench.time("window_write", f"N{length} W{width}", "default", [call] * 4, 0.0, moved)


def linears_milliseconds(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    gemms: GemmTable,
    fp8_gemms: Fp8Table,
    rows: int,
    repeats: int,
) -> tuple[float, int]:
    """Device time of every linear of the model on `rows` rows in one graph; bytes of weights."""
    calls = floor_calls(
        config,
        weights,
        gemms,
        1,
        rows,
        rows,
        full_first_layer=True,
        fp8_gemms=fp8_gemms,
        attention=False,
    )
    stream = torch.cuda.Stream()
    milliseconds = median(replay_milliseconds(capture(calls, stream), stream, repeats))
    read = [tensor for name, tensor in weights.items() if name != "embed.weight"]
    return milliseconds, sum(tensor.numel() * tensor.element_size() for tensor in read)
