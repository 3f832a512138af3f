"""The ops that have a TensorRT plugin, and the packed program of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from lacache_trt.errors import EngineError
from lacache_trt.plugins.attention.plugin import plugin_program as attention
from lacache_trt.plugins.attention_fill.plugin import plugin_program as attention_fill
from lacache_trt.plugins.attention_reuse.plugin import plugin_program as attention_reuse
from lacache_trt.plugins.attention_window.plugin import plugin_program as attention_window
from lacache_trt.plugins.group_linear.plugin import plugin_program as group_linear
from lacache_trt.plugins.group_quant.plugin import plugin_program as group_quant
from lacache_trt.plugins.packing import PluginProgram, pack
from lacache_trt.plugins.rms_norm_quant.plugin import plugin_program as rms_norm_quant
from lacache_trt.plugins.sample_block.plugin import plugin_program as sample_block
from lacache_trt.plugins.swiglu_quant.plugin import plugin_program as swiglu_quant

# dtype (`DTYPE_INPUTS`) and last dimension of the first input (head size, width), SM -> program.
PROGRAMS: dict[str, Callable[[torch.dtype, int, int], PluginProgram]] = {
    "AttentionFill": attention_fill,
    "AttentionReuse": attention_reuse,
    "Attention": attention,
    "AttentionWindow": attention_window,
    "RMSNormQuant": rms_norm_quant,
    "SwiGLUQuant": swiglu_quant,
    "GroupQuant": group_quant,
    "GroupLinear": group_linear,
    "SampleBlock": sample_block,
}
# Index of the input whose dtype a program is made for, where it is not the first.
DTYPE_INPUTS = {"GroupLinear": 4}
KERNEL_SMS = (89, 90)


@lru_cache(maxsize=64)
def require_kernels(sm: int) -> None:
    """Raise `EngineError` if the plugins have no kernels for this SM."""
    if sm not in KERNEL_SMS:
        raise EngineError(
            "the plugins have no kernels for this GPU",
            got=f"sm_{sm}",
            expected=", ".join(f"sm_{known}" for known in KERNEL_SMS),
            fix="build the portable variant: --no-plugins",
        )


def packed_program(
    op: str, dtype: torch.dtype, width: int, sm: int, fp8_as_int32: bool = False
) -> bytes:
    """The bytes of a node's `program` attribute; compiled once per process.

    Args:
        op: ONNX operator type.
        dtype: of the node's first input, or of the one that `DTYPE_INPUTS` names.
        width: last dimension of the node's first input.
        sm: compute capability, 89 or 90.
        fp8_as_int32: FP8 tensors travel as INT32, four values to a word (TensorRT 8.5).

    Raises:
        EngineError: there are no kernels for this op or SM.
    """
    if op not in PROGRAMS:
        raise EngineError("this op has no plugin", got=op, expected=", ".join(PROGRAMS))
    require_kernels(sm)
    return pack(PROGRAMS[op](dtype, width, sm), sm, fp8_as_int32=fp8_as_int32)
