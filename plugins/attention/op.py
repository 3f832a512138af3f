"""Attention: bidirectional attention of M query rows on the valid keys of each batch row.

    out_i = sum_j softmax_j(q_i . k_j / sqrt(d)) v_j   over valid_from[b] <= j < valid_to[b]
q [B, Hq, M, d], k and v [B, Hkv, N, d] with Hkv dividing Hq; out [B, M, Hq * d] in q's dtype,
token-major. M is N in the middle layers and the number of rows that the head reads in the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lacache_trt.plugins import masking
from lacache_trt.plugins.spec import OpSpec, register


def _output_specs(q: Tensor, *others: Tensor) -> Sequence[tuple[torch.dtype, Sequence[int]]]:
    batch, heads, length, head_dim = q.shape
    return [(q.dtype, (batch, length, heads * head_dim))]


def _reference(
    q: Tensor, k: Tensor, v: Tensor, valid_from: Tensor, valid_to: Tensor
) -> tuple[Tensor, ...]:
    valid = masking.valid_columns(valid_from, valid_to, k.shape[2])[:, None, None, :]
    scores = masking.scaled_scores(q, k).masked_fill(~valid, -torch.inf)
    out = torch.softmax(scores, dim=-1) @ masking.grouped_values(v, q.shape[1])
    return (masking.token_major(out, q.dtype),)


ATTENTION = register(
    OpSpec(
        name="Attention",
        inputs=("q", "k", "v", "valid_from", "valid_to"),
        outputs=("out",),
        output_specs=_output_specs,
        reference=_reference,
    )
)
