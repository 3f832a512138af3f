"""Triton kernel of RoPE on the fused qkv projection: rotate q and k, split and transpose all three.

With qkv[b, n] = (q heads | k heads | v heads) of d elements each, halves x1, x2 of a q or k head
and the row's cos, sin (one value per pair of the halves, from its own position),
    out1 = x1 * cos - x2 * sin        out2 = x2 * cos + x1 * sin        (rotate-half)
and v heads are copied. One program does `TOKENS` tokens of `HEADS` neighbouring heads and keeps
their cos and sin in registers.

Layout: qkv [B, N, (Hq + 2 Hkv) d] after bias, cos and sin [B, N, d/2] fp32, q [B, Hq, N, d],
k and v [B, Hkv, N, d]; contiguous. `angle_tables` computes cos and sin once per step.
dtypes: T in and out, fp32 inside, one rounding. Error bound against float64 on the same tables:
1 ulp of T of max(|x1|, |x2|). Bytes: 2 * B * N * (Hq + 2 Hkv) * d * size(T).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from lacache_trt.plugins.triton_support import (
    POINTER_TYPES,
    Configuration,
    ceil_div,
    dtype_label,
    unspecialised,
)


@dataclass(frozen=True)
class Grid:
    """What one program does, and its warps."""

    tokens: int
    heads: int
    warps: int

    @property
    def label(self) -> str:
        """Short stable name, for example t16h8w4."""
        return f"t{self.tokens}h{self.heads}w{self.warps}"


MANY = Grid(16, 8, 4)
FEW = Grid(8, 1, 4)
FEW_ROWS = 256
"""Up to so many tokens in a batch, MANY would leave most of a device idle."""


def angle_tables(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [B, N, d/2] in float32 of positions [B, N] times frequencies [d/2]."""
    angles = positions[:, :, None].float() * inverse_frequencies.float()
    return angles.cos(), angles.sin()


@unspecialised("heads", "kv_heads", "length")
def rope_kernel(
    qkv, cos, sin, q, k, v, heads, kv_heads, length,
    D: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid: (token tiles, head groups, B)."""
    HALF: tl.constexpr = D // 2
    batch = tl.program_id(2)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    keep = (token < length)[:, None]
    pair = tl.arange(0, HALF)
    table = batch.to(tl.int64) * length * HALF + token[:, None] * HALF + pair[None, :]
    cosine = tl.load(cos + table, mask=keep, other=0.0)
    sine = tl.load(sin + table, mask=keep, other=0.0)

    total = heads + 2 * kv_heads
    source_row = (batch.to(tl.int64) * length + token[:, None]) * (total * D) + pair[None, :]
    inside = token[:, None] * D + pair[None, :]
    for offset in range(HEADS):
        head = tl.program_id(1) * HEADS + offset
        if head < total:
            source = qkv + head * D + source_row
            x1 = tl.load(source, mask=keep, other=0.0)
            x2 = tl.load(source + HALF, mask=keep, other=0.0)
            if head < heads + kv_heads:
                if head < heads:
                    target = q + (batch * heads + head).to(tl.int64) * length * D + inside
                else:
                    kv_row = (batch * kv_heads + head - heads).to(tl.int64)
                    target = k + kv_row * length * D + inside
                left = x1.to(tl.float32)
                right = x2.to(tl.float32)
                dtype = q.dtype.element_ty
                tl.store(target, (left * cosine - right * sine).to(dtype), mask=keep)
                tl.store(target + HALF, (right * cosine + left * sine).to(dtype), mask=keep)
            else:
                kv_row = (batch * kv_heads + head - heads - kv_heads).to(tl.int64)
                target = v + kv_row * length * D + inside
                tl.store(target, x1, mask=keep)
                tl.store(target + HALF, x2, mask=keep)


def launch(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid | None = None,
) -> None:
    """Write q, k, v. `cos` and `sin`: float32 [B, N, d/2] (`angle_tables`)."""
    batch, heads, length, head_dim = q.shape
    kv_heads = k.shape[1]
    grid = grid or (FEW if batch * length <= FEW_ROWS else MANY)
    groups = ceil_div(heads + 2 * kv_heads, grid.heads)
    rope_kernel[(ceil_div(length, grid.tokens), groups, batch)](
        qkv, cos, sin, q, k, v, heads, kv_heads, length,
        D=head_dim, TOKENS=grid.tokens, HEADS=grid.heads, num_warps=grid.warps, num_stages=1,
    )  # fmt: skip


def configurations(dtype: torch.dtype, head_dim: int) -> list[Configuration]:
    """The instances that ship for a model (any SM)."""
    pointer = POINTER_TYPES[dtype]
    arguments = {"qkv": pointer, "cos": "*fp32", "sin": "*fp32"}
    arguments |= dict.fromkeys(("q", "k", "v"), pointer)
    arguments |= dict.fromkeys(("heads", "kv_heads", "length"), "i32")
    return [
        Configuration(
            name=f"rope.d{head_dim}.{dtype_label(dtype)}.{grid.label}",
            kernel=rope_kernel,
            arguments=arguments,
            constants={"D": head_dim, "TOKENS": grid.tokens, "HEADS": grid.heads},
            warps=grid.warps,
            stages=1,
        )
        for grid in (MANY, FEW)
    ]
