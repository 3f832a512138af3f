"""A bundle's graph as TensorRT 8.5's parser gets it: plugins as nodes, fixed sizes, opset 17.

8.5 knows neither local functions nor strongly typed networks, so the functions go and the types of
all values travel beside the model, for the builder to ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, RemoveUnusedNodesPass

from lacache_trt.engines.tensorrt.attach_programs import AttachPrograms
from lacache_trt.engines.tensorrt.legacy_graph import LoweredGraph
from lacache_trt.engines.tensorrt.legacy_opset import LowerOpset
from lacache_trt.engines.tensorrt.legacy_share import LegacyShare
from lacache_trt.engines.tensorrt.legacy_sizes import FixSizes
from lacache_trt.engines.tensorrt.legacy_types import LegacyTypes, value_types
from lacache_trt.plugins.programs import PROGRAMS
from lacache_trt.plugins.spec import DOMAIN


def lower_graph(
    path: Path, sm: int, sizes: Mapping[str, int], share_weights: bool = False
) -> LoweredGraph:
    """The graph at `path` for one SM and one value of each symbol of the contract."""
    return lower_model(ir.load(path), sm, sizes, share_weights)


def lower_model(
    model: ir.Model, sm: int, sizes: Mapping[str, int], share_weights: bool = False
) -> LoweredGraph:
    """`lower_graph` of a model in memory, which is changed.

    Args:
        model: as exported.
        sm: compute capability of the kernels.
        sizes: value of each symbol.
        share_weights: make every large weight an input, not only tables that are too large.

    Raises:
        VerificationError: TensorRT 8.5 cannot have what the graph needs.
        EngineError: there are no kernels for the SM.
    """
    before = [value.name for value in (*model.graph.inputs, *model.graph.outputs)]
    model = AttachPrograms(sm, fp8_as_int32=True)(model).model
    _forget_plugin_functions(model)
    steps = (InlinePass(), FixSizes(sizes), LowerOpset(), RemoveUnusedNodesPass(), LegacyTypes())
    sharing = LegacyShare(share_weights)
    for step in (*steps, sharing):  # one by one: `Sequential` would wrap our errors in its own
        model = step(model).model
    after = [value.name for value in (*model.graph.inputs, *model.graph.outputs)]
    return LoweredGraph(
        data=ir.to_proto(model).SerializeToString(),
        types=value_types(model),
        absent=tuple(str(name) for name in before if name not in after),
        shared=sharing.shared,
    )


def _forget_plugin_functions(model: ir.Model) -> None:
    """A node whose function is not there stays a node."""
    for identifier, function in list(model.functions.items()):
        if function.domain == DOMAIN and function.name in PROGRAMS:
            del model.functions[identifier]
