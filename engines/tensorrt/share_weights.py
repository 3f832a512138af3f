"""Turns large weights into inputs of the graph, so that several plans use one device copy.

1. A weight that lies in the weights file and has at least LARGE bytes becomes a graph input of its
   own name, dtype and fixed shape, behind the other inputs and in the order of the file.
2. Smaller weights and constants stay: TensorRT folds them.
3. Nothing else changes.

TensorRT chooses its GEMM kernels for a weight that it sees only at run time, so it can neither fold
nor lay it out anew; that is the price of the shared copy.
"""

from __future__ import annotations

import onnx_ir as ir

from lacache_trt.contract import TensorSpec
from lacache_trt.errors import EngineError

LARGE = 1 << 16
_NAMES = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
}


class ShareWeights(ir.passes.InPlacePass):
    """See the rules above."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        names = [spec.name for spec in large_weights(model)]
        for name in names:
            value = graph.initializers.pop(name)
            value.const_value = None
            graph.inputs.append(value)
        return ir.passes.PassResult(model, bool(names))


def weight_tensors(model: ir.Model) -> dict[str, ir.ExternalTensor]:
    """The weights that lie in the weights file, by name, in the order of the file."""
    found = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    return dict(sorted(found.items(), key=lambda item: item[1].offset or 0))


def large_weights(model: ir.Model) -> tuple[TensorSpec, ...]:
    """What `ShareWeights` turns into inputs."""
    return tuple(
        TensorSpec(name, tuple(tensor.shape.numpy()), dtype_name(tensor))
        for name, tensor in weight_tensors(model).items()
        if tensor.nbytes >= LARGE
    )


def dtype_name(tensor: ir.ExternalTensor) -> str:
    """The contract's name of a weight's dtype."""
    if tensor.dtype not in _NAMES:
        raise EngineError("a weight has an unknown dtype", got=f"{tensor.name} {tensor.dtype}")
    return _NAMES[tensor.dtype]
