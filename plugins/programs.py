"""The ops that have a TensorRT plugin, and the packed program of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from lacache_trt.errors import EngineError
from lacache_trt.plugins.attention.plugin import plugin_program as attention
from lacache_trt.plugins.attention_fill.plugin import plugin_program as attention_fill
from lacache_trt.plugins.attention_reuse.plugin import plugin_program as attention_reuse
from lacache_trt.plugins.packing import PluginProgram, pack
from lacache_trt.plugins.sample_block.plugin import plugin_program as sample_block

# dtype and last dimension of the first input (head size, vocabulary), SM -> program.
PROGRAMS: dict[str, Callable[[torch.dtype, int, int], PluginProgram]] = {
    "AttentionFill": attention_fill,
    "AttentionReuse": attention_reuse,
    "Attention": attention,
    "SampleBlock": sample_block,
}
KERNEL_SMS = (89, 90)


@lru_cache(maxsize=64)
def packed_program(op: str, dtype: torch.dtype, width: int, sm: int) -> bytes:
    """The bytes of a node's `program` attribute; compiled once per process.

    Args:
        op: ONNX operator type.
        dtype: of the node's first input.
        width: last dimension of the node's first input.
        sm: compute capability, 89 or 90.

    Raises:
        EngineError: there are no kernels for this op or SM.
    """
    if op not in PROGRAMS:
        raise EngineError("this op has no plugin", got=op, expected=", ".join(PROGRAMS))
    if sm not in KERNEL_SMS:
        raise EngineError(
            "the plugins have no kernels for this GPU",
            got=f"sm_{sm}",
            expected=", ".join(f"sm_{known}" for known in KERNEL_SMS),
            fix="build the portable variant: --no-plugins",
        )
    return pack(PROGRAMS[op](dtype, width, sm), sm)
