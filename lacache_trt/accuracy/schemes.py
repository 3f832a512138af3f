"""FP8 schemes as rules in float32: what remains of activations and weights after E4M3.

Every rule quantises and dequantises: x ~ round_E4M3(x / scale) * scale with saturation at +-448.
They differ only in who shares a scale, where it comes from, and how precise it is itself.
A group of zeros keeps its zeros; a NaN or an infinity makes its group NaN, never a finite number.
`scales` and the 1 x 128 and 128 x 128 rules are those of the engines (`plugins/fp8.py`).

x is float32 [B, N, K] with a sequence in each row b; weights are [out, in].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lacache_trt.plugins.fp8 import (
    E4M3,
    E4M3_MAX,
    check_width,
    dequantise_blocks,
    dequantise_groups,
    quantise_blocks,
    quantise_groups,
    scales,
)

MOSS_GROUP = 32
MOSS_LEAST_EXPONENT = -127
SMOOTH_ALPHA = 0.5
SMOOTH_FLOOR = 1e-5

ActivationRule = Callable[[Tensor, Tensor], Tensor]
WeightRule = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Scheme:
    """How the operands of a linear are quantised.

    Attributes:
        name: what the command line calls it.
        title: what a table calls it.
        source: where the rule comes from.
        activations: from x [B, N, K] and the calibrated abs max [K] of its channels, x in FP8
            and back.
        weights: from a weight [out, in], the weight in FP8 and back.
        smooth: SmoothQuant's migration comes first.
    """

    name: str
    title: str
    source: str
    activations: ActivationRule
    weights: WeightRule
    smooth: bool = False


def fake_quantise(x: Tensor, scale: Tensor) -> Tensor:
    """round_E4M3(x / scale) * scale, saturating; NaN where x is NaN or infinite."""
    quotient = (x / scale).clamp(-E4M3_MAX, E4M3_MAX) + (x - x)
    return quotient.to(E4M3).float() * scale


def static_tensor(x: Tensor, channel_amax: Tensor) -> Tensor:
    """One scale for every input of the linear: the calibrated abs max / 448."""
    return fake_quantise(x, scales(channel_amax.max()))


def dynamic_token(x: Tensor, channel_amax: Tensor) -> Tensor:
    """A scale per row of K values, measured at run time."""
    return fake_quantise(x, scales(x.abs().amax(dim=-1, keepdim=True)))


def dynamic_groups(x: Tensor, channel_amax: Tensor) -> Tensor:
    """A scale per 128 values of a row, measured at run time."""
    return dequantise_groups(*quantise_groups(x))


def two_levels(x: Tensor, channel_amax: Tensor) -> Tensor:
    """A float32 scale per sequence and a power of two, at most 1, per 32 values of a row.

    s_i = amax_i / 448, s = max s_i, x / (s * 2**ceil(log2(s_i / s))): the exponent is rounded up,
    so nothing saturates. The coarse level is a sequence, not the batch: a batch then equals its
    rows run alone.
    """
    groups = x.unflatten(-1, (-1, MOSS_GROUP))
    amax = groups.abs().amax(dim=-1, keepdim=True)
    coarse = scales(amax.amax(dim=(-3, -2), keepdim=True))
    ratio = scales(amax) / coarse
    mantissa, exponent = torch.frexp(torch.where(amax > 0, ratio, 1.0).clamp(max=1.0))
    exponent = (exponent - (mantissa == 0.5).to(exponent.dtype)).clamp(min=MOSS_LEAST_EXPONENT)
    fine = torch.ldexp(torch.ones_like(amax), exponent) + (amax - amax)
    return fake_quantise(groups, coarse * fine).flatten(-2)


def weight_tensor(weight: Tensor) -> Tensor:
    """One scale for the whole weight."""
    return fake_quantise(weight, scales(weight.abs().max()))


def weight_channels(weight: Tensor) -> Tensor:
    """A scale per output channel, a row of [out, in]."""
    return fake_quantise(weight, scales(weight.abs().amax(dim=1, keepdim=True)))


def weight_blocks(weight: Tensor) -> Tensor:
    """A scale per 128 x 128 block."""
    check_width(weight.shape[1])
    return dequantise_blocks(*quantise_blocks(weight))


def smoothing(channel_amax: Tensor, weights: list[Tensor], alpha: float = SMOOTH_ALPHA) -> Tensor:
    """SmoothQuant's factor per input channel: float32 [in].

    s_j = max|X_j|**alpha / max|W_j|**(1 - alpha) over all consumers [out, in] of the norm, both
    floored at 1e-5; the norm is divided by it and the consumers' columns are multiplied.
    """
    largest = torch.stack([weight.float().abs().amax(dim=0) for weight in weights]).amax(dim=0)
    largest = largest.clamp(min=SMOOTH_FLOOR) ** (1 - alpha)
    return (channel_amax.float() ** alpha / largest).clamp(min=SMOOTH_FLOOR)


_SCHEMES = (
    Scheme(
        "tensor",
        "per tensor, static",
        "the common baseline: calibrated activation scale, one weight scale",
        static_tensor,
        weight_tensor,
    ),
    Scheme(
        "token",
        "per token x per channel",
        "rowwise FP8 of serving engines and of torch._scaled_mm",
        dynamic_token,
        weight_channels,
    ),
    Scheme(
        "group",
        "1x128 x 128x128",
        "LaCache (arXiv 2607.16339) and DeepSeek-V3 (arXiv 2412.19437)",
        dynamic_groups,
        weight_blocks,
    ),
    Scheme(
        "moss",
        "MOSS, two levels",
        "MOSS (arXiv 2511.05811): float32 per sequence x powers of two per 32, weights per tensor",
        two_levels,
        weight_tensor,
    ),
    Scheme(
        "smooth",
        "SmoothQuant, per tensor",
        "SmoothQuant (arXiv 2211.10438) with alpha 0.5, then the static per-tensor rule",
        static_tensor,
        weight_tensor,
        smooth=True,
    ),
)
SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in _SCHEMES}
