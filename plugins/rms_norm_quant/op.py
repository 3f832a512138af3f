"""RMSNormQuant: the RMS norm before an FP8 linear, quantised in groups of 128.

    y = round_T(round_T(h * rsqrt(mean(h^2) + eps)) * weight)      the norm in float32
    scale, quantised: of y as `fp8` defines them
hidden [B, N, D] and weight [D] in T, eps float32 [1]; quantised float8_e4m3fn [B, N, D], scale
float32 [B, N, D / 128]. D is a multiple of 128.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lacache_trt.plugins import fp8
from lacache_trt.plugins.spec import OpSpec, register


def _output_specs(hidden: Tensor, *others: Tensor) -> Sequence[tuple[torch.dtype, Sequence[int]]]:
    batch, count, width = hidden.shape
    groups = fp8.check_width(width) // fp8.GROUP
    return [(fp8.E4M3, (batch, count, width)), (torch.float32, (batch, count, groups))]


def _reference(hidden: Tensor, weight: Tensor, eps: Tensor) -> tuple[Tensor, ...]:
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    normal = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return fp8.quantise_groups(weight * normal.to(hidden.dtype))


RMS_NORM_QUANT = register(
    OpSpec(
        name="RMSNormQuant",
        inputs=("hidden", "weight", "eps"),
        outputs=("quantised", "scale"),
        output_specs=_output_specs,
        reference=_reference,
    )
)
