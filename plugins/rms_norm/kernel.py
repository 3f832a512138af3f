"""Triton kernel of the RMS norm, fused with the residual add that precedes it.

    h = round_T(x + delta)       (h = x without delta; written to `residual_out` with it)
    y = round_T(round_T(h * rsqrt(mean(h^2) + eps)) * weight)
One program per row; the row stays in registers, so each tensor moves once. The order of the two
roundings is that of LLaDA and of transformers' Llama: normalise in fp32, cast, multiply in T.

Layout: x, delta, residual_out, out [M, D], weight [D], contiguous; any D that is a multiple of 16.
dtypes: T in and out, fp32 inside.
Error bound against float64 from the same h: 2 ulp of T.
Bytes: (2 + 2) * M * D * size(T) with delta, 2 * M * D * size(T) without.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from lacache_trt.plugins.triton_support import (
    POINTER_TYPES,
    Configuration,
    dtype_label,
    next_power_of_two,
    unspecialised,
)


@unspecialised()
def rms_norm_kernel(
    x, delta, weight, residual_out, out,
    WIDTH: tl.constexpr, LANES: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Grid: (M,)."""
    base = tl.program_id(0).to(tl.int64) * WIDTH
    lane = tl.arange(0, LANES)
    keep = lane < WIDTH
    dtype = out.dtype.element_ty
    hidden = tl.load(x + base + lane, mask=keep, other=0.0).to(tl.float32)
    if ADD:
        hidden += tl.load(delta + base + lane, mask=keep, other=0.0).to(tl.float32)
        rounded = hidden.to(dtype)
        tl.store(residual_out + base + lane, rounded, mask=keep)
        hidden = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(hidden * hidden, 0) / WIDTH + EPS)
    normal = (hidden * scale).to(dtype).to(tl.float32)
    gain = tl.load(weight + lane, mask=keep, other=0.0).to(tl.float32)
    tl.store(out + base + lane, (normal * gain).to(dtype), mask=keep)


def choose_warps(width: int) -> int:
    """About 16 elements per thread."""
    return min(16, max(1, next_power_of_two(width) // 512))


def launch(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    residual_out: Tensor | None,
    out: Tensor,
    eps: float,
    warps: int | None = None,
) -> None:
    """Write `out` and, with `delta`, `residual_out`. x may have any leading dimensions."""
    width = x.shape[-1]
    add = delta is not None
    rms_norm_kernel[(x.numel() // width,)](
        x, delta if add else x, weight, residual_out if add else out, out,
        WIDTH=width, LANES=next_power_of_two(width), EPS=eps, ADD=add,
        num_warps=warps or choose_warps(width), num_stages=1,
    )  # fmt: skip


def configurations(dtype: torch.dtype, width: int, eps: float) -> list[Configuration]:
    """The instances that ship for a model (any SM)."""
    names = ("x", "delta", "weight", "residual_out", "out")
    return [
        Configuration(
            name=f"rms_norm.{'add.' if add else ''}d{width}.{dtype_label(dtype)}",
            kernel=rms_norm_kernel,
            arguments=dict.fromkeys(names, POINTER_TYPES[dtype]),
            constants={
                "WIDTH": width,
                "LANES": next_power_of_two(width),
                "EPS": eps,
                "ADD": add,
            },
            warps=choose_warps(width),
            stages=1,
        )
        for add in (False, True)
    ]
