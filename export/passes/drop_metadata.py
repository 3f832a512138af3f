"""Removes what the exporter recorded about the machine it ran on.

1. Stack traces, module paths and documentation strings of nodes, values and graph go.
2. The graph is called by its contract name.
"""

from __future__ import annotations

import onnx_ir as ir


class DropMetadata(ir.passes.InPlacePass):
    """See the rules above."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        model.graph.name = self.name
        model.producer_name = "lacache-trt"
        model.producer_version = None
        model.doc_string = None
        model.metadata_props.clear()
        model.graph.metadata_props.clear()
        model.graph.doc_string = None
        for node in model.graph:
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()
        for value in (*model.graph.inputs, *model.graph.initializers.values()):
            value.metadata_props.clear()
        return ir.passes.PassResult(model, True)
