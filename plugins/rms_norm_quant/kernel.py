"""Triton kernel of RMSNormQuant; the rule is in `op`.

A program takes EACH rows, one after the other; a row stays in registers as [groups, 128], so each
tensor moves once, and the next row is under way while one is reduced.

Layout: hidden, quantised [M, D], weight [D], eps [1], contiguous, D a multiple of 128; scale
[M, D / 128] with any strides.
dtypes: T in, E4M3 and float32 out, float32 inside.
Error bound: the normed values are those of `rms_norm` (2 ulp of T against float64); from equal
normed values the scales and the bytes are those of `fp8`, bit for bit.
Bytes: M * D * (size(T) + 1) + M * D / 32.
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
    next_power_of_two,
    unspecialised,
)

EACH = 1


@unspecialised("scale_row", "scale_group", "rows")
def rms_norm_quant_kernel(
    hidden, weight, eps, quantised, scale, scale_row, scale_group, rows,
    GROUPS: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr,
    MAX: tl.constexpr, ZERO: tl.constexpr, VIA_HALF: tl.constexpr,
):  # fmt: skip
    """Grid: (M / EACH, rounded up,). GROUPS groups in LANES rows of a tile."""
    first = tl.program_id(0).to(tl.int64) * EACH
    group = tl.arange(0, LANES)
    inside = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    keep = inside < GROUPS * GROUP
    dtype = hidden.dtype.element_ty
    following = tl.load(hidden + first * (GROUPS * GROUP) + inside, mask=keep, other=0.0)
    gain = tl.load(weight + inside, mask=keep, other=0.0).to(tl.float32)
    epsilon = tl.load(eps)
    for index in tl.static_range(EACH):
        row = first + index
        base = row * (GROUPS * GROUP)
        wide = following.to(tl.float32)
        if index + 1 < EACH:
            source = hidden + base + GROUPS * GROUP + inside
            following = tl.load(source, mask=keep & (row + 1 < rows), other=0.0)
        total = tl.sum(tl.sum(wide * wide, 1), 0)
        normal = (wide * tl.rsqrt(total / (GROUPS * GROUP) + epsilon)).to(dtype).to(tl.float32)
        values = (normal * gain).to(dtype).to(tl.float32)
        rounded, factor = quantise_tile(values, MAX, ZERO, VIA_HALF)
        tl.store(quantised + base + inside, rounded, mask=keep & (row < rows))
        target = scale + row * scale_row + group * scale_group
        tl.store(target, factor, mask=(group < GROUPS) & (row < rows))


def choose_warps(width: int) -> int:
    """About 16 elements per thread."""
    return min(16, max(1, next_power_of_two(width) // 512))


def launch(
    hidden: Tensor,
    weight: Tensor,
    eps: Tensor,
    quantised: Tensor,
    scale: Tensor,
    warps: int | None = None,
    each: int = EACH,
) -> None:
    """Write `quantised` and `scale`; hidden may have any leading dimensions."""
    width = hidden.shape[-1]
    rows = hidden.numel() // width
    rms_norm_quant_kernel[(ceil_div(rows, each),)](
        hidden, weight, eps, quantised, scale, *scale_strides(scale), rows,
        **constants(width, device_sm(hidden), each),
        num_warps=warps or choose_warps(width), num_stages=1,
    )  # fmt: skip


def constants(width: int, sm: int, each: int = EACH) -> dict[str, object]:
    """The constants of the instance for D = `width`."""
    groups = width // GROUP
    sizes = {"GROUPS": groups, "LANES": next_power_of_two(groups), "GROUP": GROUP, "EACH": each}
    return {**sizes, **rule_constants(sm)}


def configurations(dtype: torch.dtype, width: int, sm: int) -> list[Configuration]:
    """The instances that ship for a model (SM 89 and later)."""
    kind = POINTER_TYPES[dtype]
    return [
        Configuration(
            name=f"rms_norm_quant.d{width}.{dtype_label(dtype)}",
            kernel=rms_norm_quant_kernel,
            arguments={
                "hidden": kind,
                "weight": kind,
                "eps": "*fp32",
                "quantised": "*fp8e4nv",
                "scale": "*fp32",
                **SCALE_STRIDES,
                "rows": "i32",
            },
            constants=constants(width, sm),
            warps=choose_warps(width),
            stages=1,
        )
    ]
