"""Triton kernel of SwiGLUQuant; the rule is in `op`.

A program takes TILE groups of one row; nothing crosses groups.

Layout: gate_up [M, 2F], gate first, quantised [M, F], contiguous, F a multiple of 128; scale
[M, F / 128] with any strides.
dtypes: T in, E4M3 and float32 out, float32 inside, rounded to T after silu and after the product.
Error bound: 1.5 ulp of T against float64 before quantising; from equal products the scales and the
bytes are those of `fp8`, bit for bit.
Bytes: M * F * (2 size(T) + 1) + M * F / 32.
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

TILE = 8
WARPS = 2


@unspecialised("scale_row", "scale_group")
def swiglu_quant_kernel(
    gate_up, quantised, scale, scale_row, scale_group,
    GROUPS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
    MAX: tl.constexpr, ZERO: tl.constexpr, VIA_HALF: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of a row, M)."""
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    keep = inside < GROUPS * GROUP
    dtype = gate_up.dtype.element_ty
    source = gate_up + row * (2 * GROUPS * GROUP) + inside
    gate = tl.load(source, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(source + GROUPS * GROUP, mask=keep, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    values = (silu * up).to(dtype).to(tl.float32)
    rounded, factor = quantise_tile(values, MAX, ZERO, VIA_HALF)
    tl.store(quantised + row * (GROUPS * GROUP) + inside, rounded, mask=keep)
    target = scale + row * scale_row + group * scale_group
    tl.store(target, factor, mask=group < GROUPS)


def launch(
    gate_up: Tensor, quantised: Tensor, scale: Tensor, tile: int = TILE, warps: int = WARPS
) -> None:
    """Write `quantised` [..., F] and `scale` from `gate_up` [..., 2F]."""
    width = quantised.shape[-1]
    grid = (ceil_div(width // GROUP, tile), quantised.numel() // width)
    swiglu_quant_kernel[grid](
        gate_up, quantised, scale, *scale_strides(scale),
        **constants(width, device_sm(gate_up), tile), num_warps=warps, num_stages=1,
    )  # fmt: skip


def constants(width: int, sm: int, tile: int = TILE) -> dict[str, object]:
    """The constants of the instance for F = `width`."""
    sizes = {"GROUPS": width // GROUP, "TILE": tile, "GROUP": GROUP}
    return {**sizes, **rule_constants(sm)}


def configurations(dtype: torch.dtype, width: int, sm: int) -> list[Configuration]:
    """The instances that ship for a model (SM 89 and later)."""
    return [
        Configuration(
            name=f"swiglu_quant.f{width}.{dtype_label(dtype)}",
            kernel=swiglu_quant_kernel,
            arguments={
                "gate_up": POINTER_TYPES[dtype],
                "quantised": "*fp8e4nv",
                "scale": "*fp32",
                **SCALE_STRIDES,
            },
            constants=constants(width, sm),
            warps=WARPS,
            stages=1,
        )
    ]
