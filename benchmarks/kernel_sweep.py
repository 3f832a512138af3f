"""The geometries that are swept, and the check jobs that precede their timing."""

from __future__ import annotations

import torch
from kernel_jobs import Job

from lacache_trt.plugins.sample_block import kernel as sample_block
from lacache_trt.plugins.triton_support import Tiles

HEAD_DIM = 128
BF16 = torch.bfloat16
STREAM_TILES = [
    Tiles(*t)
    for t in (
        (64, 64, 4, 3),
        (64, 64, 4, 2),
        (64, 32, 4, 4),
        (64, 32, 4, 3),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
    )
]
SPLIT_TILES = [Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 3), Tiles(32, 128, 4, 2)]
REUSE_TILES = [Tiles(*t) for t in ((64, 32, 4, 2), (64, 32, 4, 1), (64, 32, 4, 3), (32, 32, 4, 2))]
REUSE_BLOCK_KEYS = (32, 64, 128)
WINDOW_SEEDS = 4
SAMPLE_CHUNKS = [(1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8)]


def jobs() -> list[Job]:
    """Every check: the shipping geometry over all shapes, the swept ones over a few."""
    found = shipping_jobs()
    found.append(
        Job("sample", "sample float32", {"dtype": torch.float32, "chunk": 2048, "warps": 4})
    )
    for chunk, warps in SAMPLE_CHUNKS:
        arguments = {"dtype": BF16, "chunk": chunk, "warps": warps}
        found.append(Job("sample", f"sample c{chunk}w{warps}", arguments))
    swept = {"dtype": BF16, "head_dim": HEAD_DIM, "wide": False}
    for op, table, more in (
        ("fill", STREAM_TILES, {}),
        ("attention", STREAM_TILES, {}),
        ("attention", SPLIT_TILES, {"split": True}),
        ("reuse", REUSE_TILES, {}),
    ):
        kind = "split" if more else op
        for tiles in table:
            found.append(Job(op, f"{kind} {tiles.label}", swept | more | {"tiles": tiles}))
    for block_keys in REUSE_BLOCK_KEYS:
        more = {"tiles": None, "block_keys": block_keys}
        found.append(Job("reuse", f"reuse block keys {block_keys}", swept | more))
    return found


def shipping_jobs(ptx_of: int | None = None) -> list[Job]:
    """The checks of what ships; with `ptx_of`, of what ships for that SM, loaded as PTX."""
    found = []
    name = "shipping" if ptx_of is None else f"sm_{ptx_of} PTX"
    for dtype in (torch.float16, BF16):
        label = str(dtype).removeprefix("torch.")
        for head_dim in (64, 128):
            base = {"dtype": dtype, "head_dim": head_dim, "tiles": None, "wide": True}
            for op in ("fill", "reuse", "attention"):
                found.append(Job(op, f"{op} {name} d{head_dim} {label}", base, ptx_of))
            split = base | {"split": True}
            found.append(Job("attention", f"split {name} d{head_dim} {label}", split, ptx_of))
        found.append(Job("tokenwise", f"tokenwise {name} {label}", {"dtype": dtype}, ptx_of))
        sample = {"dtype": dtype, "chunk": sample_block.CHUNK, "warps": sample_block.WARPS}
        found.append(Job("sample", f"sample {name} {label}", sample, ptx_of))
        window = {"dtype": dtype, "seeds": WINDOW_SEEDS}
        found.append(Job("window", f"window {name} {label}", window, ptx_of))
        found.append(Job("quantising", f"quantising {name} {label}", {"dtype": dtype}, ptx_of))
        linear = {"dtype": dtype, "geometry": None, "most_rows": 2048}
        found.append(Job("group_linear", f"linear {name} {label}", linear, ptx_of))
    return found
