"""Dream's algorithms, per block: `origin`, `maskgit_plus`, `topk_margin`, `entropy`.

Times t_0 = 1 > t_1 > ... > t_S = eps are evenly spaced over a block's S steps. Step i transfers
the fraction f_i = 1 - t_{i+1} / t_i of what is masked, the last step everything:
    origin: each masked position independently with probability f_i
    the others: the int(masks * f_i) best positions by their score; with alg_temp > 0 drawn
        without replacement with probabilities softmax(score / alg_temp)
Source: DreamLM/Dream generation_utils.py (_sample); with block_length = gen_length it is the
reference's whole-canvas loop. Differences: each row counts its own masks (the reference takes
the batch's mean, so rows depend on one another); every draw is seeded per position; drawing
without replacement is done by adding Gumbel noise to the log-probabilities and taking the best,
which has the same distribution; times are float64, where the reference's float32 rounds
int(masks * f_i) the other way in about 3 of 100,000 pairs of step and mask count.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lacache_trt.decoding.draws import (
    ALG_TEMP_ID,
    ORIGIN_TRANSFER_ID,
    gumbel,
    position_bits,
    uniform,
)
from lacache_trt.decoding.policy import Commit, StepView
from lacache_trt.decoding.selection import checked_commit, take_best
from lacache_trt.decoding.truncation import LEAST_TEMPERATURE, Predictions, Truncation

_SCORES: dict[str, Callable[[Predictions], NDArray[np.float32]]] = {
    "maskgit_plus": lambda found: found.confidence,
    "topk_margin": lambda found: found.margin,
    "entropy": lambda found: found.neg_entropy,
}


def transfer_fractions(
    step_in_block: NDArray[np.int32], steps: int, eps: float
) -> NDArray[np.float64]:
    """1 - t_{i+1} / t_i of each row's step i, and 1 at the last step; float64 [B]."""
    times = np.linspace(1.0, eps, steps + 1)
    fractions = 1 - times[1:] / times[:-1]
    fractions[-1] = 1.0
    return fractions[np.minimum(step_in_block, steps - 1)]


class OriginPolicy:
    """Transfers each masked position independently of the others and of its confidence."""

    answer_columns: tuple[int, ...] = ()

    def __init__(self, truncation: Truncation, *, eps: float) -> None:
        self.needs_logits = truncation.needs_logits
        self._truncation = truncation
        self._eps = eps

    def __call__(self, view: StepView) -> Commit:
        """May commit nothing before the last step."""
        fractions = transfer_fractions(view.step_in_block, view.steps_per_block, self._eps)
        draws = uniform(position_bits(view, ORIGIN_TRANSFER_ID))
        selected = view.masked & (draws < fractions[:, None])
        return checked_commit(view, selected, self._truncation.predict(view, selected).token)


class RankedPolicy:
    """Transfers the positions with the best score.

    Args:
        truncation: how tokens are drawn.
        score: `maskgit_plus` (probability of the token), `topk_margin` (best minus second best
            probability) or `entropy` (negative entropy).
        eps: last time of the schedule.
        alg_temp: draws positions at random by score; None or 0 takes the best.
    """

    answer_columns: tuple[int, ...] = ()

    def __init__(
        self, truncation: Truncation, *, score: str, eps: float, alg_temp: float | None = None
    ) -> None:
        self.needs_logits = truncation.needs_logits
        self._truncation = truncation
        self._score = _SCORES[score]
        self._eps = eps
        self._alg_temp = alg_temp

    def __call__(self, view: StepView) -> Commit:
        """May commit nothing before the last step, when int(masks * fraction) is 0."""
        found = self._truncation.predict(view, view.masked)
        fractions = transfer_fractions(view.step_in_block, view.steps_per_block, self._eps)
        counts = (view.masked.sum(axis=1) * fractions).astype(np.int64)
        scores = self._score(found).astype(np.float64)
        if self._alg_temp:
            least = max(self._alg_temp, LEAST_TEMPERATURE)
            scores = scores / least + gumbel(position_bits(view, ALG_TEMP_ID))
        return checked_commit(view, take_best(scores, view.masked, counts), found.token)
