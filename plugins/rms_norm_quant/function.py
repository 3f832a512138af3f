"""ONNX function body of RMSNormQuant; the rule is in `op`."""

# mypy: ignore-errors
from __future__ import annotations

from onnxscript import script

from lacache_trt.plugins.functions import FLOAT, FLOAT8, LACACHE
from lacache_trt.plugins.functions import FUNCTION_OPSET as op


@script(LACACHE, default_opset=op)
def RMSNormQuant(hidden, weight, eps):
    wide = op.Cast(hidden, to=FLOAT)
    mean = op.ReduceMean(op.Mul(wide, wide), [-1], keepdims=1)
    factor = op.Reciprocal(op.Sqrt(op.Add(mean, eps)))
    normal = op.CastLike(op.Mul(wide, factor), hidden)
    gain = op.Cast(weight, to=FLOAT)
    values = op.Cast(op.CastLike(op.Mul(op.Cast(normal, to=FLOAT), gain), hidden), to=FLOAT)

    shape = op.Shape(values)
    split = op.Concat(op.Shape(values, start=0, end=-1), op.Constant(value_ints=[-1, 128]), axis=0)
    groups = op.Reshape(values, split)
    amax = op.ReduceMax(op.Abs(groups), [-1], keepdims=1)
    zero = op.Less(amax, op.Constant(value_float=8.271806125530277e-25))
    divisor = op.Where(
        zero, op.Constant(value_float=1.0), op.Div(amax, op.Constant(value_float=448.0))
    )
    quantised = op.Cast(op.Reshape(op.Div(groups, divisor), shape), to=FLOAT8)
    scale = op.Squeeze(divisor, [-1])
    return quantised, scale
