"""LLaDA's schedule: a block's masks are spread evenly over its steps.

With n masks at the block's start and s steps, step i commits n // s + (i < n mod s) positions:
the most confident ones, or random ones. Source: ML-GSAI/LLaDA generate.py
(get_num_transfer_tokens, remasking). The reference runs all s steps even when n < s leaves
nothing to do in the last ones; here a block ends when no mask remains.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lacache_trt.decoding.draws import RANDOM_REMASKING_ID, position_bits
from lacache_trt.decoding.policy import Commit, StepView
from lacache_trt.decoding.selection import checked_commit, take_best
from lacache_trt.generation import Remasking


def transfer_counts(
    masked_at_start: NDArray[np.int32], step_in_block: NDArray[np.int32], steps: int
) -> NDArray[np.int64]:
    """Positions to commit in each row's step; int64 [B], summing to the masks over the steps."""
    counts = masked_at_start // steps + (step_in_block < masked_at_start % steps)
    return counts.astype(np.int64)


def scheduled_counts(view: StepView) -> NDArray[np.int64]:
    """What the schedule commits in each row's step: int64 [B]; all that is left at the last."""
    counts = transfer_counts(view.masked_at_start, view.step_in_block, view.steps_per_block)
    is_last = view.step_in_block >= view.steps_per_block - 1
    return np.where(is_last, view.masked.sum(axis=1), counts)


class SchedulePolicy:
    """Commits the scheduled number of positions per step.

    Args:
        remasking: `low_confidence` ranks by the token's probability, `random` by a seeded draw.
    """

    needs_logits = False
    answer_columns: tuple[int, ...] = ()

    def __init__(self, remasking: Remasking = "low_confidence") -> None:
        self._remasking = remasking

    def __call__(self, view: StepView) -> Commit:
        """Masks that are left at a block's last step are all committed."""
        counts = scheduled_counts(view)
        if self._remasking == "random":
            selected = take_best(position_bits(view, RANDOM_REMASKING_ID), view.masked, counts)
        else:
            selected = take_best(view.confidence, view.masked, counts)
        return checked_commit(view, selected, view.token)
