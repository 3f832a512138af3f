"""Gives every op of domain `lacache` the kernels that make it a plugin on one SM.

1. A node of an op with a plugin gets the INT8 tensor attribute `program`.
2. The op's function declares the attribute, so that the model stays valid ONNX.
3. Nodes of one op with the same dtype and width get the same bytes.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch

from lacache_trt.errors import EngineError
from lacache_trt.plugins.packing import FIELD
from lacache_trt.plugins.programs import DTYPE_INPUTS, PROGRAMS, packed_program
from lacache_trt.plugins.spec import DOMAIN

_DTYPES = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
}


class AttachPrograms(ir.passes.InPlacePass):
    """See the rules above."""

    def __init__(self, sm: int, fp8_as_int32: bool = False) -> None:
        super().__init__()
        self.sm = sm
        self.fp8_as_int32 = fp8_as_int32

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        changed = False
        for node in model.graph:
            if node.domain == DOMAIN and node.op_type in PROGRAMS:
                dtype, width = _key(node)
                data = packed_program(node.op_type, dtype, width, self.sm, self.fp8_as_int32)
                tensor = ir.tensor(np.frombuffer(data, np.int8), name=FIELD)
                node.attributes[FIELD] = ir.AttrTensor(FIELD, tensor)
                changed = True
        for function in model.functions.values():
            if function.domain == DOMAIN and function.name in PROGRAMS:
                function.attributes[FIELD] = ir.Attr(FIELD, ir.AttributeType.TENSOR, None)
        return ir.passes.PassResult(model, changed)


def _key(node: ir.Node) -> tuple[torch.dtype, int]:
    """Dtype and last dimension of the first input; some ops take the dtype of another one."""
    first, value = node.inputs[0], node.inputs[DTYPE_INPUTS.get(node.op_type, 0)]
    shape = first.shape if first is not None else None
    width = shape[len(shape) - 1] if shape is not None and len(shape) else None
    if value is None or value.dtype not in _DTYPES or not isinstance(width, int):
        raise EngineError(
            f"the {node.op_type} node {node.name!r} has no known dtype and width",
            got=f"{value.dtype if value is not None else None} {shape}",
            expected="float16, bfloat16 or float32 and a fixed last dimension",
            fix="export the bundle again with this version",
        )
    return _DTYPES[value.dtype], width
