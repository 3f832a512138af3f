"""Keeps TensorRT's optimizer from expanding the noise hash without end.

The hash repeats x -> x^5 mod p. TensorRT rewrites Mod with its input occurring twice and walks the
resulting expression as a tree, whose size multiplies with every round: TensorRT-RTX 1.7 does not
come back. It does not walk through a Gather.

1. The result of an integer Mod that is not multiplied next (the end of a round) passes through a
   Gather of index 0 along a new axis, which is the identity.
2. Nothing else changes.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)
_PREFIX = "cut_integer_chain"


class CutIntegerChains(ir.passes.InPlacePass):
    """See the rules above. Functions must be inlined before."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        ends = [node for node in graph if node.op_type == "Mod" and _ends_a_round(node)]
        if not ends:
            return ir.passes.PassResult(model, False)
        axis = _constant(graph, "axis", np.array([-1], np.int64))
        first = _constant(graph, "first", np.array([0], np.int64))
        for node in ends:
            self._cut(graph, node.outputs[0], axis, first)
        return ir.passes.PassResult(model, True)

    @staticmethod
    def _cut(graph: ir.Graph, value: ir.Value, axis: ir.Value, first: ir.Value) -> None:
        uses = tuple(value.uses())
        tape = ir.tape.Tape()
        raised = tape.op("Unsqueeze", [value, axis])
        gathered = tape.op("Gather", [raised, first], {"axis": -1})
        same = tape.op("Squeeze", [gathered, axis])
        producer = value.producer()
        if producer is not None:
            graph.insert_after(producer, tape.nodes)
        for user, index in uses:
            user.replace_input_with(index, same)


def _ends_a_round(node: ir.Node) -> bool:
    value = node.outputs[0]
    users = [user.op_type for user, _ in value.uses()]
    integer = value.dtype is None or value.dtype in _INTEGERS
    return integer and bool(users) and "Mul" not in users


def _constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    value = ir.Value(name=f"{_PREFIX}.{name}", const_value=ir.tensor(array))
    graph.register_initializer(value)
    return value
