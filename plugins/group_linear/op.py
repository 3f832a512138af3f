"""GroupLinear: a linear on FP8 values with float32 scales per group and per block.

    out[r, n] = sum_g scale[r, g] weight_scale[n / 128, g] sum_{k in g} quantised[r, k] weight[n, k]
over the groups g of 128 values of k. quantised float8_e4m3fn [B, N, K], scale float32
[B, N, K / 128], weight float8_e4m3fn [out, K], weight_scale float32 [ceil(out / 128), K / 128];
like [1] only carries the dtype of the result [B, N, out].
Source: the granularity of DeepSeek-V3.

The reference and the ONNX function multiply both sides with their scales first, which rounds every
operand once: against the formula in float32 they differ by at most
(2^-22 + 2 K 2^-24) sum_k |x_k w_k|, where x and w are the scaled values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lacache_trt.errors import QuantisationError
from lacache_trt.plugins import fp8
from lacache_trt.plugins.spec import OpSpec, register


def check_shapes(quantised: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> None:
    """Raise unless the four tensors belong together.

    Raises:
        QuantisationError: they do not.
    """
    width = fp8.check_width(weight.shape[1])
    groups, blocks = width // fp8.GROUP, -(-weight.shape[0] // fp8.GROUP)
    found = (quantised.shape[-1], scale.shape[-1], *weight_scale.shape)
    if found != (width, groups, blocks, groups):
        raise QuantisationError(
            "the scales do not fit the values of an FP8 linear",
            got=f"activations {found[0]} with {found[1]} scales, weight {tuple(weight.shape)} with "
            f"scales {tuple(weight_scale.shape)}",
            expected=f"activations {width} with {groups} scales, weight scales {(blocks, groups)}",
            fix="quantise the model again",
        )


def _output_specs(
    quantised: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, like: Tensor
) -> Sequence[tuple[torch.dtype, Sequence[int]]]:
    check_shapes(quantised, scale, weight, weight_scale)
    return [(like.dtype, (*quantised.shape[:-1], weight.shape[0]))]


def _reference(
    quantised: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, like: Tensor
) -> tuple[Tensor, ...]:
    check_shapes(quantised, scale, weight, weight_scale)
    dtype = torch.promote_types(like.dtype, torch.float32)
    rows = fp8.dequantise_groups(quantised, scale, dtype)
    return ((rows @ fp8.dequantise_blocks(weight, weight_scale, dtype).t()).to(like.dtype),)


GROUP_LINEAR = register(
    OpSpec(
        name="GroupLinear",
        inputs=("quantised", "scale", "weight", "weight_scale", "like"),
        outputs=("out",),
        output_specs=_output_specs,
        reference=_reference,
    )
)
