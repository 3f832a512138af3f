"""Triton kernel of SwiGLU on the fused gate and up projection.

    out[m, f] = round_T(silu(gate_up[m, f]) * gate_up[m, F + f])      silu(g) = g / (1 + e^-g)
in fp32 with a single rounding at the end (transformers rounds silu to T first: up to 1 ulp of T
apart, ours is the nearer to float64).

Layout: gate_up [M, 2F], gate first; out [M, F]; contiguous, F a multiple of 16.
dtypes: T in and out, fp32 inside. Error bound against float64: 1 ulp of T.
Bytes: 3 * M * F * size(T).
"""

from __future__ import annotations

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

COLUMNS = 2048
WARPS = 4


@unspecialised()
def swiglu_kernel(gate_up, out, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Grid: (M, column tiles)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    keep = column < WIDTH
    source = gate_up + row * (2 * WIDTH) + column
    gate = tl.load(source, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=keep, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=keep)


def launch(gate_up: Tensor, out: Tensor, columns: int = COLUMNS, warps: int = WARPS) -> None:
    """Write `out` [..., F] from `gate_up` [..., 2F]."""
    width = out.shape[-1]
    swiglu_kernel[(out.numel() // width, ceil_div(width, columns))](
        gate_up, out, WIDTH=width, COLUMNS=columns, num_warps=warps, num_stages=1
    )


def configurations(dtype: torch.dtype, width: int) -> list[Configuration]:
    """The instances that ship for a model (any SM)."""
    return [
        Configuration(
            name=f"swiglu.f{width}.{dtype_label(dtype)}",
            kernel=swiglu_kernel,
            arguments=dict.fromkeys(("gate_up", "out"), POINTER_TYPES[dtype]),
            constants={"WIDTH": width, "COLUMNS": COLUMNS},
            warps=WARPS,
            stages=1,
        )
    ]
