"""ONNX function body of AttentionFill; the rule is in `op`."""

# mypy: ignore-errors
from __future__ import annotations

from onnxscript import script

from lacache_trt.plugins.functions import FLOAT, INT64, LACACHE
from lacache_trt.plugins.functions import FUNCTION_OPSET as op


@script(LACACHE, default_opset=op)
def AttentionFill(q, k, v, valid_from, valid_to, block_columns):
    infinity = op.Constant(value_float=float("inf"))
    batch = op.Shape(q, start=0, end=1)
    heads = op.Shape(q, start=1, end=2)
    rows = op.Shape(q, start=2, end=3)
    head_dim = op.Shape(q, start=3, end=4)
    kv_heads = op.Shape(k, start=1, end=2)
    columns = op.Range(
        op.Constant(value_int=0), op.Squeeze(op.Shape(k, start=2, end=3)), op.Constant(value_int=1)
    )
    first = op.Unsqueeze(op.Cast(valid_from, to=INT64), [1])
    end = op.Unsqueeze(op.Cast(valid_to, to=INT64), [1])
    valid = op.And(op.GreaterOrEqual(columns, first), op.Less(columns, end))
    matches = op.Equal(op.Unsqueeze(op.Cast(block_columns, to=INT64), [2]), columns)
    in_block = op.ReduceMax(op.Cast(matches, to=FLOAT), [1], keepdims=0)
    usable = op.Unsqueeze(op.And(valid, op.Less(in_block, op.Constant(value_float=0.5))), [1, 2])

    # Query heads of one group are consecutive, so each key head serves a stack of their rows.
    grouped = op.Reshape(
        op.Cast(q, to=FLOAT),
        op.Concat(batch, kv_heads, op.Constant(value_ints=[-1]), head_dim, axis=0),
    )
    scale = op.Reciprocal(op.Sqrt(op.Cast(head_dim, to=FLOAT)))
    keys = op.Transpose(op.Cast(k, to=FLOAT), perm=[0, 1, 3, 2])
    scores = op.Where(usable, op.MatMul(op.Mul(grouped, scale), keys), op.Neg(infinity))
    peak = op.ReduceMax(scores, [-1], keepdims=1)
    anchor = op.Where(op.Equal(peak, op.Neg(infinity)), op.Constant(value_float=0.0), peak)
    weights = op.Exp(op.Sub(scores, anchor))
    total = op.ReduceSum(weights, [-1], keepdims=1)
    gathered = op.MatMul(weights, op.Cast(v, to=FLOAT))
    per_row = op.Concat(batch, heads, rows, axis=0)
    fa_max = op.Reshape(peak, per_row)
    fa_sum = op.Reshape(total, per_row)
    fa_acc = op.Reshape(gathered, op.Concat(per_row, head_dim, axis=0))
    return fa_max, fa_sum, fa_acc
