"""Adds the function body of every op of domain `lacache` that the graph uses.

1. Only functions that a node refers to are added.
2. Nodes keep domain, name and attributes: a runtime that knows the op replaces the node, another
   one executes the function.
"""

from __future__ import annotations

import onnx_ir as ir

from lacache_trt.plugins.functions import all_functions
from lacache_trt.plugins.spec import DOMAIN, VERSION


class AttachFunctions(ir.passes.InPlacePass):
    """See the rules above."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        used = {node.op_type for node in model.graph if node.domain == DOMAIN}
        for name, function in all_functions().items():
            if name in used:
                model.functions[function.identifier()] = function
        if used:
            model.opset_imports[DOMAIN] = VERSION
        return ir.passes.PassResult(model, bool(used))
