"""Fast-dLLM's parallel decoding: `threshold` and `factor`.

With the confidences of a row's masked positions sorted, c_0 >= c_1 >= ...:
    threshold: commit c_0, and every other position with c_i >= threshold
    factor: with limit_i = 1 - factor / (i + 2) for i >= 1, let t be the first i >= 1 with
        c_i < limit_i, or the last index if there is none; commit the t best, and the last one too
        where t is the last index
Both commit at least one position per step, so a block takes at most as many steps as it has masks.
Source: NVlabs/Fast-dLLM llada/generate.py (get_transfer_index, get_transfer_index_dynamic);
arXiv 2505.22618, section 3.3. Its quirk is kept: a violation at exactly the last position commits
that position nevertheless. Differences: confidences are the engine's float32 where the reference
takes a float64 softmax (`confidence_dtype="float64"` does the same); rows have their own counts
where the reference decodes one row; the mask id is never predicted, where the reference can
predict it for ever. A threshold above 1 commits one position per step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lacache_trt.decoding.policy import Commit, StepView
from lacache_trt.decoding.selection import checked_commit, take_best


def best_of_each_row(view: StepView) -> NDArray[np.bool_]:
    """The most confident masked position of each row: bool [B, Bk]."""
    return take_best(view.confidence, view.masked, np.ones(len(view.masked), np.int64))


def distinct_from_one(threshold: float) -> float:
    """The threshold, but one above 1 stays there when NumPy rounds it to confidences' float32."""
    return max(threshold, 1 + 2.0**-23) if threshold > 1 else threshold


class ThresholdPolicy:
    """Commits the best position and all that are at least `threshold` confident."""

    needs_logits = False
    answer_columns: tuple[int, ...] = ()

    def __init__(self, *, threshold: float) -> None:
        self._threshold = distinct_from_one(threshold)

    def __call__(self, view: StepView) -> Commit:
        """At least one position of a row that has a mask."""
        sure = view.masked & (view.confidence >= self._threshold)
        return checked_commit(view, sure | best_of_each_row(view), view.token)


class FactorPolicy:
    """Commits as many positions as their confidences allow together."""

    needs_logits = False
    answer_columns: tuple[int, ...] = ()

    def __init__(self, *, factor: float) -> None:
        self._factor = factor

    def __call__(self, view: StepView) -> Commit:
        """At least one position of a row that has a mask."""
        pairs = zip(view.confidence, view.masked, strict=True)
        counts = [self._count(np.sort(scores[masked])[::-1]) for scores, masked in pairs]
        selected = take_best(view.confidence, view.masked, np.array(counts, np.int64))
        return checked_commit(view, selected, view.token)

    def _count(self, ranked: NDArray[np.floating]) -> int:
        """How many of these falling confidences are committed."""
        last = len(ranked) - 1
        if last < 1:
            return len(ranked)
        limits = 1 - self._factor / (np.arange(1, last + 1) + 2.0)
        below = np.flatnonzero(ranked[1:] < limits)
        first = int(below[0]) + 1 if len(below) else last
        return first + (first == last)
