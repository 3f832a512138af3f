"""KLASS: commit what is confident and no longer moves.

For each position of the block, with p its distribution at this step and q at the last one:
    KL = sum_v p_v (log(p_v + 1e-12) - log(q_v + 1e-12)), with q = 0 before the first step
    stable if the last `kl_history` KLs are all < kl_threshold, not before step kl_history - 1
    ready if masked, stable and confidence > threshold (strictly)
If any position of a row is ready, all ready ones are committed; else the scheduled number of the
most confident ones (`steps`). What is left at a block's last step is committed.
Source: KLASS (arXiv 2511.05664; shkim0116/KLASS, LLaDA version). q = 0 makes a first KL of about
27, so nothing is stable before two distributions were compared.
Differences: distributions are kept for the active block alone and start anew with it, where the
reference keeps the whole canvas (with a history of 2 a later block may commit one step later
here); suppressed ids, the mask id among them, are out of the distributions; the reference leaves
a block with masks after its last step. Its Dream version (no blocks, >=, no step guard) is not
offered: with Dream's models this is the same LLaDA rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lacache_trt.decoding.policy import Commit, StepView
from lacache_trt.decoding.schedule import scheduled_counts
from lacache_trt.decoding.selection import checked_commit, probabilities, take_best
from lacache_trt.errors import EngineError

_TINY = 1e-12


@dataclass(frozen=True)
class Drift:
    """What KLASS remembers of a row.

    Attributes:
        distribution: float32 [Bk, V] of the last step.
        divergences: float64 [kl_history, Bk], the newest last; zeros before the first.
    """

    distribution: NDArray[np.float32]
    divergences: NDArray[np.float64]


class KlassPolicy:
    """Commits confident positions whose distribution has settled."""

    needs_logits = True
    answer_columns: tuple[int, ...] = ()

    def __init__(self, *, threshold: float, kl_threshold: float, kl_history: int) -> None:
        self._threshold = threshold
        self._kl_threshold = kl_threshold
        self._kl_history = kl_history

    def __call__(self, view: StepView) -> Commit:
        """May commit nothing at a step for which the schedule says nothing."""
        if view.logits is None:
            raise EngineError(
                "klass compares distributions and the engine returned no logits",
                expected="logits of every column of the block",
                fix="use an engine with logits, or policy='threshold'",
            )
        ready = np.zeros_like(view.masked)
        memory = []
        for row, logits in enumerate(view.logits):
            drift = self._follow(view, row, logits)
            memory.append(drift)
            if view.step_in_block[row] >= self._kl_history - 1:
                ready[row] = (drift.divergences < self._kl_threshold).all(axis=0)
        ready &= view.masked & (view.confidence > self._threshold)
        scheduled = take_best(view.confidence, view.masked, scheduled_counts(view))
        is_last = (view.step_in_block >= view.steps_per_block - 1)[:, None]
        selected = np.where(ready.any(axis=1, keepdims=True) & ~is_last, ready, scheduled)
        return checked_commit(view, selected, view.token, tuple(memory))

    def _follow(self, view: StepView, row: int, logits: NDArray[np.float32]) -> Drift:
        """The row's memory after this step."""
        p = probabilities(logits, view.suppress_ids)
        q, history = np.zeros(p.shape, np.float32), np.zeros((self._kl_history, len(p)))
        before = view.remembered(row)
        if isinstance(before, Drift):
            q, history = before.distribution, before.divergences
        divergence = (p * (np.log(p + _TINY) - np.log(q + _TINY))).sum(axis=-1)
        return Drift(p.astype(np.float32), np.concatenate([history[1:], divergence[None]]))
