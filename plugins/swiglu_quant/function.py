"""ONNX function body of SwiGLUQuant; the rule is in `op`."""

# mypy: ignore-errors
from __future__ import annotations

from onnxscript import script

from lacache_trt.plugins.functions import FLOAT, FLOAT8, LACACHE
from lacache_trt.plugins.functions import FUNCTION_OPSET as op


@script(LACACHE, default_opset=op)
def SwiGLUQuant(gate_up):
    gate, up = op.Split(gate_up, axis=-1, num_outputs=2)
    wide = op.Cast(gate, to=FLOAT)
    one = op.Constant(value_float=1.0)
    silu = op.CastLike(op.Div(wide, op.Add(one, op.Exp(op.Neg(wide)))), gate_up)
    product = op.Mul(op.Cast(silu, to=FLOAT), op.Cast(up, to=FLOAT))
    values = op.Cast(op.CastLike(product, gate_up), to=FLOAT)

    shape = op.Shape(values)
    split = op.Concat(op.Shape(values, start=0, end=-1), op.Constant(value_ints=[-1, 128]), axis=0)
    groups = op.Reshape(values, split)
    amax = op.ReduceMax(op.Abs(groups), [-1], keepdims=1)
    zero = op.Less(amax, op.Constant(value_float=8.271806125530277e-25))
    divisor = op.Where(zero, one, op.Div(amax, op.Constant(value_float=448.0)))
    quantised = op.Cast(op.Reshape(op.Div(groups, divisor), shape), to=FLOAT8)
    scale = op.Squeeze(divisor, [-1])
    return quantised, scale
