"""The geometries that are swept, and the check jobs that precede their timing."""

from __future__ import annotations

import torch
from kernel_jobs import Job

from lacache_trt.plugins.triton_support import Tiles

HEAD_DIM = 128
BF16 = torch.bfloat16
STREAM_TILES = [
    Tiles(*t)
    for t in (
        (128, 128, 8, 2), (128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (256, 64, 8, 2),
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 4, 3),
    )
]  # fmt: skip
SPLIT_TILES = [Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 3), Tiles(32, 128, 4, 2)]
REUSE_TILES = [
    Tiles(*t)
    for t in ((64, 32, 4, 2), (64, 32, 4, 3), (32, 32, 4, 2), (128, 32, 8, 2), (128, 32, 4, 2))
]
SAMPLE_CHUNKS = [(1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8)]


def jobs() -> list[Job]:
    """Every check: the shipping geometry over all shapes, the swept ones over a few."""
    found = []
    for dtype in (torch.float16, BF16):
        for head_dim in (64, 128):
            base = {"dtype": dtype, "head_dim": head_dim, "tiles": None, "wide": True}
            for op in ("fill", "reuse", "attention"):
                found.append(Job(op, f"{op} shipping d{head_dim} {dtype}", base))
            split = base | {"split": True}
            found.append(Job("attention", f"split shipping d{head_dim} {dtype}", split))
        found.append(Job("tokenwise", f"tokenwise {dtype}", {"dtype": dtype}))
    for dtype in (torch.float16, torch.float32):
        found.append(Job("sample", f"sample {dtype}", {"dtype": dtype, "chunk": 2048, "warps": 4}))
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
    return found
