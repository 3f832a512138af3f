"""SampleBlock: token, confidence, margin and negative entropy of each row of logits.

With g = guide_row[b], own row x_b and guide row x_g, in float32:
    x = x_b                                   if g == b
    x = x_g + (cfg_scale + 1) (x_b - x_g)     otherwise (classifier-free guidance)
    x[suppress_ids] = -inf
    token = argmax(x + temperature * gumbel)  ties: lowest id; temperature <= 0 is greedy
    y = x with y[confidence_exclude_ids] = -inf
    confidence = exp(y[token] - logsumexp y), margin = p_1 - p_2, neg_entropy = sum p log p
The noise is keyed on (seed, step, position, id): see `noise`. A NaN or +inf logit makes the
confidence NaN, which the runtime turns into an error.
logits [B, R, V]; positions [B, R]; every other input per row b; id lists padded with -1.
Outputs [B, R]: token int32, the others float32.
Source: LLaDA generate.py (add_gumbel_noise, low_confidence, cfg_scale and both EOS options), with
the documented differences: tie rule, float32 confidence, seeded noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lacache_trt.plugins.sample_block.noise import KEYS, PRIME
from lacache_trt.plugins.spec import OpSpec, register


def _output_specs(logits: Tensor, *others: Tensor) -> Sequence[tuple[torch.dtype, Sequence[int]]]:
    rows = logits.shape[:2]
    real = torch.promote_types(logits.dtype, torch.float32)
    return [(torch.int32, rows), (real, rows), (real, rows), (real, rows)]


def _mix(state: Tensor, word: Tensor, key: int) -> Tensor:
    base = (state + word.long() % PRIME + key) % PRIME
    square = base * base % PRIME
    return square * square % PRIME * base % PRIME


def gumbel_noise(seed: Tensor, step: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise float32 [B, R, V]; seed and step [B], positions [B, R]."""
    state = torch.zeros_like(seed, dtype=torch.int64)
    state = _mix(_mix(state, seed, KEYS[0]), step, KEYS[1])
    state = _mix(state[:, None], positions, KEYS[2])
    ids = torch.arange(vocab_size, device=seed.device)
    state = _mix(state[:, :, None], ids, KEYS[3])
    bits = _mix(state, torch.zeros_like(ids), KEYS[4]) >> 8
    uniform = (bits.float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _without_ids(logits: Tensor, ids: Tensor) -> Tensor:
    """Logits [B, R, V] with the ids [B, S] of each row set to -inf; -1 names nothing."""
    vocabulary = torch.arange(logits.shape[-1], device=logits.device)
    listed = (ids[:, :, None] == vocabulary).any(dim=1)
    return logits.masked_fill(listed[:, None, :], -torch.inf)


def _reference(
    logits: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    step: Tensor,
    guide_row: Tensor,
    cfg_scale: Tensor,
    suppress_ids: Tensor,
    confidence_exclude_ids: Tensor,
) -> tuple[Tensor, ...]:
    own = logits.to(torch.promote_types(logits.dtype, torch.float32))
    guide = own[guide_row.long()]
    guided = guide + (cfg_scale.to(own.dtype) + 1)[:, None, None] * (own - guide)
    alone = guide_row == torch.arange(guide_row.shape[0], device=guide_row.device)
    scores = _without_ids(torch.where(alone[:, None, None], own, guided), suppress_ids)

    noise = gumbel_noise(seed, step, positions, logits.shape[-1]).to(own.dtype)
    noisy = scores + temperature.to(own.dtype)[:, None, None] * noise
    token = torch.where((temperature > 0)[:, None, None], noisy, scores).argmax(dim=-1)

    # A broken logit stays, even of an excluded id: it has to reach the confidence.
    kept = _without_ids(scores, confidence_exclude_ids)
    kept = torch.where(scores < torch.inf, kept, scores)
    log_p = kept - kept.logsumexp(dim=-1, keepdim=True)
    confidence = log_p.gather(-1, token[..., None])[..., 0].exp()
    best = log_p.topk(2, dim=-1).values.exp()
    neg_entropy = (log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(dim=-1)
    return token.int(), confidence, best[..., 0] - best[..., 1], neg_entropy


SAMPLE_BLOCK = register(
    OpSpec(
        name="SampleBlock",
        inputs=(
            "logits",
            "positions",
            "temperature",
            "seed",
            "step",
            "guide_row",
            "cfg_scale",
            "suppress_ids",
            "confidence_exclude_ids",
        ),
        outputs=("token", "confidence", "margin", "neg_entropy"),
        output_specs=_output_specs,
        reference=_reference,
    )
)
