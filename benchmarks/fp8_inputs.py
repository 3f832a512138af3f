"""Inputs of GroupLinear's checks, their float64 products, and the bound of the matrix units.

`random_inputs` has outlier groups, an all-zero group and scales of many magnitudes. `exact_inputs`
has small integers and scales that are powers of two, so that every sum on the way is exact in what
the matrix units keep: the result must be the exact one, which finds a single wrong element that the
rounding bound of a long sum would hide.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kernel_checks import DEVICE
from torch import Tensor

from lacache_trt.plugins import fp8

BF16 = torch.bfloat16
# One matrix instruction of SM 90 adds 32 products to a sum, cut to 13 bits behind the leading one.
PER_INSTRUCTION = 32
KEPT = 2.0**-13
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def random_inputs(rows: int, columns: int, width: int, seed: int) -> Inputs:
    """(quantised, scale, weight, weight_scale) with outliers and a zero group."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=DEVICE)

    x = normal(rows, width) * torch.exp(2 * normal(rows, width // 128)).repeat_interleave(128, 1)
    x[rows // 2, : fp8.GROUP] = 0
    x[:, width // 3] *= 50
    x *= 2.0**-8  # the largest results stay below float16's limit
    weight = normal(columns, width) * torch.exp(normal(columns, 1)) * width**-0.5
    return (*fp8.quantise_groups(x), *fp8.quantise_blocks(weight))


def exact_inputs(rows: int, columns: int, width: int, seed: int) -> Inputs:
    """Integers up to 2 with scales 1, 2 and 4: a group's sum is at most 512, the result an integer
    below 2^24."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)

    def integers(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=generator, device=DEVICE).float()

    blocks = -(-columns // fp8.GROUP), width // fp8.GROUP
    return (
        integers(-2, 3, rows, width).to(fp8.E4M3),
        torch.exp2(integers(0, 3, rows, blocks[1])),
        integers(-2, 3, columns, width).to(fp8.E4M3),
        torch.exp2(integers(0, 3, *blocks)),
    )


def linear_truth(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(float64 product, float64 product of the magnitudes)."""
    quantised, scale, weight, weight_scale = inputs
    x = fp8.dequantise_groups(quantised, scale, torch.float64)
    w = fp8.dequantise_blocks(weight, weight_scale, torch.float64).t()
    return x @ w, x.abs() @ w.abs()


def accumulation_bound(inputs: Inputs) -> Tensor:
    """What the matrix units of SM 90 may lose, as `group_linear.kernel` derives it.

    The largest product of an instruction is bounded by the product of the largest factors.
    """
    quantised, scale, weight, weight_scale = inputs
    x, w = quantised.double(), weight.double()
    repeated = weight_scale.double().repeat_interleave(fp8.GROUP, 0)[: len(w)]
    bound = torch.zeros(len(x), len(w), dtype=torch.float64, device=x.device)
    for group in range(scale.shape[1]):
        total, lost = torch.zeros_like(bound), torch.zeros_like(bound)
        for first in range(group * fp8.GROUP, (group + 1) * fp8.GROUP, PER_INSTRUCTION):
            part = slice(first, first + PER_INSTRUCTION)
            largest = x[:, part].abs().amax(1)[:, None] * w[:, part].abs().amax(1)
            lost += (PER_INSTRUCTION + 1) * torch.maximum(total.abs(), largest)
            total += x[:, part] @ w[:, part].t()
            lost += total.abs()
        bound += lost * scale[:, group, None].double() * repeated[:, group]
    return bound * KEPT * (1 + 2.0**-7)  # the sum so far carries an error itself


def linear_bound(inputs: Inputs, truth: Tensor, magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole bound of a result in `dtype`, `truth` with its residual."""
    groups = inputs[1].shape[1]
    bound = accumulation_bound(inputs) + 3 * groups * 2.0**-24 * magnitude
    rounding = torch.finfo(dtype).eps / 2 * (truth.abs() + bound)
    return bound + rounding + torch.finfo(dtype).tiny + 2.0**-23 * truth.abs()


def library_scales(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Both scales as `torch._scaled_mm` wants them for scales of 1 x 128 and 128 x 128.

    Those of the rows with M innermost, those of the blocks transposed. It reads in steps of four:
    M must be a multiple of 4 and K one of 512, or it finds other scales than those meant.
    """
    _, scale, _, weight_scale = inputs
    return scale.t().contiguous().t(), weight_scale.t()


def scaled_product(stored: Sequence[Tensor]) -> Tensor:
    """cuBLASLt's product, of scales in its layouts."""
    quantised, scale, weight, weight_scale = stored
    return torch._scaled_mm(quantised, weight.t(), scale, weight_scale, out_dtype=BF16)
