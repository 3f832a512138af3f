"""LocalLeap: positions near a sure one may be less sure.

In each row, over the masked positions of the block:
    the most confident position is always committed
    anchors are masked positions with confidence >= threshold (decoded ones are no anchors)
    every other position is committed if its confidence is >= neighbour_threshold within
    `neighbour_radius` columns of an anchor, and >= threshold elsewhere
All of it is decided from the same logits; a committed neighbour does not become an anchor.
Source: LocalLeap (arXiv 2510.07081), defaults 0.9, 0.75 and 4. Differences: confidences are the
engine's float32 where the reference takes a float64 softmax (`confidence_dtype="float64"`).
dlmserve's variant (anchors among a scheduled top-k) is not offered.
"""

from __future__ import annotations

import numpy as np

from lacache_trt.decoding.policy import Commit, StepView
from lacache_trt.decoding.selection import checked_commit
from lacache_trt.decoding.threshold import best_of_each_row, distinct_from_one


class LocalLeapPolicy:
    """Commits around anchors with a lower threshold."""

    needs_logits = False
    answer_columns: tuple[int, ...] = ()

    def __init__(self, *, threshold: float, neighbour_threshold: float, radius: int) -> None:
        self._threshold = distinct_from_one(threshold)
        self._neighbour_threshold = neighbour_threshold
        self._radius = radius

    def __call__(self, view: StepView) -> Commit:
        """At least one position of a row that has a mask."""
        anchors = view.masked & (view.confidence >= self._threshold)
        columns = np.arange(view.masked.shape[1])
        near = np.abs(columns[:, None] - columns) <= self._radius
        beside = (anchors[:, None, :] & near[None]).any(axis=2)
        limits = np.where(beside, self._neighbour_threshold, self._threshold)
        selected = view.masked & (view.confidence >= limits)
        return checked_commit(view, selected | best_of_each_row(view), view.token)
