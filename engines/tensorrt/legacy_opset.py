"""Lowers a graph's standard operators to opset 17, the newest that TensorRT 8.5's parser reads.

1. A reduction's `axes` input, an attribute until opset 18, becomes that attribute.
2. `allowzero` of Reshape goes: the sizes are fixed and none is zero. `num_outputs` of Split goes:
   its outputs say the same.
3. Operators whose later versions only take more types, or attributes that are not used here, stay
   as they are.
4. Any other operator that changed after opset 17 is refused.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from lacache_trt.errors import VerificationError

OPSET = 17
IR_VERSION = 8
_REDUCTIONS = frozenset({"ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"})
_DROPPED = {"Reshape": "allowzero", "Split": "num_outputs"}
_WIDENED = frozenset(
    {"Cast", "CastLike", "Concat", "Constant", "Cos", "Equal", "Identity", "Shape", "Sigmoid"}
    | {"Sin", "Squeeze", "Transpose", "Unsqueeze", "Where"}
)


class LowerOpset(ir.passes.InPlacePass):
    """See the rules above. Functions other than plugins must be inlined before."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        newest = model.opset_imports.get("", OPSET)
        for node in list(model.graph):
            if node.domain == "":
                _lower(node, newest)
        model.opset_imports[""] = OPSET
        model.graph.opset_imports[""] = OPSET
        # The exporter's IR version is newer than the parser's copy of the format.
        model.ir_version = IR_VERSION
        return ir.passes.PassResult(model, True)


def _lower(node: ir.Node, opset: int) -> None:
    if node.op_type in _REDUCTIONS:
        _axes_to_attribute(node)
    elif node.op_type in _DROPPED:
        node.attributes.pop(_DROPPED[node.op_type], None)
    elif node.op_type not in _WIDENED and _since(node.op_type, opset) > OPSET:
        raise VerificationError(
            f"the operator {node.op_type} changed after opset {OPSET}",
            got=f"{node.op_type}-{_since(node.op_type, opset)} in {node.name!r}",
            fix="this model cannot be built for TensorRT 8.5",
        )
    node.version = None


def _axes_to_attribute(node: ir.Node) -> None:
    node.attributes.pop("noop_with_empty_axes", None)
    if len(node.inputs) < 2 or node.inputs[1] is None:
        return
    axes = ir.convenience.get_const_tensor(node.inputs[1])
    if axes is None:
        raise VerificationError(
            f"the axes of {node.name!r} are computed",
            expected=f"constant axes, as opset {OPSET} has them in an attribute",
        )
    node.resize_inputs(1)
    node.attributes["axes"] = ir.AttrInt64s("axes", axes.numpy().tolist())


def _since(op: str, opset: int) -> int:
    return int(onnx.defs.get_schema(op, opset, "").since_version)
