"""RMSNormQuant as a TensorRT plugin: the launch rule of `kernel` over the node's dimensions."""

from __future__ import annotations

import torch

from lacache_trt.plugins.expressions import constant, dimension
from lacache_trt.plugins.fp8 import E4M3, GROUP
from lacache_trt.plugins.packing import InputRule, LaunchRule, OutputRule, PluginProgram
from lacache_trt.plugins.rms_norm_quant.kernel import configurations


def plugin_program(dtype: torch.dtype, width: int, sm: int) -> PluginProgram:
    """The op for rows of `width` values of `dtype`."""
    batch, count = dimension("hidden", 0), dimension("hidden", 1)
    (configuration,) = configurations(dtype, width, sm)
    one, rows, groups = constant(1), batch * count, constant(width // GROUP)
    strides = {"scale_row": groups, "scale_group": one}
    return PluginProgram(
        op="RMSNormQuant",
        inputs=(
            InputRule("hidden", dtype, 3),
            InputRule("weight", dtype, 1),
            InputRule("eps", torch.float32, 1),
        ),
        outputs=(
            OutputRule("quantised", E4M3, (batch, count, constant(width))),
            OutputRule("scale", torch.float32, (batch, count, groups)),
        ),
        workspace=constant(0),
        launches=(LaunchRule(configuration, (rows, one, one), strides),),
    )
