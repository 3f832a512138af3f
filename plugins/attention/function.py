"""ONNX function body of Attention; the rule is in `op`."""

# mypy: ignore-errors
from __future__ import annotations

from onnxscript import script

from lacache_trt.plugins.functions import FLOAT, INT64, LACACHE
from lacache_trt.plugins.functions import FUNCTION_OPSET as op


@script(LACACHE, default_opset=op)
def Attention(q, k, v, valid_from, valid_to):
    batch = op.Shape(q, start=0, end=1)
    rows = op.Shape(q, start=2, end=3)
    head_dim = op.Shape(q, start=3, end=4)
    kv_heads = op.Shape(k, start=1, end=2)
    columns = op.Range(
        op.Constant(value_int=0), op.Squeeze(op.Shape(k, start=2, end=3)), op.Constant(value_int=1)
    )
    first = op.Unsqueeze(op.Cast(valid_from, to=INT64), [1, 2, 3])
    end = op.Unsqueeze(op.Cast(valid_to, to=INT64), [1, 2, 3])
    usable = op.And(op.GreaterOrEqual(columns, first), op.Less(columns, end))

    # Query heads of one group are consecutive, so each key head serves a stack of their rows.
    grouped = op.Reshape(
        op.Cast(q, to=FLOAT),
        op.Concat(batch, kv_heads, op.Constant(value_ints=[-1]), head_dim, axis=0),
    )
    scale = op.Reciprocal(op.Sqrt(op.Cast(head_dim, to=FLOAT)))
    keys = op.Transpose(op.Cast(k, to=FLOAT), perm=[0, 1, 3, 2])
    scores = op.MatMul(op.Mul(grouped, scale), keys)
    masked = op.Where(usable, scores, op.Constant(value_float=float("-inf")))
    out = op.MatMul(op.Softmax(masked, axis=-1), op.Cast(v, to=FLOAT))
    heads = op.Reshape(out, op.Concat(batch, op.Shape(q, start=1, end=2), rows, head_dim, axis=0))
    token_major = op.Transpose(heads, perm=[0, 2, 1, 3])
    merged = op.Reshape(token_major, op.Concat(batch, rows, op.Constant(value_ints=[-1]), axis=0))
    return op.CastLike(merged, q)
