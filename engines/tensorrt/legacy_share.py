"""Turns weights of a lowered graph into inputs, which TensorRT 8.5 does not see while it builds.

1. A float16 or float32 weight of at least LARGE_TABLE bytes that a Gather reads becomes a graph
   input of its own name, behind the other inputs and in the order of the weights file: a layer
   around a table of a gigabyte took 241 s to compile on an H200.
2. If all are to be shared, so does every such weight of at least LARGE bytes, whoever reads it.
   TensorRT then neither reads nor lays out weights, and plans are small.
3. FP8 weights, which 8.5 takes for int32 words, and everything else stay as they are.
"""

from __future__ import annotations

import onnx_ir as ir

from lacache_trt.contract import TensorSpec
from lacache_trt.engines.tensorrt.share_weights import LARGE, dtype_name, weight_tensors

LARGE_TABLE = 64 << 20
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


class LegacyShare(ir.passes.InPlacePass):
    """See the rules above; `shared` says which weights the last model gave."""

    def __init__(self, all_weights: bool) -> None:
        super().__init__()
        self.all_weights = all_weights
        self.shared: tuple[TensorSpec, ...] = ()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        found = []
        for name, tensor in weight_tensors(model).items():
            value = graph.initializers[name]
            if not self._is_shared(value, tensor):
                continue
            found.append(TensorSpec(name, tuple(tensor.shape.numpy()), dtype_name(tensor)))
            graph.initializers.pop(name)
            value.const_value = None
            graph.inputs.append(value)
        self.shared = tuple(found)
        return ir.passes.PassResult(model, bool(found))

    def _is_shared(self, value: ir.Value, tensor: ir.ExternalTensor) -> bool:
        if tensor.dtype not in _FLOATS:
            return False
        if self.all_weights and tensor.nbytes >= LARGE:
            return True
        return tensor.nbytes >= LARGE_TABLE and _is_gathered(value)


def _is_gathered(value: ir.Value) -> bool:
    return any(node.op_type == "Gather" and index == 0 for node, index in value.uses())
