"""Triton kernel of RMSNormQuant; the rule is in `op`.

A program takes one row, which stays in registers as [groups, 128], so each tensor moves once.

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
    device_sm,
    dtype_label,
    next_power_of_two,
    unspecialised,
)


@unspecialised("scale_row", "scale_group")
def rms_norm_quant_kernel(
    hidden, weight, eps, quantised, scale, scale_row, scale_group,
    GROUPS: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
    MAX: tl.constexpr, ZERO: tl.constexpr, VIA_HALF: tl.constexpr,
):  # fmt: skip
    """Grid: (M,). GROUPS groups in LANES rows of a tile."""
    row = tl.program_id(0).to(tl.int64)
    base = row * (GROUPS * GROUP)
    group = tl.arange(0, LANES)
    inside = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    keep = inside < GROUPS * GROUP
    dtype = hidden.dtype.element_ty
    wide = tl.load(hidden + base + inside, mask=keep, other=0.0).to(tl.float32)
    gain = tl.load(weight + inside, mask=keep, other=0.0).to(tl.float32)
    total = tl.sum(tl.sum(wide * wide, 1), 0)
    normal = (wide * tl.rsqrt(total / (GROUPS * GROUP) + tl.load(eps))).to(dtype).to(tl.float32)
    values = (normal * gain).to(dtype).to(tl.float32)
    rounded, factor = quantise_tile(values, MAX, ZERO, VIA_HALF)
    tl.store(quantised + base + inside, rounded, mask=keep)
    tl.store(scale + row * scale_row + group * scale_group, factor, mask=group < GROUPS)


def choose_warps(width: int) -> int:
    """About 32 elements per thread."""
    return min(16, max(1, next_power_of_two(width) // 1024))


def launch(
    hidden: Tensor,
    weight: Tensor,
    eps: Tensor,
    quantised: Tensor,
    scale: Tensor,
    warps: int | None = None,
) -> None:
    """Write `quantised` and `scale`; hidden may have any leading dimensions."""
    width = hidden.shape[-1]
    rms_norm_quant_kernel[(hidden.numel() // width,)](
        hidden, weight, eps, quantised, scale, *scale_strides(scale),
        **constants(width, device_sm(hidden)), num_warps=warps or choose_warps(width), num_stages=1,
    )  # fmt: skip


def constants(width: int, sm: int) -> dict[str, object]:
    """The constants of the instance for D = `width`."""
    groups = width // GROUP
    sizes = {"GROUPS": groups, "LANES": next_power_of_two(groups), "GROUP": GROUP}
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
            },
            constants=constants(width, sm),
            warps=choose_warps(width),
            stages=1,
        )
    ]
