"""AttentionWindow: attention of a window's rows, over cached keys and the window's own.

    out_i = sum_j softmax_j(q_i . k_j / sqrt(d)) v_j   over valid_from[b] <= j < valid_to[b]
where a column j of the window takes its key and value from `k_w` and `v_w`, and any other column
from the cache `k`, `v`. What the cache holds at the window's columns dates from an earlier step and
is never read. `window_columns` [B, W] is a run of consecutive columns in each row; behind it stand
pads of -1, whose keys nobody attends to and whose rows of `out` mean nothing.

q_w [B, Hq, M, d], k_w and v_w [B, Hkv, W, d], k and v [B, Hkv, N, d] with Hkv dividing Hq; out
[B, M, Hq * d] in q_w's dtype, token-major. M is W in the middle layers and the number of rows that
the head reads in the last.
Source: the dual and prefix caches of Fast-dLLM (arXiv 2505.22618) section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lacache_trt.plugins import masking
from lacache_trt.plugins.spec import OpSpec, register


def _output_specs(q_w: Tensor, *others: Tensor) -> Sequence[tuple[torch.dtype, Sequence[int]]]:
    batch, heads, count, head_dim = q_w.shape
    return [(q_w.dtype, (batch, count, heads * head_dim))]


def _reference(
    q_w: Tensor,
    k_w: Tensor,
    v_w: Tensor,
    k: Tensor,
    v: Tensor,
    window_columns: Tensor,
    valid_from: Tensor,
    valid_to: Tensor,
) -> tuple[Tensor, ...]:
    heads, length = q_w.shape[1], k.shape[2]
    valid = masking.valid_columns(valid_from, valid_to, length)
    kept = valid & ~masking.block_membership(window_columns, length)
    fresh = (window_columns >= valid_from[:, None]) & (window_columns < valid_to[:, None])
    usable = torch.cat([kept, fresh & (window_columns >= 0)], dim=1)[:, None, None, :]
    scores = torch.cat([masking.scaled_scores(q_w, k), masking.scaled_scores(q_w, k_w)], dim=-1)
    values = torch.cat([masking.grouped_values(part, heads) for part in (v, v_w)], dim=2)
    out = torch.softmax(scores.masked_fill(~usable, -torch.inf), dim=-1) @ values
    return (masking.token_major(out, q_w.dtype),)


ATTENTION_WINDOW = register(
    OpSpec(
        name="AttentionWindow",
        inputs=("q_w", "k_w", "v_w", "k", "v", "window_columns", "valid_from", "valid_to"),
        outputs=("out",),
        output_specs=_output_specs,
        reference=_reference,
    )
)
