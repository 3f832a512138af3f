"""ONNX function body of GroupQuant; the rule is in `op`."""

# mypy: ignore-errors
from __future__ import annotations

from onnxscript import script

from lacache_trt.plugins.functions import FLOAT, FLOAT8, LACACHE
from lacache_trt.plugins.functions import FUNCTION_OPSET as op


@script(LACACHE, default_opset=op)
def GroupQuant(x):
    values = op.Cast(x, to=FLOAT)
    shape = op.Shape(values)
    split = op.Concat(op.Shape(values, start=0, end=-1), op.Constant(value_ints=[-1, 128]), axis=0)
    groups = op.Reshape(values, split)
    amax = op.ReduceMax(op.Abs(groups), [-1], keepdims=1)
    zero = op.Less(amax, op.Constant(value_float=8.271806125530277e-25))
    one = op.Constant(value_float=1.0)
    factor = op.Where(zero, one, op.Div(amax, op.Constant(value_float=448.0)))
    quantised = op.Cast(op.Reshape(op.Div(groups, factor), shape), to=FLOAT8)
    scale = op.Squeeze(factor, [-1])
    return quantised, scale
