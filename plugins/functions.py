"""ONNX function bodies of the ops: standard operators only, so any runtime executes the graphs.

The bodies are written with onnxscript, one per op in its folder. Each declares the attributes that
the nodes carry for TensorRT's parser; nothing in a body reads them.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript import opset23 as _op
from onnxscript import values

from lacache_trt.plugins.spec import DOMAIN, NODE_ATTRIBUTES, VERSION

FUNCTION_OPSET = _op
FLOAT, INT32, INT64 = (
    int(kind) for kind in (ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64)
)
FLOAT8 = int(ir.DataType.FLOAT8E4M3FN)
OPSET_VERSION = 23
LACACHE = values.Opset(DOMAIN, VERSION)


def to_ir(script: values.OnnxFunction[Any, Any]) -> ir.Function:
    """The function as onnx_ir, with the node attributes declared and defaulted."""
    function = ir.serde.deserialize_function(script.to_function_proto())
    for name, value in NODE_ATTRIBUTES.items():
        function.attributes[name] = ir.AttrString(name, value)
    return function


def all_functions() -> dict[str, ir.Function]:
    """Function of every op by operator type."""
    from lacache_trt.plugins.attention.function import Attention
    from lacache_trt.plugins.attention_fill.function import AttentionFill
    from lacache_trt.plugins.attention_reuse.function import AttentionReuse
    from lacache_trt.plugins.attention_window.function import AttentionWindow
    from lacache_trt.plugins.group_linear.function import GroupLinear
    from lacache_trt.plugins.group_quant.function import GroupQuant
    from lacache_trt.plugins.rms_norm_quant.function import RMSNormQuant
    from lacache_trt.plugins.sample_block.function import SampleBlock
    from lacache_trt.plugins.swiglu_quant.function import SwiGLUQuant

    attention = (AttentionFill, AttentionReuse, Attention, AttentionWindow)
    scripts = (*attention, RMSNormQuant, SwiGLUQuant, GroupQuant, GroupLinear, SampleBlock)
    return {script.name: to_ir(script) for script in scripts}
