"""ONNX function body of AttentionReuse; the rule is in `op`.

Written per token, so no tile alignment enters: the cached state and the block's keys are merged
by their maxima, and the rows of the block are computed apart and put in their places.
"""

# mypy: ignore-errors
from __future__ import annotations

from onnxscript import script

from lacache_trt.plugins.functions import FLOAT, INT64, LACACHE
from lacache_trt.plugins.functions import FUNCTION_OPSET as op


@script(LACACHE, default_opset=op)
def AttentionReuse(
    q_c, k_c, v_c, q, k, v, fa_max, fa_sum, fa_acc, valid_from, valid_to, block_columns
):
    minus_one = op.Constant(value_ints=[-1])
    lowest = op.Constant(value_float=float("-inf"))
    batch = op.Shape(q, start=0, end=1)
    rows = op.Shape(q, start=2, end=3)
    head_dim = op.Shape(q, start=3, end=4)
    kv_heads = op.Shape(k, start=1, end=2)
    width = op.Shape(q_c, start=2, end=3)
    columns = op.Range(op.Constant(value_int=0), op.Squeeze(rows), op.Constant(value_int=1))
    block = op.Cast(block_columns, to=INT64)
    first = op.Unsqueeze(op.Cast(valid_from, to=INT64), [1])
    end = op.Unsqueeze(op.Cast(valid_to, to=INT64), [1])
    valid = op.And(op.GreaterOrEqual(columns, first), op.Less(columns, end))
    block_valid = op.Unsqueeze(op.And(op.GreaterOrEqual(block, first), op.Less(block, end)), [1, 2])
    matches = op.Cast(op.Equal(op.Unsqueeze(columns, [0, 2]), op.Unsqueeze(block, [1])), to=FLOAT)
    in_block = op.Greater(op.ReduceMax(matches, [2], keepdims=0), op.Constant(value_float=0.5))
    outside = op.Unsqueeze(op.And(valid, op.Not(in_block)), [1, 2])

    # Query heads of one group are consecutive, so each key head serves a stack of their rows.
    group_shape = op.Concat(batch, kv_heads, minus_one, head_dim, axis=0)
    scale = op.Reciprocal(op.Sqrt(op.Cast(head_dim, to=FLOAT)))
    queries = op.Mul(op.Reshape(op.Cast(q, to=FLOAT), group_shape), scale)
    block_queries = op.Mul(op.Reshape(op.Cast(q_c, to=FLOAT), group_shape), scale)
    block_keys = op.Transpose(op.Cast(k_c, to=FLOAT), perm=[0, 1, 3, 2])
    block_values = op.Cast(v_c, to=FLOAT)

    column_shape = op.Concat(batch, kv_heads, minus_one, op.Constant(value_ints=[1]), axis=0)
    state_max = op.Reshape(fa_max, column_shape)
    state_sum = op.Reshape(fa_sum, column_shape)
    state_acc = op.Reshape(fa_acc, group_shape)
    scores = op.Where(block_valid, op.MatMul(queries, block_keys), lowest)
    merged_max = op.Max(state_max, op.ReduceMax(scores, [-1], keepdims=1))
    anchor = op.Where(op.Equal(merged_max, lowest), op.Constant(value_float=0.0), merged_max)
    carried = op.Exp(op.Sub(state_max, anchor))
    weights = op.Exp(op.Sub(scores, anchor))
    total = op.Add(op.Mul(carried, state_sum), op.ReduceSum(weights, [-1], keepdims=1))
    gathered = op.Add(op.Mul(carried, state_acc), op.MatMul(weights, block_values))
    outside_out = op.Div(gathered, total)

    keys = op.Transpose(op.Cast(k, to=FLOAT), perm=[0, 1, 3, 2])
    outside_scores = op.Where(outside, op.MatMul(block_queries, keys), lowest)
    own_scores = op.Where(block_valid, op.MatMul(block_queries, block_keys), lowest)
    shares = op.Softmax(op.Concat(outside_scores, own_scores, axis=-1), axis=-1)
    block_out = op.MatMul(shares, op.Concat(op.Cast(v, to=FLOAT), block_values, axis=2))

    heads = op.Shape(q, start=1, end=2)
    all_rows = op.Reshape(
        op.Transpose(
            op.Reshape(outside_out, op.Concat(batch, heads, rows, head_dim, axis=0)),
            perm=[0, 2, 1, 3],
        ),
        op.Concat(batch, rows, minus_one, axis=0),
    )
    block_rows = op.Reshape(
        op.Transpose(
            op.Reshape(block_out, op.Concat(batch, heads, width, head_dim, axis=0)),
            perm=[0, 2, 1, 3],
        ),
        op.Concat(batch, width, minus_one, axis=0),
    )
    slots = op.Unsqueeze(op.ArgMax(matches, axis=2, keepdims=0), [2])
    placed = op.GatherND(block_rows, slots, batch_dims=1)
    out = op.Where(op.Unsqueeze(in_block, [2]), placed, all_rows)
    return op.CastLike(out, q)
