"""AttentionFill as a TensorRT plugin: the launch rules of `kernel` over the node's dimensions."""

from __future__ import annotations

import torch

from lacache_trt.plugins.attention_fill.kernel import TILES, configurations
from lacache_trt.plugins.expressions import ceil_div, constant, dimension
from lacache_trt.plugins.packing import InputRule, LaunchRule, OutputRule, PluginProgram


def plugin_program(dtype: torch.dtype, head_dim: int, sm: int) -> PluginProgram:
    """The op for activations of `dtype` on `sm`."""
    batch, heads, length = (dimension("q", axis) for axis in range(3))
    scalars = {
        "heads": heads,
        "kv_heads": dimension("k", 1),
        "length": length,
        "block": dimension("block_columns", 1),
    }
    (configuration,) = configurations(dtype, head_dim, sm)
    grid = (ceil_div(length, TILES[sm].rows), heads, batch)
    state = (batch, heads, length)
    return PluginProgram(
        op="AttentionFill",
        inputs=(
            *(InputRule(name, dtype, 4) for name in ("q", "k", "v")),
            *(InputRule(name, torch.int32, 1) for name in ("valid_from", "valid_to")),
            InputRule("block_columns", torch.int32, 2),
        ),
        outputs=(
            OutputRule("fa_max", torch.float32, state),
            OutputRule("fa_sum", torch.float32, state),
            OutputRule("fa_acc", torch.float32, (*state, constant(head_dim))),
        ),
        workspace=constant(0),
        launches=(LaunchRule(configuration, grid, scalars),),
    )
