"""Prophet: stop as soon as the answer is clear.

LLaDA's schedule, and before each commit a look at the answer: five columns from `answer_start`.
    gap = mean over them of (largest - second largest raw logit), decoded or not
    progress = (1 + forwards so far) / steps
    stop if gap >= 7.5 while progress < 0.33, 5.0 while progress < 0.67, 2.5 later
A row that stops gets every remaining mask of its canvas filled with its prediction.
Source: Prophet (pixeli99/Prophet, generate with constraints). Differences: the reference reads
the remaining predictions from the logits that it already has for the whole canvas; here the head
runs on the block and the five columns, so stopping costs one more forward, of the same canvas;
suppressed ids are out of the gap; the reference's constraint tokens inside the answer are not
offered, `answer_start` says where the answer stands.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lacache_trt.decoding.policy import Commit, StepView
from lacache_trt.decoding.schedule import scheduled_counts
from lacache_trt.decoding.selection import checked_commit, take_best
from lacache_trt.errors import EngineError
from lacache_trt.setting_ranges import ANSWER_LENGTH

_LIMITS = ((0.33, 7.5), (0.67, 5.0), (np.inf, 2.5))


def required_gap(progress: float) -> float:
    """The gap at which a row with this share of its steps behind it stops."""
    return next(gap for end, gap in _LIMITS if progress < end)


class ProphetPolicy:
    """LLaDA's schedule with an early end.

    Args:
        answer_start: first column of the answer, which ends inside the generated part.
        steps: denoising steps of the whole generation.
    """

    needs_logits = False

    def __init__(self, *, answer_start: int, steps: int) -> None:
        self.answer_columns = tuple(range(answer_start, answer_start + ANSWER_LENGTH))
        self._steps = steps

    def __call__(self, view: StepView) -> Commit:
        """What the schedule commits, and which rows stop; a stopped row commits nothing itself."""
        if view.answer_logits is None:
            raise EngineError(
                "prophet reads the answer's logits and the engine returned none",
                expected=f"logits of {len(self.answer_columns)} columns",
                fix="use an engine with logits, or policy='schedule'",
            )
        gaps = self._gaps(view.answer_logits, view.suppress_ids)
        progress = (view.step + 1) / self._steps
        clear = [gap >= required_gap(done) for gap, done in zip(gaps, progress, strict=True)]
        finished = np.array(clear, np.bool_) & view.masked.any(axis=1)
        masked = view.masked & ~finished[:, None]
        selected = take_best(view.confidence, masked, scheduled_counts(view))
        return checked_commit(view, selected, view.token, finished=finished)

    def _gaps(
        self, logits: NDArray[np.float32], suppress_ids: tuple[int, ...]
    ) -> NDArray[np.float64]:
        """Mean gap of each row: float64 [B]."""
        kept = logits.astype(np.float64)
        kept[..., list(suppress_ids)] = -np.inf
        best = np.partition(kept, kept.shape[-1] - 2, axis=-1)[..., -2:]
        gaps: NDArray[np.float64] = (best[..., 1] - best[..., 0]).mean(axis=1)
        return gaps
