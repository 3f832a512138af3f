"""ONNX function body of GroupLinear; the rule and the bound of its rounding are in `op`.

Both sides are multiplied with their scales and go through one float32 product: the partial sums of
every group would take K / 128 times the memory of the result.
"""

# mypy: ignore-errors
from __future__ import annotations

from onnxscript import script

from lacache_trt.plugins.functions import FLOAT, LACACHE
from lacache_trt.plugins.functions import FUNCTION_OPSET as op


@script(LACACHE, default_opset=op)
def GroupLinear(quantised, scale, weight, weight_scale, like):
    wide = op.Cast(quantised, to=FLOAT)
    split = op.Concat(op.Shape(wide, start=0, end=-1), op.Constant(value_ints=[-1, 128]), axis=0)
    scaled = op.Mul(op.Reshape(wide, split), op.Unsqueeze(scale, [-1]))
    rows = op.Reshape(scaled, op.Shape(wide))

    # The scale of every block, repeated 128 times along both axes; edge blocks are cut.
    block_shape = op.Shape(weight_scale)
    blocks = op.Unsqueeze(weight_scale, [1, 3])
    size = op.Constant(value_ints=[128])
    repeated = op.Expand(
        blocks,
        op.Concat(
            op.Slice(block_shape, [0], [1]), size, op.Slice(block_shape, [1], [2]), size, axis=0
        ),
    )
    padded = op.Reshape(repeated, op.Mul(block_shape, op.Constant(value_ints=[128, 128])))
    factor = op.Slice(padded, [0], op.Shape(weight, start=0, end=1), [0])
    columns = op.Mul(op.Cast(weight, to=FLOAT), factor)
    return op.CastLike(op.MatMul(rows, op.Transpose(columns, perm=[1, 0])), like)
