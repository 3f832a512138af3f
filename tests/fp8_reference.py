"""FP8 as NumPy and ml_dtypes compute it, and transformers' model with quantised linears.

Shares no code with the toolkit: scale = amax / 448 (1 for zeros) of 1 x 128 groups and 128 x 128
blocks, values rounded to nearest even by ml_dtypes.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

E4M3 = ml_dtypes.float8_e4m3fn
Array = NDArray[Any]


def quantised_blocks(weight: Array) -> tuple[Array, Array]:
    """Values E4M3 [out, in] and float32 scales [out / 128, in / 128], block by block."""
    rows, columns = weight.shape
    scales = np.ones((-(-rows // 128), -(-columns // 128)), np.float32)
    values = np.zeros(weight.shape, E4M3)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            block = weight[place].astype(np.float32)
            largest = np.abs(block).max()
            if largest > 0:
                scales[i, j] = largest / np.float32(448)
            values[place] = (block / scales[i, j]).astype(E4M3)
    return values, scales


def dequantised_blocks(values: Array, scales: Array) -> NDArray[np.float64]:
    """float64 [out, in]."""
    wide = np.repeat(np.repeat(scales.astype(np.float64), 128, 0), 128, 1)
    return values.astype(np.float64) * wide[: values.shape[0], : values.shape[1]]


def fake_quantised_rows(x: Tensor) -> Tensor:
    """x [..., K] after 1 x 128 quantisation and back, in x's own dtype."""
    groups = x.detach().numpy().reshape(*x.shape[:-1], -1, 128)
    largest = np.abs(groups).max(-1, keepdims=True).astype(np.float32)
    scales = np.where(largest > 0, largest / np.float32(448), np.float32(1))
    values = (groups.astype(np.float32) / scales).astype(E4M3)
    restored = values.astype(groups.dtype) * scales.astype(groups.dtype)
    return torch.from_numpy(restored.reshape(x.shape))


class QuantisedLinear(nn.Module):
    """A linear whose weight and input are quantised."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        quantised = dequantised_blocks(*quantised_blocks(weight.detach().float().numpy()))
        self.weight = nn.Parameter(torch.from_numpy(quantised).to(weight.dtype), False)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """fake_quantised(x) @ weight.T + bias"""
        product = fake_quantised_rows(x) @ self.weight.t()
        return product if self.bias is None else product + self.bias


def quantise_ffns(network: Any, layers: range) -> None:
    """Replace gate, up and down of these layers of a Llama or Qwen2."""
    for index in layers:
        mlp = network.model.layers[index].mlp
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(mlp, name, QuantisedLinear(getattr(mlp, name).weight))


def quantise_everything(network: Any) -> None:
    """Replace every linear; queries, keys and values share the blocks of one stacked weight."""
    layers = network.model.layers
    quantise_ffns(network, range(len(layers)))
    for layer in layers:
        attention = layer.self_attn
        parts = [getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")]
        stacked = QuantisedLinear(torch.cat([part.weight for part in parts]))
        rows = stacked.weight.split([len(part.weight) for part in parts])
        for name, part, weight in zip(("q_proj", "k_proj", "v_proj"), parts, rows, strict=True):
            linear = QuantisedLinear(part.weight, part.bias)
            linear.weight = nn.Parameter(weight, False)
            setattr(attention, name, linear)
        attention.o_proj = QuantisedLinear(attention.o_proj.weight)
    network.lm_head = QuantisedLinear(network.lm_head.weight)
