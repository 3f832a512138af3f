"""Parts of a window step alone: AttentionWindow, RoPE, the cache write, and the linears."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from kernel_timing import Bench, rotations
from llada_shape import BLOCK
from torch import Tensor

from lacache_trt.engines.cuda.capture import capture, replay_milliseconds
from lacache_trt.engines.cuda.floor import floor_calls
from lacache_trt.engines.cuda.fp8 import Fp8Table
from lacache_trt.engines.cuda.gemm import GemmTable
from lacache_trt.engines.cuda.session import CudaSession
from lacache_trt.model.config import ModelConfig
from lacache_trt.plugins.attention.split import MAX_CHUNKS
from lacache_trt.plugins.attention_window import kernel
from lacache_trt.plugins.rope import kernel as rope
from lacache_trt.plugins.triton_support import Tiles
from lacache_trt.plugins.window_write import kernel as write

SPLIT_TILES = (
    kernel.SPLIT[90],
    Tiles(32, 64, 4, 2),
    Tiles(32, 32, 4, 3),
    Tiles(32, 64, 2, 2),
    Tiles(32, 64, 8, 2),
    Tiles(32, 128, 4, 1),
    Tiles(32, 128, 8, 1),
    Tiles(16, 64, 4, 2),
    Tiles(64, 64, 4, 2),
)
WIDE_TILES = (kernel.SPLIT[90], Tiles(64, 64, 4, 2))  # split, where it competes with tiled
TILED_TILES = (kernel.TILES[90], Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 3))
CHUNK_KEYS = (64, 128, 256)
MERGE_WARPS = (1, 2, 4)
ROPE_GRIDS = (
    rope.FEW,
    rope.MANY,
    rope.Grid(8, 2, 2),
    rope.Grid(8, 1, 4),
    rope.Grid(16, 1, 4),
    rope.Grid(32, 1, 4),
    rope.Grid(4, 2, 1),
)


@dataclass(frozen=True)
class Choice:
    """One way of AttentionWindow; the one that ships unless it says otherwise."""

    tiles: Tiles
    split: bool = True
    min_keys: int = kernel.MIN_CHUNK_KEYS
    merge_warps: int | None = None

    @property
    def label(self) -> str:
        """Short stable name."""
        if not self.split:
            return f"tiled {self.tiles.label}"
        warps = f" merge w{self.merge_warps}" if self.merge_warps else ""
        return f"split {self.tiles.label} c{self.min_keys}{warps}"


def choices(width: int) -> list[Choice]:
    """What is timed for a window of this width; first what ships."""
    tiled = [Choice(tiles, split=False) for tiles in TILED_TILES]
    if width > BLOCK:
        split = [Choice(tiles) for tiles in WIDE_TILES]
        return split + tiled[:2] if width <= kernel.SPLIT_ROWS else tiled + split
    grid = [Choice(tiles, min_keys=keys) for tiles in SPLIT_TILES for keys in CHUNK_KEYS]
    shipping = Choice(kernel.SPLIT[90])
    merges = [replace(shipping, merge_warps=warps) for warps in MERGE_WARPS]
    return [shipping, *(each for each in grid if each != shipping), *merges]


def bench_kernels(config: ModelConfig, lengths: Sequence[int], widths: Sequence[int]) -> Bench:
    """Every choice at every length and width."""
    bench = Bench(set())
    for length in lengths:
        for width in widths:
            bench_window(bench, config, length, width)
        bench_write(bench, config, length, widths[0])
    bench_rope(bench, config)
    return bench


def default_times(bench: Bench) -> dict[str, float]:
    """Microseconds of what ships, which comes first, and of the best of each shape, as metrics."""
    found: dict[str, float] = {}
    for row in bench.rows:
        name = f"h200.kernel.{row.op}.{row.shape.replace(' ', '.')}".lower()
        found.setdefault(f"{name}.us", row.microseconds)
        best = found.get(f"{name}.best_us", row.microseconds)
        found[f"{name}.best_us"] = min(best, row.microseconds)
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
    workspace = torch.empty(heads * width * MAX_CHUNKS * (head_dim + 2), device="cuda")
    for choice in choices(width):
        given = (choice.tiles, choice.min_keys, choice.merge_warps)
        room = workspace if choice.split else None
        calls = [
            partial(kernel.launch, q, k_w, v_w, *pair, columns, *ranges, room, out, *given)
            for pair in sets
        ]
        bench.time("AttentionWindow", f"N{length} W{width}", choice.label, calls, flops, moved)


def bench_rope(bench: Bench, config: ModelConfig) -> None:
    """RoPE of a block's rows, over several inputs."""
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    shape = (1, BLOCK, (heads + 2 * kv_heads) * head_dim)
    sets = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(16)]
    angles = torch.randn(1, BLOCK, head_dim // 2, device="cuda")
    q = sets[0].new_empty(1, heads, BLOCK, head_dim)
    k, v = (sets[0].new_empty(1, kv_heads, BLOCK, head_dim) for _ in range(2))
    moved = 4.0 * sets[0].numel()
    for grid in ROPE_GRIDS:
        calls = [
            partial(rope.launch, each, angles.cos(), angles.sin(), q, k, v, grid) for each in sets
        ]
        bench.time("rope", f"M{BLOCK}", grid.label, calls, 0.0, moved)


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


def launch_microseconds(session: CudaSession, name: str, repeats: int) -> float:
    """Median time that the host takes to launch a graph on an idle device."""
    lane: Any = session._lane
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.cuda.stream(lane._stream):
            lane._graphs[name, 0].replay()
        times.append((time.perf_counter() - started) * 1e6)
    torch.cuda.synchronize()
    return median(times)


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
