"""GroupQuant as a TensorRT plugin: the launch rule of `kernel` over the node's dimensions."""

from __future__ import annotations

import torch

from lacache_trt.plugins.expressions import constant, dimension
from lacache_trt.plugins.fp8 import E4M3, GROUP
from lacache_trt.plugins.group_quant.kernel import TILE, configurations
from lacache_trt.plugins.packing import InputRule, LaunchRule, OutputRule, PluginProgram
from lacache_trt.plugins.triton_support import ceil_div


def plugin_program(dtype: torch.dtype, width: int, sm: int) -> PluginProgram:
    """The op for rows of `width` values of `dtype`."""
    batch, count = dimension("x", 0), dimension("x", 1)
    groups = width // GROUP
    (configuration,) = configurations(dtype, width, sm)
    strides = {"scale_row": constant(groups), "scale_group": constant(1)}
    grid = (constant(ceil_div(groups, TILE)), batch * count, constant(1))
    return PluginProgram(
        op="GroupQuant",
        inputs=(InputRule("x", dtype, 3),),
        outputs=(
            OutputRule("quantised", E4M3, (batch, count, constant(width))),
            OutputRule("scale", torch.float32, (batch, count, constant(groups))),
        ),
        workspace=constant(0),
        launches=(LaunchRule(configuration, grid, strides),),
    )
