"""ONNX function body of AttentionWindow; the rule is in `op`."""

# mypy: ignore-errors
from __future__ import annotations

from onnxscript import script

from lacache_trt.plugins.functions import FLOAT, INT64, LACACHE
from lacache_trt.plugins.functions import FUNCTION_OPSET as op


@script(LACACHE, default_opset=op)
def AttentionWindow(q_w, k_w, v_w, k, v, window_columns, valid_from, valid_to):
    minus_one = op.Constant(value_ints=[-1])
    batch = op.Shape(q_w, start=0, end=1)
    rows = op.Shape(q_w, start=2, end=3)
    head_dim = op.Shape(q_w, start=3, end=4)
    kv_heads = op.Shape(k, start=1, end=2)
    columns = op.Range(
        op.Constant(value_int=0), op.Squeeze(op.Shape(k, start=2, end=3)), op.Constant(value_int=1)
    )
    window = op.Cast(window_columns, to=INT64)
    first = op.Unsqueeze(op.Cast(valid_from, to=INT64), [1])
    end = op.Unsqueeze(op.Cast(valid_to, to=INT64), [1])
    valid = op.And(op.GreaterOrEqual(columns, first), op.Less(columns, end))
    matches = op.Cast(op.Equal(op.Unsqueeze(columns, [0, 2]), op.Unsqueeze(window, [1])), to=FLOAT)
    in_window = op.Greater(op.ReduceMax(matches, [2], keepdims=0), op.Constant(value_float=0.5))
    kept = op.And(valid, op.Not(in_window))
    real = op.GreaterOrEqual(window, op.Constant(value_int=0))
    own = op.And(real, op.And(op.GreaterOrEqual(window, first), op.Less(window, end)))
    usable = op.Unsqueeze(op.Concat(kept, own, axis=1), [1, 2])

    # Query heads of one group are consecutive, so each key head serves a stack of their rows.
    group_shape = op.Concat(batch, kv_heads, minus_one, head_dim, axis=0)
    scale = op.Reciprocal(op.Sqrt(op.Cast(head_dim, to=FLOAT)))
    queries = op.Mul(op.Reshape(op.Cast(q_w, to=FLOAT), group_shape), scale)
    cached_keys = op.Transpose(op.Cast(k, to=FLOAT), perm=[0, 1, 3, 2])
    own_keys = op.Transpose(op.Cast(k_w, to=FLOAT), perm=[0, 1, 3, 2])
    scores = op.Concat(op.MatMul(queries, cached_keys), op.MatMul(queries, own_keys), axis=-1)
    masked = op.Where(usable, scores, op.Constant(value_float=float("-inf")))
    values = op.Concat(op.Cast(v, to=FLOAT), op.Cast(v_w, to=FLOAT), axis=2)
    out = op.MatMul(op.Softmax(masked, axis=-1), values)
    heads = op.Reshape(out, op.Concat(batch, op.Shape(q_w, start=1, end=2), rows, head_dim, axis=0))
    token_major = op.Transpose(heads, perm=[0, 2, 1, 3])
    merged = op.Reshape(token_major, op.Concat(batch, rows, minus_one, axis=0))
    return op.CastLike(merged, q_w)
