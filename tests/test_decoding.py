"""The policies as pure functions: what they select, in which order, from which random numbers."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from lacache_trt.decoding.dream import transfer_fractions
from lacache_trt.decoding.policy import Commit, StepView
from lacache_trt.decoding.registry import POLICIES, build_policy
from lacache_trt.decoding.schedule import transfer_counts
from lacache_trt.decoding.selection import require_finite, take_best
from lacache_trt.engines.base import StepOutputs
from lacache_trt.errors import EngineError, NumericalError
from lacache_trt.generation import GenerationConfig

VOCAB, MASK_ID = 11, 10
WORDS = st.integers(0, 2**31 - 2)
CONFIGS = [
    {"policy": "schedule"},
    {"policy": "schedule", "remasking": "random"},
    {"policy": "origin"},
    {"policy": "origin", "temperature": 1.0, "top_p": 0.8},
    {"policy": "maskgit_plus"},
    {"policy": "maskgit_plus", "temperature": 0.5, "alg_temp": 0.3},
    {"policy": "topk_margin", "top_k": 3},
    {"policy": "entropy", "temperature": 1.2},
]


@st.composite
def views(draw: st.DrawFn) -> StepView:
    """Any step of any batch; scores come from a few values, so ties are common."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    shape = (rows, columns)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    few = np.array([0.0, 0.25, 0.5, 0.75, 1.0], np.float32)
    steps = draw(st.integers(1, 10))
    masked = draw(arrays.arrays(np.bool_, shape))
    logits = rng.choice(np.arange(-3, 4, dtype=np.float32), (*shape, VOCAB))
    return StepView(
        masked=masked,
        token=rng.integers(0, MASK_ID, shape, dtype=np.int32),
        confidence=rng.choice(few, shape),
        margin=rng.choice(few, shape),
        neg_entropy=-rng.choice(few, shape),
        logits=logits,
        positions=np.arange(columns, dtype=np.int32) + rng.integers(0, 99, (rows, 1), np.int32),
        seed=rng.integers(0, 2**31 - 2, rows),
        step=rng.integers(0, 500, rows, dtype=np.int32),
        step_in_block=rng.integers(0, steps, rows, dtype=np.int32),
        masked_at_start=np.full(rows, columns, np.int32),
        steps_per_block=steps,
        suppress_ids=(MASK_ID,),
    )


def row_of(view: StepView, row: int) -> StepView:
    """The view of one row alone."""
    parts: dict[str, Any] = {}
    for field in fields(view):
        value = getattr(view, field.name)
        parts[field.name] = value[row : row + 1] if isinstance(value, np.ndarray) else value
    return StepView(**parts)


def policy_of(chosen: dict[str, Any], view: StepView) -> Commit:
    """Build the policy through the registry and ask it."""
    return build_policy(GenerationConfig(**chosen))(view)


@pytest.mark.parametrize("chosen", CONFIGS, ids=str)
@settings(max_examples=40, deadline=None)
@given(view=views())
def test_every_policy_selects_masks_only_and_treats_rows_alone(
    chosen: dict[str, Any], view: StepView
) -> None:
    commit = policy_of(chosen, view)
    assert commit.selected.dtype == np.bool_
    assert commit.token.dtype == np.int32
    assert not (commit.selected & ~view.masked).any()
    assert not (commit.token[commit.selected] == MASK_ID).any()
    for row in range(len(view.masked)):
        alone = policy_of(chosen, row_of(view, row))
        np.testing.assert_array_equal(alone.selected[0], commit.selected[row])
        chosen_tokens = commit.token[row][commit.selected[row]]
        np.testing.assert_array_equal(alone.token[0][alone.selected[0]], chosen_tokens)


@pytest.mark.parametrize("chosen", CONFIGS, ids=str)
@settings(max_examples=30, deadline=None)
@given(view=views())
def test_a_block_is_empty_after_its_steps(chosen: dict[str, Any], view: StepView) -> None:
    left = np.ones_like(view.masked)
    for step in range(view.steps_per_block):
        now = np.full(len(left), step, np.int32)
        commit = policy_of(chosen, replace(view, masked=left, step_in_block=now, step=now))
        left = left & ~commit.selected
    assert not left.any()


