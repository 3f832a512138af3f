"""The layers of a small window in one persistent kernel per kind of FFN.

A step over 32 tokens reads every weight once and does little else, so what it costs beyond that are
the gaps between its three hundred kernels. `plugins/window_layers` has none: it streams the weights
of one product while it finishes another.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from lacache_trt.model.transformer import Transformer, rope_tables
from lacache_trt.plugins.window_layers.launch import (
    HEAD,
    ROWS,
    LayerSizes,
    LayerStack,
    LayerWeights,
    serves,
)

HOPPER = (9, 0)
HALVES = ("gate_up", "down")


class FusedWindow:
    """The model's layers, as stacks of equal kind."""

    def __init__(self, model: Transformer, multiprocessors: int) -> None:
        # Not the model: its ops hold this, and a cycle would keep a closed engine's weights.
        self._frequencies = model.rope_frequencies(model.weight("embed.weight").device)
        layers = range(model.config.num_layers)
        runs = groupby(layers, key=lambda layer: f"layers.{layer}.down" in model.fp8)
        self._stacks: list[tuple[slice, LayerStack]] = []
        for fp8, run in runs:
            numbers = list(run)
            weights = [layer_weights(model, layer) for layer in numbers]
            stack = LayerStack(layer_sizes(model, fp8), weights, multiprocessors)
            self._stacks.append((slice(numbers[0], numbers[-1] + 1), stack))

    def run(
        self,
        columns: Tensor,
        ranges: tuple[Tensor, Tensor],
        cached: tuple[Tensor, Tensor],
        hidden: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """The residual [1, W, D] behind the layers; puts their K and V into `cached`.

        `columns` and `positions` [1, W]; `ranges` are valid_from and valid_to; `cached` are keys
        and values [L, 1, Hkv, N, 128]; `hidden` [1, W, D] is overwritten.
        """
        cos, sin = rope_tables(positions, self._frequencies)
        for layers, stack in self._stacks:
            kept = (tensor[layers] for tensor in cached)
            stack.launch(hidden, cos, sin, columns, *ranges, *kept)
        return hidden


def fused_window(model: Transformer) -> FusedWindow | None:
    """The fused layers, or None if the kernel does not serve the model or its device."""
    config, embedding = model.config, model.weight("embed.weight")
    if embedding.dtype != torch.bfloat16 or config.head_dim != HEAD or not _whole_ffns(model):
        return None
    device = embedding.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
        return None
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    if not all(w.is_contiguous() and w.data_ptr() % 16 == 0 for w in model.weights.values()):
        return None  # what the TMA needs
    kinds = {f"layers.{layer}.down" in model.fp8 for layer in range(config.num_layers)}
    if not all(serves(layer_sizes(model, fp8), multiprocessors) for fp8 in kinds):
        return None
    return FusedWindow(model, multiprocessors)


def _whole_ffns(model: Transformer) -> bool:
    """Whether the FP8 linears, if any, are both of some layers' FFNs."""
    layers = {name.rpartition(".")[0] for name in model.fp8}
    return model.fp8 == {f"{layer}.{half}" for layer in layers for half in HALVES}


def small_window(columns: Tensor) -> bool:
    """Whether the kernel serves windows of this shape [B, W]."""
    return columns.shape[0] == 1 and columns.shape[1] <= ROWS


def layer_sizes(model: Transformer, fp8: bool) -> LayerSizes:
    """The sizes of the model's layers whose FFN is FP8 or is not."""
    config = model.config
    return LayerSizes(
        hidden=config.hidden_size,
        query=config.query_size,
        key_value=config.num_kv_heads * config.head_dim,
        intermediate=config.intermediate_size,
        fp8=fp8,
        bias=config.qkv_bias,
        eps=config.norm_eps,
    )


def layer_weights(model: Transformer, layer: int) -> LayerWeights:
    """The tensors of one layer."""

    def weight(name: str, kind: str = "weight") -> Tensor:
        return model.weight(f"layers.{layer}.{name}.{kind}")

    def projection(kind: str) -> Tensor:
        if layer < model.config.num_layers - 1 or layer == 0:
            return weight("qkv", kind)
        # Elsewhere the last layer's queries are projected apart: of the rows that the head reads.
        return torch.cat([weight("q", kind), weight("kv", kind)], dim=-1)

    fp8 = f"layers.{layer}.down" in model.fp8
    return LayerWeights(
        attn_norm=weight("attn_norm"),
        qkv=projection("weight"),
        qkv_bias=projection("bias") if model.config.qkv_bias else None,
        attn_out=weight("attn_out"),
        ffn_norm=weight("ffn_norm"),
        gate_up=weight("gate_up"),
        gate_up_scale=weight("gate_up", "scale") if fp8 else None,
        down=weight("down"),
        down_scale=weight("down", "scale") if fp8 else None,
    )
