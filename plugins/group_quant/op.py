"""GroupQuant: values before an FP8 linear, quantised in groups of 128.

    scale, quantised: of x as `fp8` defines them
x [B, N, K] in T; quantised float8_e4m3fn [B, N, K], scale float32 [B, N, K / 128]. K is a multiple
of 128. For inputs that no norm or activation right before the linear produces: those of the
attention's projections, which several linears share, and of its output projection.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lacache_trt.plugins import fp8
from lacache_trt.plugins.spec import OpSpec, register


def _output_specs(x: Tensor) -> Sequence[tuple[torch.dtype, Sequence[int]]]:
    batch, count, width = x.shape
    groups = fp8.check_width(width) // fp8.GROUP
    return [(fp8.E4M3, (batch, count, width)), (torch.float32, (batch, count, groups))]


def _reference(x: Tensor) -> tuple[Tensor, ...]:
    return fp8.quantise_groups(x)


GROUP_QUANT = register(
    OpSpec(
        name="GroupQuant",
        inputs=("x",),
        outputs=("quantised", "scale"),
        output_specs=_output_specs,
        reference=_reference,
    )
)
