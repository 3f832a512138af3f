"""SampleBlock as a TensorRT plugin: the launch rules of `kernel` over the node's dimensions."""

from __future__ import annotations

import torch

from lacache_trt.plugins.expressions import constant, dimension
from lacache_trt.plugins.packing import InputRule, LaunchRule, OutputRule, PluginProgram
from lacache_trt.plugins.sample_block.kernel import CHUNK, FIELDS, configurations

FLOAT_BYTES = 4


def plugin_program(dtype: torch.dtype, vocabulary: int, sm: int) -> PluginProgram:
    """The op for logits of `dtype` over `vocabulary` ids; the same kernels on every SM."""
    batch, rows = dimension("logits", 0), dimension("logits", 1)
    chunks = constant(-(-vocabulary // CHUNK))
    scalars = {
        "rows_per_batch": rows,
        "vocabulary": dimension("logits", 2),
        "suppressed": dimension("suppress_ids", 1),
        "excluded": dimension("confidence_exclude_ids", 1),
        "chunks": chunks,
    }
    merge_scalars = {name: value for name, value in scalars.items() if name != "suppressed"}
    first, merge = configurations(dtype, vocabulary)
    one = constant(1)
    return PluginProgram(
        op="SampleBlock",
        inputs=(
            InputRule("logits", dtype, 3),
            InputRule("positions", torch.int32, 2),
            InputRule("temperature", torch.float32, 1),
            *(InputRule(name, torch.int32, 1) for name in ("seed", "step", "guide_row")),
            InputRule("cfg_scale", torch.float32, 1),
            *(
                InputRule(name, torch.int32, 2)
                for name in ("suppress_ids", "confidence_exclude_ids")
            ),
        ),
        outputs=(
            OutputRule("token", torch.int32, (batch, rows)),
            *(
                OutputRule(name, torch.float32, (batch, rows))
                for name in ("confidence", "margin", "neg_entropy")
            ),
        ),
        workspace=batch * rows * chunks * (FIELDS * FLOAT_BYTES),
        launches=(
            LaunchRule(first, (chunks, batch * rows, one), scalars),
            LaunchRule(merge, (batch * rows, one, one), merge_scalars),
        ),
    )
