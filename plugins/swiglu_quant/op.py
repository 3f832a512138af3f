"""SwiGLUQuant: SwiGLU of the fused gate and up projection, quantised in groups of 128.

    y = round_T(round_T(silu(gate)) * up)      silu(g) = g / (1 + e^-g) in float32
    scale, quantised: of y as `fp8` defines them
gate_up [B, N, 2F] in T, gate first; quantised float8_e4m3fn [B, N, F], scale float32
[B, N, F / 128]. F is a multiple of 128.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lacache_trt.plugins import fp8
from lacache_trt.plugins.spec import OpSpec, register


def _output_specs(gate_up: Tensor) -> Sequence[tuple[torch.dtype, Sequence[int]]]:
    batch, count, double = gate_up.shape
    groups = fp8.check_width(double // 2) // fp8.GROUP
    return [(fp8.E4M3, (batch, count, double // 2)), (torch.float32, (batch, count, groups))]


def _reference(gate_up: Tensor) -> tuple[Tensor, ...]:
    gate, up = gate_up.chunk(2, dim=-1)
    return fp8.quantise_groups(F.silu(gate) * up)


SWIGLU_QUANT = register(
    OpSpec(
        name="SwiGLUQuant",
        inputs=("gate_up",),
        outputs=("quantised", "scale"),
        output_specs=_output_specs,
        reference=_reference,
    )
)
