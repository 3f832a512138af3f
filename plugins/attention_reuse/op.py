"""AttentionReuse: layer 0's attention of one denoising step, from the cached state (FACache).

Rows outside the block start from (m, l, a) over the U keys and stream only the block's keys C:
    m' = max(m, max_{j in C} s_ij)      o = (e^{m - m'} a + sum_C e^{s - m'} v) /
                                            (e^{m - m'} l + sum_C e^{s - m'})
Rows of the block take their queries from `q_c` and stream every key: the U keys from `k`, `v`, the
block's own from `k_c`, `v_c`. What `q`, `k`, `v` hold at the block's columns dates from the fill
and is never read. Output [B, N, Hq * d] in the model dtype, token-major.
Source: LaCache (arXiv 2607.16339) section 3.2 and Algorithm 1, with the state kept apart from the
stream that continues from it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lacache_trt.plugins import masking
from lacache_trt.plugins.spec import OpSpec, register


def _output_specs(
    q_c: Tensor, k_c: Tensor, v_c: Tensor, q: Tensor, *others: Tensor
) -> Sequence[tuple[torch.dtype, Sequence[int]]]:
    batch, heads, length, head_dim = q.shape
    return [(q.dtype, (batch, length, heads * head_dim))]


def _continue_from_state(
    scores: Tensor, values: Tensor, fa_max: Tensor, fa_sum: Tensor, fa_acc: Tensor
) -> Tensor:
    """Merge the keys of `scores` into the state and normalise."""
    peak = torch.maximum(fa_max, scores.amax(dim=-1))
    anchor = peak.masked_fill(peak == -torch.inf, 0.0)
    carried = torch.exp(fa_max - anchor)
    weights = torch.exp(scores - anchor[..., None])
    total = carried * fa_sum + weights.sum(dim=-1)
    return (carried[..., None] * fa_acc + weights @ values) / total[..., None]


def _reference(
    q_c: Tensor,
    k_c: Tensor,
    v_c: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fa_max: Tensor,
    fa_sum: Tensor,
    fa_acc: Tensor,
    valid_from: Tensor,
    valid_to: Tensor,
    block_columns: Tensor,
) -> tuple[Tensor, ...]:
    heads, length = q.shape[1], k.shape[2]
    in_block = masking.block_membership(block_columns, length)
    valid = masking.valid_columns(valid_from, valid_to, length)
    block_valid = valid.gather(1, block_columns.long())[:, None, None, :]
    outside = (valid & ~in_block)[:, None, None, :]
    block_values = masking.grouped_values(v_c, heads)

    scores = masking.scaled_scores(q, k_c).masked_fill(~block_valid, -torch.inf)
    out = _continue_from_state(scores, block_values, fa_max, fa_sum, fa_acc)

    block_scores = torch.cat(
        [
            masking.scaled_scores(q_c, k).masked_fill(~outside, -torch.inf),
            masking.scaled_scores(q_c, k_c).masked_fill(~block_valid, -torch.inf),
        ],
        dim=-1,
    )
    values = torch.cat([masking.grouped_values(v, heads), block_values], dim=2)
    block_out = torch.softmax(block_scores, dim=-1) @ values
    rows = block_columns.long()[:, None, :, None].expand_as(block_out)
    return (masking.token_major(out.scatter(2, rows, block_out), q.dtype),)


ATTENTION_REUSE = register(
    OpSpec(
        name="AttentionReuse",
        inputs=(
            "q_c",
            "k_c",
            "v_c",
            "q",
            "k",
            "v",
            "fa_max",
            "fa_sum",
            "fa_acc",
            "valid_from",
            "valid_to",
            "block_columns",
        ),
        outputs=("out",),
        output_specs=_output_specs,
        reference=_reference,
    )
)
