"""Turns large weights into inputs of the graph, so that several plans use one device copy.

1. A weight that lies in the weights file and has at least LARGE bytes becomes a graph input of its
   own name, dtype and fixed shape, behind the other inputs and in the order of the file.
2. Smaller weights and constants stay: TensorRT folds them.
3. So do FP8 weights with scales per channel, and those scales: TensorRT dequantises only constants
   per channel (NvInfer.h, IDequantizeLayer). They lie in every plan.
4. Nothing else changes.

The surgery is onnx-graphsurgeon's: it keeps external weights as references, so that a graph with
many gigabytes of them costs nothing, and carries functions and types that NumPy does not have.

TensorRT chooses its GEMM kernels for a weight that it sees only at run time, so it can neither fold
nor lay it out anew; that is the price of the shared copy.
"""

from __future__ import annotations

from typing import Any

import onnx_graphsurgeon as gs
import onnx_ir as ir
from onnx_graphsurgeon.logger import G_LOGGER

from lacache_trt.contract import TensorSpec
from lacache_trt.errors import EngineError

LARGE = 1 << 16
_NAMES = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.FLOAT8E4M3FN: "float8_e4m3fn",
}


def share_weights(model: ir.Model) -> Any:
    """The model as an ONNX message with the large weights as inputs; see the rules above."""
    names = [spec.name for spec in large_weights(model)]
    # Its warnings, of types that NumPy does not have, would go to stdout.
    with G_LOGGER.suppress(G_LOGGER.ERROR):
        graph = gs.import_onnx(ir.to_proto(model))
        tensors = graph.tensors()
        for name in names:
            graph.inputs.append(_variable_for(tensors[name]))
        return gs.export_onnx(graph)


def _variable_for(constant: gs.Constant) -> gs.Variable:
    """A variable that every reader of the constant reads instead.

    `Constant.to_variable` of onnx-graphsurgeon 0.6.1 gives one that cannot be exported.
    """
    variable = gs.Variable(constant.name, constant.dtype, constant.shape)
    for node in list(constant.outputs):
        for index, tensor in enumerate(node.inputs):
            if tensor is constant:
                node.inputs[index] = variable
    return variable


def weight_tensors(model: ir.Model) -> dict[str, ir.ExternalTensor]:
    """The weights that lie in the weights file, by name, in the order of the file."""
    found = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    return dict(sorted(found.items(), key=lambda item: item[1].offset or 0))


def large_weights(model: ir.Model) -> tuple[TensorSpec, ...]:
    """What `share_weights` turns into inputs."""
    return tuple(
        TensorSpec(name, tuple(tensor.shape.numpy()), dtype_name(tensor))
        for name, tensor in weight_tensors(model).items()
        if tensor.nbytes >= LARGE and not _is_dequantised(model.graph.initializers[name])
    )


def _is_dequantised(value: ir.Value) -> bool:
    return any(node.op_type == "DequantizeLinear" for node, _ in value.uses())


def dtype_name(tensor: ir.ExternalTensor) -> str:
    """The contract's name of a weight's dtype."""
    if tensor.dtype not in _NAMES:
        raise EngineError("a weight has an unknown dtype", got=f"{tensor.name} {tensor.dtype}")
    return _NAMES[tensor.dtype]
