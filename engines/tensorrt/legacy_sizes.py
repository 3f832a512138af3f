"""Gives every symbol of a graph one value, for a TensorRT whose plans are built for fixed shapes.

1. A symbolic dimension of any value becomes the number that the sizes give it.
2. Arithmetic on shapes folds to constants; weights are neither read nor folded.
3. What has no elements goes: an operand of Concat, a graph output, and an input that nothing uses
   then. With R = 0 those are `logit_columns` and `logits`.
4. Nothing else changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir
from onnx_ir.passes.common import (
    IdentityEliminationPass,
    LiftConstantsToInitializersPass,
    RemoveUnusedNodesPass,
)
from onnxscript import optimizer


class FixSizes(ir.passes.InPlacePass):
    """See the rules above. Functions other than plugins must be inlined before."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.sizes = sizes

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        for value in _values(graph):
            if value.shape is not None:
                value.shape = value.shape.evaluate(self.sizes)
        _drop_empty_operands(graph)
        for value in [output for output in graph.outputs if is_empty(output)]:
            graph.outputs.remove(value)
        RemoveUnusedNodesPass()(model)
        _fold_shapes(model)
        for value in [each for each in graph.inputs if is_empty(each) and not each.uses()]:
            graph.inputs.remove(value)
        return ir.passes.PassResult(model, True)


def is_empty(value: ir.Value) -> bool:
    """Whether a value of known shape has no elements."""
    return value.shape is not None and any(dim == 0 for dim in value.shape)


def _values(graph: ir.Graph) -> Iterable[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _drop_empty_operands(graph: ir.Graph) -> None:
    for node in graph:
        if node.op_type == "Concat":
            kept = [each for each in node.inputs if each is not None and not is_empty(each)]
            for index, value in enumerate(kept):
                node.replace_input_with(index, value)
            node.resize_inputs(max(1, len(kept)))


def _fold_shapes(model: ir.Model) -> None:
    """The optimizer may neither load nor fold a weight, so weights are inputs meanwhile."""
    graph = model.graph
    weights = {
        name: value
        for name, value in graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    tensors = {name: value.const_value for name, value in weights.items()}
    for name, value in weights.items():
        graph.initializers.pop(name)
        value.const_value = None
        graph.inputs.append(value)
    # Not `optimize_ir`: its rewriting makes operators that 8.5's parser takes for fewer types.
    optimizer.fold_constants_ir(model)
    IdentityEliminationPass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    RemoveUnusedNodesPass()(model)
    for name, value in weights.items():
        graph.inputs.remove(value)
        value.const_value = tensors[name]
        if value.uses():
            graph.register_initializer(value)
