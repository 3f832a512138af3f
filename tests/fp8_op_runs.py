"""Runs an FP8 op by itself: as the torch operator, or as its ONNX function in onnxruntime.

Tensors enter and leave as float32, which holds every value of float16, bfloat16 and E4M3.
"""

from __future__ import annotations

from functools import cache

import onnx_ir as ir
import onnxruntime as ort
import torch
from torch import Tensor

from lacache_trt.plugins.functions import OPSET_VERSION, all_functions
from lacache_trt.plugins.spec import DOMAIN, NODE_ATTRIBUTES, VERSION, OpSpec

E4M3 = torch.float8_e4m3fn
IR_TYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    E4M3: ir.DataType.FLOAT8E4M3FN,
}


@cache
def one_node_session(
    spec: OpSpec, signature: tuple[tuple[torch.dtype, int], ...]
) -> ort.InferenceSession:
    """The op between casts from and to float32; `signature` is (dtype, rank) of each input."""
    inputs = [
        ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape([f"{name}{axis}" for axis in range(rank)]),
        )
        for name, (_, rank) in zip(spec.inputs, signature, strict=True)
    ]
    casts = [
        ir.node("Cast", [value], {"to": int(IR_TYPES[dtype])})
        for value, (dtype, _) in zip(inputs, signature, strict=True)
    ]
    node = ir.node(
        spec.name,
        [cast.outputs[0] for cast in casts],
        NODE_ATTRIBUTES,
        domain=DOMAIN,
        num_outputs=len(spec.outputs),
    )
    ends = [ir.node("Cast", [value], {"to": int(ir.DataType.FLOAT)}) for value in node.outputs]
    for end, name in zip(ends, spec.outputs, strict=True):
        end.outputs[0].name = name
        end.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        inputs,
        [end.outputs[0] for end in ends],
        nodes=[*casts, node, *ends],
        opset_imports={"": OPSET_VERSION, DOMAIN: VERSION},
        name="one_node",
    )
    model = ir.Model(graph, ir_version=10, functions=[all_functions()[spec.name]])
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(
        ir.serde.serialize_model(model).SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
    )


def run_function(spec: OpSpec, inputs: list[Tensor]) -> list[Tensor]:
    """float32 outputs of the ONNX function."""
    session = one_node_session(spec, tuple((value.dtype, value.ndim) for value in inputs))
    feeds = zip(spec.inputs, (value.float().numpy() for value in inputs), strict=True)
    return [torch.from_numpy(value) for value in session.run(None, dict(feeds))]


def run_reference(spec: OpSpec, inputs: list[Tensor]) -> list[Tensor]:
    """float32 outputs of the registered torch operator."""
    return [value.float() for value in spec.call(*inputs)]
