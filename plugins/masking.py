"""Which keys a row may attend to, shared by the attention references."""

from __future__ import annotations

import torch
from torch import Tensor


def valid_columns(valid_from: Tensor, valid_to: Tensor, length: int) -> Tensor:
    """Bool [B, length]: columns in [valid_from[b], valid_to[b])."""
    columns = torch.arange(length, device=valid_from.device)
    return (columns >= valid_from[:, None]) & (columns < valid_to[:, None])


def block_membership(block_columns: Tensor, length: int) -> Tensor:
    """Bool [B, length]: columns that belong to the row's block."""
    columns = torch.arange(length, device=block_columns.device)
    return (block_columns[:, :, None] == columns).any(dim=1)


def scaled_scores(q: Tensor, k: Tensor) -> Tensor:
    """Scores [B, Hq, M, N] of q [B, Hq, M, d] on k [B, Hkv, N, d], scaled by d**-0.5.

    In float32, or float64 for float64 inputs; each key head serves Hq / Hkv query heads.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    keys = k.to(compute).repeat_interleave(group, dim=1)
    products: Tensor = q.to(compute) @ keys.transpose(-1, -2)
    products *= float(q.shape[-1]) ** -0.5
    return products


def grouped_values(v: Tensor, num_heads: int) -> Tensor:
    """Values [B, Hq, N, d] in the compute dtype, repeated for each query head of a group."""
    compute = torch.promote_types(v.dtype, torch.float32)
    return v.to(compute).repeat_interleave(num_heads // v.shape[1], dim=1)


def token_major(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, H, N, d] to [B, N, H * d], ready for the output projection."""
    return heads.to(dtype).transpose(1, 2).flatten(2)
