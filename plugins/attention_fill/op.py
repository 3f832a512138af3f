"""AttentionFill: the online-softmax state of layer 0's attention over the U keys (FACache).

For query i and the set U of valid keys outside the block,
    s_ij = q_i . k_j / sqrt(d)          m_i = max_{j in U} s_ij
    l_i = sum_{j in U} exp(s_ij - m_i)  a_i = sum_{j in U} exp(s_ij - m_i) v_j
and the state is (fa_max, fa_sum, fa_acc) = (m, l, a), natural-log units, float32. An empty U gives
(-inf, 0, 0). Rows of the block itself carry a state that nobody reads.
Source: LaCache (arXiv 2607.16339) section 3.2, FACache, as an independent U-only stream; the
online softmax is FlashAttention's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lacache_trt.plugins import masking
from lacache_trt.plugins.spec import OpSpec, register


def _output_specs(q: Tensor, *others: Tensor) -> Sequence[tuple[torch.dtype, Sequence[int]]]:
    state = torch.promote_types(q.dtype, torch.float32)
    return [(state, q.shape[:3]), (state, q.shape[:3]), (state, q.shape)]


def _reference(
    q: Tensor, k: Tensor, v: Tensor, valid_from: Tensor, valid_to: Tensor, block_columns: Tensor
) -> tuple[Tensor, ...]:
    length = k.shape[2]
    usable = masking.valid_columns(valid_from, valid_to, length)
    usable &= ~masking.block_membership(block_columns, length)
    scores = masking.scaled_scores(q, k).masked_fill(~usable[:, None, None, :], -torch.inf)
    fa_max = scores.amax(dim=-1)
    anchor = fa_max.masked_fill(fa_max == -torch.inf, 0.0)
    weights = torch.exp(scores - anchor[..., None])
    return fa_max, weights.sum(dim=-1), weights @ masking.grouped_values(v, q.shape[1])


ATTENTION_FILL = register(
    OpSpec(
        name="AttentionFill",
        inputs=("q", "k", "v", "valid_from", "valid_to", "block_columns"),
        outputs=("fa_max", "fa_sum", "fa_acc"),
        output_specs=_output_specs,
        reference=_reference,
    )
)
