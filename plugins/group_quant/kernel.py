"""Triton kernel of GroupQuant; the rule is in `op`.

A program takes TILE groups of one row; nothing crosses groups.

Layout: x [M, K], quantised [M, K], contiguous, K a multiple of 128; scale [M, K / 128] with any
strides.
dtypes: T in, E4M3 and float32 out, float32 inside.
Error bound: none; the scales and the bytes are those of `fp8`, bit for bit.
Bytes: M * K * (size(T) + 1) + M * K / 32.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from lacache_trt.plugins.fp8_kernel import (
    GROUP,
    SCALE_STRIDES,
    quantise_tile,
    rule_constants,
    scale_strides,
)
from lacache_trt.plugins.triton_support import (
    POINTER_TYPES,
    Configuration,
    ceil_div,
    device_sm,
    dtype_label,
    unspecialised,
)

TILE = 16
WARPS = 4


@unspecialised("scale_row", "scale_group")
def group_quant_kernel(
    x, quantised, scale, scale_row, scale_group,
    GROUPS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
    MAX: tl.constexpr, ZERO: tl.constexpr, VIA_HALF: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of a row, M)."""
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    keep = inside < GROUPS * GROUP
    start = row * (GROUPS * GROUP) + inside
    values = tl.load(x + start, mask=keep, other=0.0).to(tl.float32)
    rounded, factor = quantise_tile(values, MAX, ZERO, VIA_HALF)
    tl.store(quantised + start, rounded, mask=keep)
    target = scale + row * scale_row + group * scale_group
    tl.store(target, factor, mask=group < GROUPS)


def launch(x: Tensor, quantised: Tensor, scale: Tensor) -> None:
    """Write `quantised` [..., K] and `scale` from `x` [..., K]."""
    width = x.shape[-1]
    grid = (ceil_div(width // GROUP, TILE), x.numel() // width)
    group_quant_kernel[grid](
        x, quantised, scale, *scale_strides(scale), **constants(width, device_sm(x)),
        num_warps=WARPS, num_stages=1,
    )  # fmt: skip


def constants(width: int, sm: int) -> dict[str, object]:
    """The constants of the instance for K = `width`."""
    sizes = {"GROUPS": width // GROUP, "TILE": TILE, "GROUP": GROUP}
    return {**sizes, **rule_constants(sm)}


def configurations(dtype: torch.dtype, width: int, sm: int) -> list[Configuration]:
    """The instances that ship for a model (SM 89 and later)."""
    return [
        Configuration(
            name=f"group_quant.k{width}.{dtype_label(dtype)}",
            kernel=group_quant_kernel,
            arguments={
                "x": POINTER_TYPES[dtype],
                "quantised": "*fp8e4nv",
                "scale": "*fp32",
                **SCALE_STRIDES,
            },
            constants=constants(width, sm),
            warps=WARPS,
            stages=1,
        )
    ]
