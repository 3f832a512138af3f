"""A linear on FP8 values with a static scale of the input and a scale per output channel.

    out = round_T(sum_k q(x)[r, k] xs weight[n, k] ws[n])
    q(x) = round_E4M3(min(max(x / xs, -448), 448))
x [..., K] in T, xs float32 [], weight float8_e4m3fn [out, K], ws float32 [out]; x / xs is a true
division in float32. Larger inputs than those of the calibration saturate, infinite ones too; NaN
stays NaN.

As ONNX it is four standard operators: QuantizeLinear and DequantizeLinear around the input,
DequantizeLinear along axis 0 of the weight, MatMul. Scales stay float32: a strongly typed TensorRT
network wants a scale in float32 or in the type of the input (NvInfer.h, IQuantizeLayer), and only
the first holds it exactly. A runtime that does not fuse the four rounds both operands to T first,
each value by at most half an ulp of T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lacache_trt.plugins.fp8 import E4M3, dequantise_channels, quantise_static

ONNX_TYPES = {torch.float32: 1, torch.float16: 10, torch.bfloat16: 16, E4M3: 17}
"""Numbers of TensorProto.DataType."""


def channel_linear(x: Tensor, input_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """The definition; in float32, or in float64 if x is float64."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = quantise_static(x, input_scale).to(dtype) * input_scale.to(dtype)
    return (rows @ dequantise_channels(weight, weight_scale, dtype).t()).to(x.dtype)


def record_channel_linear(
    x: Tensor, input_scale: Tensor, weight: Tensor, weight_scale: Tensor
) -> Tensor:
    """The operators as ONNX nodes, while a program is being exported."""
    quantised = _node("QuantizeLinear", x, input_scale, E4M3)
    rows = _node("DequantizeLinear", quantised, input_scale, x.dtype)
    return rows @ _node("DequantizeLinear", weight, weight_scale, x.dtype, axis=0).t()


def _node(name: str, values: Tensor, scale: Tensor, dtype: torch.dtype, **axis: int) -> Tensor:
    return torch.onnx.ops.symbolic(
        name,
        (values, scale),
        {"output_dtype": ONNX_TYPES[dtype], **axis},
        dtype=dtype,
        shape=tuple(values.shape),
    )
