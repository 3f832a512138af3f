"""A bundle's graph as TensorRT's parser gets it."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from lacache_trt.engines.tensorrt.attach_programs import AttachPrograms
from lacache_trt.engines.tensorrt.cut_integer_chains import CutIntegerChains
from lacache_trt.engines.tensorrt.share_weights import share_weights


def prepare_graph(path: Path, plugin_sm: int | None, shared: bool = False) -> bytes:
    """The ONNX model with its weights still in the bundle's weights file.

    With `plugin_sm` the ops become plugins for that SM. Without it their functions are inlined:
    the parser would do that by itself, but takes our `Attention` for the standard operator of that
    name, because it looks at names and not at domains. `shared` makes inputs of the large weights.
    """
    model = ir.load(path)
    if plugin_sm is not None:
        model = AttachPrograms(plugin_sm)(model).model
    else:
        model = CutIntegerChains()(InlinePass()(model).model).model
    message = share_weights(model) if shared else ir.to_proto(model)
    data: bytes = message.SerializeToString()
    return data
