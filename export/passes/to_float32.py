"""Turns a graph of half-precision activations into float32, for runtimes without bf16 or fp16.

1. Every bf16 or fp16 value becomes float32, inputs and outputs included.
2. A Cast or a DequantizeLinear to either becomes one to float32.
3. Constants of the graph are converted; weights are relocated into the float32 weights file.
4. The function bodies follow their inputs by CastLike and need no change.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from lacache_trt.export.passes.external_weights import WeightLocation

_HALF = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)
_TARGET = {"Cast": "to", "DequantizeLinear": "output_dtype"}
"""The attribute that names a node's output type."""


class ToFloat32(ir.passes.InPlacePass):
    """See the rules above."""

    def __init__(self, locations: Mapping[str, WeightLocation]) -> None:
        super().__init__()
        self.locations = locations

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        for node in graph:
            for value in node.outputs:
                _widen_type(value)
            _widen_attributes(node)
        for value in graph.inputs:
            _widen_type(value)
        for name, value in graph.initializers.items():
            _widen_type(value)
            value.const_value = self._widened(name, value.const_value)
        return ir.passes.PassResult(model, True)

    def _widened(self, name: str, tensor: ir.TensorProtocol | None) -> ir.TensorProtocol | None:
        location = self.locations.get(name)
        if location is not None:
            return location.tensor(name)
        if tensor is None or tensor.dtype not in _HALF:
            return tensor
        return ir.Tensor(tensor.numpy().astype(np.float32), name=name)


def _widen_type(value: ir.Value) -> None:
    if value.dtype in _HALF:
        value.dtype = ir.DataType.FLOAT


def _widen_attributes(node: ir.Node) -> None:
    for name, attribute in list(node.attributes.items()):
        if _TARGET.get(node.op_type) == name and attribute.as_int() in _HALF:
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
        elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _HALF:
            wide = attribute.as_tensor().numpy().astype(np.float32)
            node.attributes[name] = ir.AttrTensor(name, ir.Tensor(wide))
