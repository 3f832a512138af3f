"""Where an answer begins and ends: end tokens, and canvases that say nothing.

`first_end` is ODB-dLLM's adaptive length (arXiv 2511.21759; PKU-SEC-Lab/ODB-dLLM): the forward
that begins a block predicts every column from there on; the first end token that is confident
enough ends the canvas after its block. Differences: the model's end tokens only, where the
reference adds one for each task; with `prefix` and `dual` the columns that were cut are still
attended to until the block's next full forward.
`without_empty` keeps an answer from being empty: models tuned on short answers may say the end
token everywhere at once. It draws the first position without the end tokens, from its logits; users
of LLaDA in other runtimes settled on this.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lacache_trt.decoding.draws import gumbel, token_bits
from lacache_trt.decoding.policy import StepView
from lacache_trt.decoding.selection import probabilities


def first_end(
    token: NDArray[np.int32],
    confidence: NDArray[np.floating],
    columns: NDArray[np.int32],
    eos_ids: tuple[int, ...],
    threshold: float,
) -> int | None:
    """The first column, of those given ascending, that is surely an end token; or None."""
    sure = np.isin(token, eos_ids) & (confidence >= threshold)
    return int(columns[sure][0]) if sure.any() else None


def is_complete(tokens: NDArray[np.int32], mask_id: int, eos_ids: tuple[int, ...]) -> bool:
    """Whether these tokens hold an end token without a mask before it."""
    ends = np.flatnonzero(np.isin(tokens, eos_ids))
    return bool(len(ends)) and not (tokens[: ends[0]] == mask_id).any()


def without_empty(
    view: StepView,
    guarded: NDArray[np.bool_],
    logits: NDArray[np.float32],
    eos_ids: tuple[int, ...],
    temperature: float,
) -> StepView:
    """The view with the first block position of guarded rows drawn anew, without end tokens.

    guarded bool [B]; logits float32 [B, V] of that position. What the sampler would say: noise
    decides the token, the scores come from the noise-free logits.
    """
    token, confidence = view.token.copy(), view.confidence.copy()
    margin, neg_entropy = view.margin.copy(), view.neg_entropy.copy()
    block_logits = None if view.logits is None else view.logits.copy()
    forbidden = list(dict.fromkeys((*view.suppress_ids, *eos_ids)))
    for row in np.flatnonzero(guarded):
        noisy = logits[row].astype(np.float64)
        noisy[forbidden] = -np.inf
        if temperature > 0:
            key = (view.seed[row], view.step[row], view.positions[row, 0])
            noisy += temperature * gumbel(token_bits(*key, np.arange(len(noisy))))
        p = probabilities(logits[row], (*forbidden, *view.confidence_exclude_ids))
        second, first = np.partition(p, len(p) - 2)[-2:]
        positive = p[p > 0]
        token[row, 0] = noisy.argmax()
        confidence[row, 0] = p[token[row, 0]]
        margin[row, 0] = first - second
        neg_entropy[row, 0] = (positive * np.log(positive)).sum()
        if block_logits is not None:
            block_logits[row, 0, forbidden] = -np.inf
    return replace(
        view,
        token=token,
        confidence=confidence,
        margin=margin,
        neg_entropy=neg_entropy,
        logits=block_logits,
    )
