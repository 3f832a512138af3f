"""Dream's token sampling: temperature, nucleus and top-k over raw logits.

For one position with raw logits x, in float64 and in this order:
    x[suppress_ids] = -inf;  x = x / temperature (if > 0)
    top_p: keep ids by falling probability until their sum exceeds top_p, the crossing id included
    top_k: keep ids whose logit is at least the k-th largest kept one (ties stay)
    p = softmax of what is kept
    token = argmax(x + gumbel) at temperature > 0, which draws from p; else argmax(p)
    confidence = p[token], margin = p_1 - p_2, neg_entropy = sum p log p, rounded to float32
Source: DreamLM/Dream generation_utils.py (sample_tokens). Differences: ties go to the lowest id,
the draw is seeded per position, p is float64 where the reference keeps the model's dtype, and
p log p of p = 0 is 0 where the reference adds 1e-10 inside the logarithm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lacache_trt.decoding.draws import gumbel, token_bits
from lacache_trt.decoding.policy import StepView
from lacache_trt.errors import EngineError
from lacache_trt.generation import GenerationConfig

# A logit this far below the best one loses whatever the noise: the noise has 23 bits, so it lies
# between gumbel(0) and gumbel(2**23 - 1). Skipping such ids is exact and saves most hashes.
_EXTREMES = gumbel(np.array([0, 2**23 - 1], np.int64))
NOISE_SPAN = float(_EXTREMES[1] - _EXTREMES[0])
# Float32 scores that differ do so by more than 1e-46, so a temperature below this draws alike; and
# a division by it stays finite.
LEAST_TEMPERATURE = 1e-200


@dataclass(frozen=True)
class Predictions:
    """Token and scores of each block position: int32 [B, Bk], float32 [B, Bk]."""

    token: NDArray[np.int32]
    confidence: NDArray[np.float32]
    margin: NDArray[np.float32]
    neg_entropy: NDArray[np.float32]


@dataclass(frozen=True)
class Truncation:
    """How tokens are drawn from logits.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_p: nucleus, None or 1 for no cut.
        top_k: largest k, None for no cut.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None

    @classmethod
    def from_config(cls, config: GenerationConfig) -> Truncation:
        """The three settings of a request."""
        return cls(config.temperature, config.top_p, config.top_k)

    @property
    def needs_logits(self) -> bool:
        """False when the engine's own greedy outputs say the same."""
        cuts = self.top_k is not None or (self.top_p is not None and self.top_p < 1)
        return cuts or self.temperature > 0

    def predict(self, view: StepView, wanted: NDArray[np.bool_]) -> Predictions:
        """Token and scores of the `wanted` positions, bool [B, Bk]; others keep the engine's.

        Raises `EngineError` if logits are needed and the view has none.
        """
        found = Predictions(view.token, view.confidence, view.margin, view.neg_entropy)
        if not self.needs_logits:
            return found
        if view.logits is None:
            raise EngineError(
                "this policy samples from logits and the engine returned none",
                expected="logits of every column of the block",
                fix="use temperature=0 without top_p and top_k, or an engine with logits",
            )
        found = Predictions(
            found.token.copy(),
            found.confidence.copy(),
            found.margin.copy(),
            found.neg_entropy.copy(),
        )
        for row, column in np.argwhere(wanted):
            key = (view.seed[row], view.step[row], view.positions[row, column])
            logits = np.asarray(view.logits[row, column], np.float64).copy()
            logits[list(view.suppress_ids)] = -np.inf
            token, confidence, margin, neg_entropy = self._draw(logits, key)
            found.token[row, column] = token
            found.confidence[row, column] = confidence
            found.margin[row, column] = margin
            found.neg_entropy[row, column] = neg_entropy
        return found

    def _draw(
        self, logits: NDArray[np.float64], key: tuple[np.int64, np.int32, np.int32]
    ) -> tuple[int, float, float, float]:
        if self.temperature > 0:
            logits = logits / max(self.temperature, LEAST_TEMPERATURE)
        ids = kept_ids(logits, self.top_p, self.top_k)
        kept = logits[ids]
        p = np.exp(kept - kept.max())
        p /= p.sum()
        choice = int(np.argmax(kept))
        if self.temperature > 0:
            near = np.flatnonzero(kept >= kept.max() - NOISE_SPAN)
            noisy = kept[near] + gumbel(token_bits(*key, ids[near]))
            choice = int(near[np.argmax(noisy)])
        best = np.partition(p, len(p) - 2)[-2:] if len(p) > 1 else np.array([0.0, p[0]])
        positive = p[p > 0]
        neg_entropy = float((positive * np.log(positive)).sum())
        return int(ids[choice]), float(p[choice]), float(best[1] - best[0]), neg_entropy


def kept_ids(
    logits: NDArray[np.float64], top_p: float | None, top_k: int | None
) -> NDArray[np.int64]:
    """Ids that survive both cuts, ascending; float64 [V] logits, -inf for suppressed ids."""
    ids = np.flatnonzero(np.isfinite(logits))
    if top_p is not None and top_p < 1:
        ids = _nucleus(logits, ids, top_p)
    if top_k is not None and top_k < len(ids):
        threshold = np.partition(logits[ids], len(ids) - top_k)[len(ids) - top_k]
        ids = ids[logits[ids] >= threshold]
    return ids


def _nucleus(
    logits: NDArray[np.float64], ids: NDArray[np.int64], top_p: float
) -> NDArray[np.int64]:
    p = np.exp(logits[ids] - logits[ids].max())
    p /= p.sum()
    # Ids below (1 - top_p) / V weigh less than 1 - top_p together: the sum crosses before them.
    heavy = np.flatnonzero(p >= (1 - top_p) / (2 * len(p)))
    order = heavy[np.argsort(-p[heavy], kind="stable")]
    before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
    kept: NDArray[np.int64] = np.sort(ids[order[before <= top_p]])
    return kept
