"""Policies around a policy: the switches that hold for every rule.

`FirstFirst` is Fast-dLLM's forced commit for Dream (dream/model/generation_utils_block.py): the
step that begins a block commits its first position and nothing else, because with `prefix` and
`dual` that position's predictor, the row before the block, is outside of every later window.
`WithConfidence` and `LastOnTies` reproduce other implementations' roundings: LLaDA and Dream take
confidences in the model's bfloat16, where many tie exactly; Fast-dLLM, KLASS and LocalLeap take a
float64 softmax; torch.topk, which all of them rank with, leaves the order of ties open.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lacache_trt.decoding.policy import Commit, Policy, StepView
from lacache_trt.decoding.selection import probabilities
from lacache_trt.errors import EngineError

_BY_COLUMN = ("masked", "token", "confidence", "margin", "neg_entropy", "logits", "positions")


class FirstFirst:
    """Commits a block's first position, alone, in the step that begins the block."""

    def __init__(self, inner: Policy) -> None:
        self.needs_logits = inner.needs_logits
        self.answer_columns = inner.answer_columns
        self._inner = inner

    def __call__(self, view: StepView) -> Commit:
        """Every policy commits all that it sees in a block's last step, so this looks like one."""
        begins = view.step_in_block == 0
        masked = view.masked.copy()
        masked[begins, 1:] = False
        last = np.int32(view.steps_per_block - 1)
        in_block = np.where(begins, last, view.step_in_block).astype(np.int32)
        commit = self._inner(replace(view, masked=masked, step_in_block=in_block))
        forced = masked & begins[:, None]
        return replace(commit, selected=commit.selected | forced)


class WithConfidence:
    """Gives the policy confidences in another dtype.

    Args:
        inner: the policy.
        dtype: `bfloat16` rounds the engine's float32 to nearest even; `float64` takes a softmax
            of the raw logits, which then come from the device at every step.
    """

    def __init__(self, inner: Policy, dtype: str) -> None:
        self.needs_logits = inner.needs_logits or dtype == "float64"
        self.answer_columns = inner.answer_columns
        self._inner = inner
        self._round = dtype == "bfloat16"

    def __call__(self, view: StepView) -> Commit:
        """The inner policy's commit on the same view with other confidences."""
        confidence: NDArray[np.floating[Any]]
        if self._round:
            confidence = to_bfloat16(view.confidence.astype(np.float32))
        elif view.logits is None:
            raise EngineError(
                "confidence_dtype='float64' needs logits and the engine returned none",
                expected="logits of every column of the block",
                fix="use an engine with logits, or confidence_dtype='float32'",
            )
        else:
            removed = tuple(dict.fromkeys((*view.suppress_ids, *view.confidence_exclude_ids)))
            p = probabilities(view.logits, removed)
            confidence = np.take_along_axis(p, view.token[..., None].astype(np.int64), -1)[..., 0]
        return self._inner(replace(view, confidence=confidence))


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 rounded to nearest even bfloat16, kept as float32; finite values."""
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


class LastOnTies:
    """Resolves ties towards the higher position, by showing the policy its columns mirrored."""

    def __init__(self, inner: Policy) -> None:
        self.needs_logits = inner.needs_logits
        self.answer_columns = inner.answer_columns
        self._inner = inner

    def __call__(self, view: StepView) -> Commit:
        """What the policy remembers stays mirrored, which is consistent from step to step."""
        mirrored: dict[str, Any] = {
            field.name: np.flip(getattr(view, field.name), axis=1)
            for field in fields(view)
            if field.name in _BY_COLUMN and getattr(view, field.name) is not None
        }
        commit = self._inner(replace(view, **mirrored))
        selected = np.flip(commit.selected, axis=1)
        return replace(commit, selected=selected, token=np.flip(commit.token, axis=1))
