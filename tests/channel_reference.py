"""FP8 per channel as NumPy and ml_dtypes compute it, in transformers' model, and its calibration.

Shares no code with the toolkit: weights have scale amax / 448 of each row [out, in], inputs one
given scale for the whole tensor and saturate at 448 times it; values round to nearest even.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from reference_model import ReferenceModel
from torch import Tensor, nn

E4M3 = ml_dtypes.float8_e4m3fn
Array = NDArray[Any]
QKV = ("q_proj", "k_proj", "v_proj")


def quantised_rows(weight: Array) -> tuple[Array, Array]:
    """Values E4M3 [out, in] and float32 scales [out]."""
    largest = np.abs(weight.astype(np.float32)).max(axis=1)
    scales = np.where(largest > 0, largest / np.float32(448), np.float32(1)).astype(np.float32)
    return (weight.astype(np.float32) / scales[:, None]).astype(E4M3), scales


def dequantised_rows(weight: Array) -> NDArray[np.float64]:
    """A weight [out, in] in FP8 and back."""
    values, scales = quantised_rows(weight)
    return values.astype(np.float64) * scales.astype(np.float64)[:, None]


def fake_quantised(x: Array, scale: float) -> Array:
    """x in FP8 by a static scale and back, in x's own dtype; beyond 448 it saturates."""
    factor = np.float32(scale)
    values = np.clip(x.astype(np.float32) / factor, -448, 448).astype(E4M3)
    return values.astype(x.dtype) * x.dtype.type(factor)


class ChannelLinear(nn.Module):
    """A linear of transformers in FP8."""

    def __init__(self, linear: nn.Linear, scale: float) -> None:
        super().__init__()
        weight = dequantised_rows(linear.weight.detach().float().numpy())
        self.weight = nn.Parameter(torch.from_numpy(weight).to(linear.weight.dtype), False)
        self.bias, self.scale = linear.bias, scale

    def forward(self, x: Tensor) -> Tensor:
        """fake_quantised(x) @ weight.T + bias"""
        rows = torch.from_numpy(fake_quantised(x.detach().numpy(), self.scale))
        product = rows @ self.weight.t()
        return product if self.bias is None else product + self.bias


def modules(network: Any, layers: int) -> dict[str, list[tuple[Any, str]]]:
    """By our name of a linear, the modules of transformers that make it up, as owner and name."""
    found: dict[str, list[tuple[Any, str]]] = {"head": [(network, "lm_head")]}
    for index, layer in enumerate(network.model.layers):
        attention, mlp, prefix = layer.self_attn, layer.mlp, f"layers.{index}."
        q, k, v = ((attention, name) for name in QKV)
        split = 0 < index == layers - 1
        found |= (
            {prefix + "q": [q], prefix + "kv": [k, v]} if split else {prefix + "qkv": [q, k, v]}
        )
        found[prefix + "attn_out"] = [(attention, "o_proj")]
        found[prefix + "gate_up"] = [(mlp, "gate_proj"), (mlp, "up_proj")]
        found[prefix + "down"] = [(mlp, "down_proj")]
    return found


def quantise_linears(network: Any, layers: int, scales: Mapping[str, float]) -> None:
    """Replace the linears that have a scale."""
    for name, parts in modules(network, layers).items():
        for owner, part in parts if name in scales else ():
            setattr(owner, part, ChannelLinear(getattr(owner, part), scales[name]))


def largest_inputs(
    reference: ReferenceModel, layers: int, prompts: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Largest magnitude before each linear while 64 tokens are decoded, one a forward, in blocks
    of 32; the last layer and the head are only fed the rows that predict the block."""
    inputs: dict[str, Tensor] = {}
    largest: dict[str, float] = {}
    parts = modules(reference.network, layers)
    hooks = [
        getattr(*found[0]).register_forward_pre_hook(_keep(inputs, name))
        for name, found in parts.items()
    ]
    read_only = {f"layers.{layers - 1}.{part}" for part in ("q", "attn_out", "gate_up", "down")}
    for prompt in prompts:
        tokens = np.array([*prompt, *[reference.mask_id] * 64])
        for step in range(64):
            block = len(prompt) + step // 32 * 32 + np.arange(32)
            logits = reference.row_logits(tokens.tolist())[block]
            read = block - 1 if reference.shift else block
            for name, x in inputs.items():
                rows = x[0, read] if name in read_only | {"head"} else x[0]
                largest[name] = max(largest.get(name, 0.0), float(rows.abs().max()))
            logits[:, reference.mask_id] = -np.inf
            open_ = tokens[block] == reference.mask_id
            shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
            confidence = np.where(open_, shifted.max(axis=1) / shifted.sum(axis=1), -1)
            best = int(confidence.argmax())
            tokens[block[best]] = int(logits[best].argmax())
    for hook in hooks:
        hook.remove()
    return largest


def _keep(inputs: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs[name] = arguments[0].detach()

    return hook