@pytest.mark.parametrize("chosen", CONFIGS, ids=str)
@settings(max_examples=10, deadline=None)
@given(view=views())
def test_policies_are_pure(chosen: dict[str, Any], view: StepView) -> None:
    before = [getattr(view, field.name) for field in fields(view)]
    kept = [value.copy() if isinstance(value, np.ndarray) else value for value in before]
    first, second = policy_of(chosen, view), policy_of(chosen, view)
    np.testing.assert_array_equal(first.selected, second.selected)
    np.testing.assert_array_equal(first.token, second.token)
    for old, now in zip(kept, before, strict=True):
        np.testing.assert_array_equal(old, now)


def test_logits_are_asked_for_only_where_they_are_needed() -> None:
    def needs(**chosen: Any) -> bool:
        return build_policy(GenerationConfig(**chosen)).needs_logits

    assert not needs(temperature=1.0)
    for policy in sorted(name for name, spec in POLICIES.items() if spec.draws_tokens):
        assert not needs(policy=policy, top_p=1.0)
        assert needs(policy=policy, top_p=0.9)
        assert needs(policy=policy, top_k=5)
        assert needs(policy=policy, temperature=0.1)


@given(st.integers(0, 600), st.integers(1, 300))
def test_schedule_counts_spread_the_masks_evenly(masks: int, steps: int) -> None:
    start = np.full(steps, masks, np.int32)
    counts = transfer_counts(start, np.arange(steps, dtype=np.int32), steps)
    assert counts.sum() == masks
    assert (np.diff(counts) <= 0).all()
    assert counts.max() - counts.min() <= 1


@given(views())
def test_take_best_is_sorted_python(view: StepView) -> None:
    counts = np.arange(len(view.masked), dtype=np.int64)
    selected = take_best(view.confidence, view.masked, counts)
    for row, count in enumerate(counts):
        masked = np.flatnonzero(view.masked[row])
        ranked = sorted(masked, key=lambda place: (-view.confidence[row, place], place))
        assert set(np.flatnonzero(selected[row])) == set(ranked[:count])


def test_take_best_survives_scores_without_confidence() -> None:
    scores = np.array([[-np.inf, 1.0, -np.inf, 0.0]], np.float32)
    masked = np.array([[True, False, True, True]])
    selected = take_best(scores, masked, np.array([2]))
    np.testing.assert_array_equal(selected, [[True, False, False, True]])


@given(st.integers(1, 200), st.floats(1e-4, 0.5))
def test_transfer_fractions_follow_even_times(steps: int, eps: float) -> None:
    fractions = transfer_fractions(np.arange(steps + 3, dtype=np.int32), steps, eps)
    remaining = np.cumprod(1 - fractions[: steps - 1])
    expected = 1 + (eps - 1) * np.arange(1, steps) / steps
    np.testing.assert_allclose(remaining, expected, rtol=1e-12)
    assert (fractions[steps - 1 :] == 1).all()


def outputs_with(confidence: NDArray[np.float32]) -> StepOutputs:
    """Engine outputs with these confidences."""
    token = np.zeros(confidence.shape, np.int32)
    return StepOutputs(token, confidence, confidence, confidence, np.zeros((2, 0, 3), np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinite_confidences_are_errors(value: float) -> None:
    confidence = np.full((2, 3), 0.5, np.float32)
    require_finite(outputs_with(confidence))
    confidence[1, 2] = value
    require_finite(outputs_with(confidence), np.array([True, False]))
    with pytest.raises(NumericalError, match="row 1, block column 2"):
        require_finite(outputs_with(confidence))


@settings(max_examples=20)
@given(views())
def test_a_suppressed_prediction_is_an_engine_error(view: StepView) -> None:
    last = np.full(len(view.masked), view.steps_per_block - 1, np.int32)
    token = np.full(view.masked.shape, MASK_ID, np.int32)
    broken = replace(view, step_in_block=last, token=token, masked=np.ones_like(view.masked))
    with pytest.raises(EngineError, match="suppress"):
        policy_of({"policy": "schedule"}, broken)


@settings(max_examples=5)
@given(views())
def test_missing_logits_are_an_engine_error(view: StepView) -> None:
    with pytest.raises(EngineError, match="returned none"):
        policy_of({"policy": "entropy", "temperature": 1.0}, replace(view, logits=None))
