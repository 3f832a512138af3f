"""FP8 E4M3 values with float32 scales: the arithmetic that every engine agrees on.

    scale = amax / 448                   over 128 values of a row, or a 128 x 128 block of a weight
    value = round_E4M3(x / scale)        nearest even;  x ~ value * scale
Both are true divisions in float32, so that torch, ONNX and Triton give the same bits. The quotient
never exceeds 448 by more than its rounding error, so nothing saturates. A scale per output channel
follows the same rule; a static scale, measured beforehand, saturates what exceeds it.

A group whose amax is below 2^-80 counts as zero: scale 1, values 0. So no scale is 0, and none so
small that the remainder of a division by it would not be exact.
A NaN or an infinity makes the scale NaN or infinite, and every product of its row NaN. (A maximum
that passes over NaN, such as ONNX Runtime's, leaves the scale finite; the byte is NaN then.)
Source: DeepSeek-V3's granularity (1 x 128 and 128 x 128), without its floor of 1e-4 on amax.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lacache_trt.errors import QuantisationError

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
GROUP = 128
ZERO_AMAX = 2.0**-80


def quantise_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """(E4M3 [..., K], float32 scales [..., K / 128]) of x [..., K]; K is a multiple of 128."""
    groups = x.float().unflatten(-1, (check_width(x.shape[-1]) // GROUP, GROUP))
    scale = scales(groups.abs().amax(dim=-1))
    return (groups / scale[..., None]).flatten(-2).to(E4M3), scale


def quantise_blocks(weight: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(E4M3 [out, in], float32 scales [ceil(out / 128), ceil(in / 128)]) of weight [out, in].

    Args:
        weight: any floating dtype; edge blocks are smaller.
        scale: other scales than amax / 448; what exceeds 448 then saturates.

    Raises:
        QuantisationError: a weight is NaN or infinite.
    """
    _check_finite(weight)
    if scale is None:
        scale = block_scales(weight)
    return quantise_static(weight, expand_blocks(scale, weight.shape)), scale


def quantise_channels(weight: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(E4M3 [out, in], float32 scales [out]) of weight [out, in]; as `quantise_blocks` else."""
    _check_finite(weight)
    if scale is None:
        scale = channel_scales(weight)
    return quantise_static(weight, scale[:, None]), scale


def quantise_static(x: Tensor, scale: Tensor) -> Tensor:
    """E4M3 of x / scale in float32; beyond 448 it saturates, NaN stays."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def dequantise_groups(
    quantised: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[..., K] of E4M3 values and their scales [..., K / 128], multiplied in `dtype`."""
    groups = quantised.to(dtype).unflatten(-1, (scale.shape[-1], GROUP))
    result: Tensor = (groups * scale.to(dtype)[..., None]).flatten(-2)
    return result


def dequantise_blocks(
    quantised: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[out, in] of E4M3 values and the scales of their blocks, multiplied in `dtype`."""
    return quantised.to(dtype) * expand_blocks(scale.to(dtype), quantised.shape)


def dequantise_channels(
    quantised: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[out, in] of E4M3 values and the scales [out] of their rows, multiplied in `dtype`."""
    return quantised.to(dtype) * scale.to(dtype)[:, None]


def channel_scales(weight: Tensor) -> Tensor:
    """amax / 448 of every output channel, a row of weight [out, in]."""
    return scales(weight.float().abs().amax(dim=1))


def block_scales(weight: Tensor) -> Tensor:
    """amax / 448 of every 128 x 128 block of weight [out, in]."""
    rows, columns = weight.shape
    padded = F.pad(weight.float().abs(), (0, -columns % GROUP, 0, -rows % GROUP))
    blocks = padded.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    return scales(blocks.amax(dim=(1, 3)))


def expand_blocks(scale: Tensor, shape: torch.Size) -> Tensor:
    """The scale of every element of a weight of this shape."""
    rows, columns = shape
    return scale.repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :columns]


def scales(amax: Tensor) -> Tensor:
    """amax / 448, or 1 where amax counts as zero; NaN stays.

    The divisor is a tensor: by a number, torch on a GPU multiplies with its reciprocal.
    """
    return torch.where(amax < ZERO_AMAX, 1.0, amax / torch.full_like(amax, E4M3_MAX))


def _check_finite(weight: Tensor) -> None:
    if not bool(torch.isfinite(weight).all()):
        raise QuantisationError(
            "a weight to quantise is NaN or infinite",
            got=f"{int((~torch.isfinite(weight)).sum())} of {weight.numel()} values",
            fix="convert the checkpoint again, or leave this linear out",
        )


def check_width(width: int) -> int:
    """The width if it is a multiple of 128.

    Raises:
        QuantisationError: it is not.
    """
    if width % GROUP:
        raise QuantisationError(
            "groups of 128 do not fit this width",
            got=width,
            expected="a multiple of 128",
            fix="leave this linear out of the FP8 recipe",
        )
    return width
