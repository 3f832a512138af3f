"""Rows and columns picked and put by index: Gather and Where only, never a shape or a slice.

Indices are int32 inputs of the graphs. Were they to reach a Slice or a shape, TensorRT would want
them on the host, and a captured CUDA graph would freeze them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def rows_of(values: Tensor, columns: Tensor) -> Tensor:
    """values[b, columns[b, j]] as [B, M, ...] for values [B, N, ...] and columns [B, M].

    One Gather on the flattened rows, which takes int32 indices in every runtime.
    """
    batch, length = values.shape[:2]
    offsets = torch.arange(batch, device=columns.device, dtype=columns.dtype)[:, None] * length
    table = values.reshape(batch * length, -1)
    picked = nn.functional.embedding(columns + offsets, table)
    return picked.reshape(*columns.shape, *values.shape[2:])


def place_block(values: Tensor, block_values: Tensor, block_columns: Tensor) -> Tensor:
    """values [B, N, D] with the block's rows taken from block_values [B, Bk, D]."""
    width = block_columns.shape[1]
    columns = torch.arange(values.shape[1], device=values.device, dtype=block_columns.dtype)
    slots = columns[None, :] - block_columns[:, :1]
    inside = (slots >= 0) & (slots < width)
    return torch.where(inside[..., None], rows_of(block_values, slots.clamp(0, width - 1)), values)


def place_columns(values: Tensor, block_values: Tensor, block_columns: Tensor) -> Tensor:
    """values [B, H, N, d] with the block's columns taken from block_values [B, H, Bk, d]."""
    heads, width = values.shape[1], block_columns.shape[1]
    columns = torch.arange(values.shape[2], device=values.device, dtype=block_columns.dtype)
    slots = columns[None, :] - block_columns[:, :1]
    inside = (slots >= 0) & (slots < width)
    per_head = slots.clamp(0, width - 1)[:, None, :].expand(-1, heads, -1)
    picked = rows_of(block_values.flatten(0, 1), per_head.flatten(0, 1))
    return torch.where(inside[:, None, :, None], picked.unflatten(0, (-1, heads)), values)
