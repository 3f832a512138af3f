"""Folds shape arithmetic and removes what nothing uses, never reading a weight.

1. Weights become graph inputs while the optimizer runs, so it can neither fold nor load them.
2. onnxscript's optimizer folds constants, simplifies shapes and deduplicates.
3. Weights that are used become initializers again; others disappear.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import optimizer

from lacache_trt.export.passes.external_weights import parameter_name


class FoldShapes(ir.passes.InPlacePass):
    """See the rules above."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        weights = {
            name: value
            for name, value in graph.initializers.items()
            if parameter_name(name) is not None
        }
        for name, value in weights.items():
            graph.initializers.pop(name)
            value.const_value = None
            graph.inputs.append(value)
        optimizer.optimize_ir(model)
        for name, value in weights.items():
            graph.inputs.remove(value)
            if value.uses():
                graph.initializers[name] = value
        return ir.passes.PassResult(model, True)
