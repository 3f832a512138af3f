"""The accelerators' policies as pure functions, each against its rule written out in plain Python.

Confidences are drawn from few values and from fine ones, so ties and exact thresholds are common.
Then what must hold for every policy: it commits only masks, never a suppressed id, treats rows
alone, and empties a block in a bounded number of steps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_decoding import MASK_ID, VOCAB, row_of, views

from lacache_trt.decoding.klass import Drift
from lacache_trt.decoding.policy import Commit, Policy, StepView
from lacache_trt.decoding.prophet import required_gap
from lacache_trt.decoding.registry import POLICIES, build_policy
from lacache_trt.decoding.wrappers import to_bfloat16
from lacache_trt.errors import EngineError
from lacache_trt.generation import GenerationConfig

CONFIDENCES = st.lists(
    st.one_of(st.sampled_from([0.0, 0.5, 0.75, 0.9, 1.0]), st.floats(0, 1, width=32)),
    min_size=1,
    max_size=9,
)
MASKS = st.lists(st.booleans(), min_size=9, max_size=9)
ALL: list[dict[str, Any]] = [
    {"policy": "schedule"},
    {"policy": "threshold"},
    {"policy": "threshold", "threshold": 0.4, "ties": "last"},
    {"policy": "factor", "factor": 0.7},
    {"policy": "klass", "threshold": 0.3, "kl_threshold": 1.0},
    {"policy": "local_leap", "neighbour_threshold": 0.3},
    {"policy": "prophet", "answer_start": 2},
    {"policy": "threshold", "confidence_dtype": "bfloat16"},
    {"policy": "schedule", "confidence_dtype": "float64", "ties": "last"},
    {"policy": "entropy"},
    {"policy": "maskgit_plus", "temperature": 0.7},
    {"policy": "origin"},
]


def one_row(confidences: list[float], masks: list[bool], **changes: Any) -> StepView:
    """A view of one row; every token is 3."""
    width = len(confidences)
    values = np.array([confidences], np.float32)
    zeros = np.zeros(1, np.int32)
    view = StepView(
        masked=np.array([masks[:width]]),
        token=np.full((1, width), 3, np.int32),
        confidence=values,
        margin=values,
        neg_entropy=-values,
        logits=None,
        positions=np.arange(width, dtype=np.int32)[None],
        seed=np.zeros(1, np.int64),
        step=zeros,
        step_in_block=zeros,
        masked_at_start=np.full(1, width, np.int32),
        steps_per_block=width,
        suppress_ids=(MASK_ID,),
    )
    return replace(view, **changes)


def chosen(commit: Commit) -> list[int]:
    """Committed positions of the only row."""
    return np.flatnonzero(commit.selected[0]).tolist()


def policy(**settings_: Any) -> Policy:
    """Through the registry."""
    return build_policy(GenerationConfig(**settings_))


def ranked(view: StepView) -> list[int]:
    """Masked positions, best first, the lower one of equals first."""
    masked = np.flatnonzero(view.masked[0])
    return sorted(masked.tolist(), key=lambda place: (-float(view.confidence[0, place]), place))


@given(CONFIDENCES, MASKS, st.sampled_from([0.0, 0.5, 0.75, 0.9, 1.0, 1.2]))
def test_threshold(confidences: list[float], masks: list[bool], threshold: float) -> None:
    view = one_row(confidences, masks)
    order = ranked(view)
    expected = order[:1]
    for place in order[1:]:
        if not view.confidence[0, place] < threshold:
            expected.append(place)
    assert chosen(policy(policy="threshold", threshold=threshold)(view)) == sorted(expected)


@given(CONFIDENCES, MASKS, st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 50.0]))
def test_factor(confidences: list[float], masks: list[bool], factor: float) -> None:
    view = one_row(confidences, masks)
    order = ranked(view)
    thresholds = [1 - factor / (count + 1) for count in range(1, len(order) + 1)]
    if thresholds:
        thresholds[0] = -1
    place = 0
    for place in range(len(order)):
        if float(view.confidence[0, order[place]]) < thresholds[place]:
            break
    if place == 0 or place == len(order) - 1:
        place += 1
    assert chosen(policy(policy="factor", factor=factor)(view)) == sorted(order[:place])


@pytest.mark.parametrize(
    ("confidences", "count"),
    [
        ([0.9, 0.9, 0.9, 0.9], 4),  # limits 0.667, 0.75, 0.8: nothing violates, the last counts
        ([0.9, 0.9, 0.7, 0.9], 4),  # sorted: violated at the last index, committed nevertheless
        ([0.9, 0.6, 0.5, 0.4], 1),
        ([0.2], 1),
        ([0.9, 0.2], 2),  # violated at index 1, which is the last
    ],
)
def test_factor_by_hand(confidences: list[float], count: int) -> None:
    view = one_row(confidences, [True] * 9)
    assert len(chosen(policy(policy="factor", factor=1.0)(view))) == count


@given(
    CONFIDENCES,
    MASKS,
    st.sampled_from([0.75, 0.9, 1.0]),
    st.sampled_from([0.0, 0.5, 0.75]),
    st.integers(0, 4),
)
def test_local_leap(
    confidences: list[float], masks: list[bool], anchor: float, near: float, radius: int
) -> None:
    view = one_row(confidences, masks)
    order = ranked(view)
    anchors = [place for place in order if view.confidence[0, place] >= anchor]
    expected = set(order[:1])
    for place in order:
        reached = any(abs(place - one) <= radius for one in anchors)
        if view.confidence[0, place] >= (near if reached else anchor):
            expected.add(place)
    found = policy(
        policy="local_leap", threshold=anchor, neighbour_threshold=near, neighbour_radius=radius
    )(view)
    assert chosen(found) == sorted(expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.sampled_from([0.05, 0.5]), st.integers(1, 6))
def test_klass(seed: int, history: int, kl_threshold: float, steps: int) -> None:
    """A block of slowly moving distributions, decoded to its end."""
    rng = np.random.default_rng(seed)
    width, threshold = 5, 0.3
    rule = policy(
        policy="klass",
        threshold=threshold,
        kl_threshold=kl_threshold,
        kl_history=history,
        gen_length=width,
        block_length=width,
        steps=steps,
    )
    logits = rng.standard_normal((1, width, VOCAB)).astype(np.float32) * 2
    left, memory = [True] * width, (None,)
    past: list[NDArray[np.float64]] = []
    moves: list[list[float]] = [[] for _ in range(width)]
    for step in range(steps):
        logits = logits + rng.standard_normal(logits.shape).astype(np.float32) * rng.choice([0, 1])
        p = np.exp(logits[0].astype(np.float64))
        p[:, MASK_ID] = 0
        p /= p.sum(axis=1, keepdims=True)
        for place in range(width):
            q = past[-1][place] if past else np.zeros(VOCAB)
            pairs = zip(p[place], q, strict=True)
            moves[place].append(sum(a * (np.log(a + 1e-12) - np.log(b + 1e-12)) for a, b in pairs))
        past.append(p)
        view = one_row(
            p.max(axis=1).tolist(),
            left,
            logits=logits,
            token=p.argmax(axis=1).astype(np.int32)[None],
            step_in_block=np.array([step], np.int32),
            steps_per_block=steps,
            memory=memory,
        )
        ready = [
            place
            for place in range(width)
            if left[place]
            and step >= history - 1
            and all(move < kl_threshold for move in moves[place][-history:])
            and view.confidence[0, place] > threshold
        ]
        count = width // steps + (step < width % steps)
        expected = ready or ranked(view)[:count]
        if step == steps - 1:
            expected = ranked(view)
        commit = rule(view)
        assert chosen(commit) == sorted(expected)
        memory = commit.memory
        left = [mask and place not in expected for place, mask in enumerate(left)]


def test_klass_keeps_what_it_needs_and_no_more() -> None:
    view = one_row([0.5, 0.5], [True, True], logits=np.zeros((1, 2, VOCAB), np.float32))
    commit = policy(policy="klass", kl_history=3)(view)
    drift = commit.memory[0]
    assert isinstance(drift, Drift)
    assert drift.distribution.shape == (2, VOCAB)
    assert drift.divergences.shape == (3, 2)
    assert (drift.divergences[-1] > 20).all(), "the first distribution has moved from nothing"


@given(st.integers(0, 2**32), st.integers(0, 15), st.floats(0, 4))
def test_prophet(seed: int, step: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    answer = (rng.standard_normal((1, 5, VOCAB)) * scale * 3).astype(np.float32)
    gaps = []
    for row in answer[0]:
        row = np.delete(row, MASK_ID).astype(np.float64)
        gaps.append(row.max() - np.sort(row)[-2])
    gap, progress = sum(gaps) / 5, (step + 1) / 16
    limit = 7.5 if progress < 0.33 else (5.0 if progress < 0.67 else 2.5)
    view = one_row(
        [0.5, 0.6, 0.4, 0.1],
        [True, True, False, True],
        step=np.array([step], np.int32),
        answer_logits=answer,
    )
    rule = policy(policy="prophet", answer_start=2, gen_length=16, block_length=4, steps=16)
    assert rule.answer_columns == (2, 3, 4, 5, 6)
    commit = rule(view)
    assert commit.finished is not None
    assert bool(commit.finished[0]) == (gap >= limit)
    assert chosen(commit) == ([] if gap >= limit else [1])


def test_prophets_answer_ends_with_the_canvas() -> None:
    rule = policy(policy="prophet", answer_start=11, gen_length=16, block_length=4, steps=16)
    assert rule.answer_columns == (11, 12, 13, 14, 15)
    assert [required_gap(p) for p in (0.1, 0.33, 0.5, 0.67, 1.0)] == [7.5, 5.0, 5.0, 2.5, 2.5]


@pytest.mark.parametrize("name", ["klass", "prophet"])
def test_missing_logits_are_an_engine_error(name: str) -> None:
    extra = {"answer_start": 0} if name == "prophet" else {}
    with pytest.raises(EngineError, match="no"):
        policy(policy=name, **extra)(one_row([0.5], [True]))


@pytest.mark.parametrize("settings_", ALL, ids=str)
@settings(max_examples=40, deadline=None)
@given(view=views(), first=st.booleans())
def test_every_policy_commits_masks_only_and_treats_rows_alone(
    settings_: dict[str, Any], view: StepView, first: bool
) -> None:
    view = with_answers(view)
    rule = build_policy(GenerationConfig(**settings_), commit_first=first)
    commit = rule(view)
    assert commit.selected.dtype == np.bool_
    assert not (commit.selected & ~view.masked).any()
    assert not (commit.token[commit.selected] == MASK_ID).any()
    for row in range(len(view.masked)):
        alone = rule(with_answers(row_of(view, row), view, row))
        np.testing.assert_array_equal(alone.selected[0], commit.selected[row])
        if commit.finished is not None and alone.finished is not None:
            assert alone.finished[0] == commit.finished[row]
        if first and view.step_in_block[row] == 0 and view.masked[row, 0]:
            assert np.flatnonzero(commit.selected[row]).tolist() in ([0], [])


@pytest.mark.parametrize("settings_", ALL, ids=str)
@settings(max_examples=30, deadline=None)
@given(view=views(), first=st.booleans())
def test_no_policy_loops_for_ever(settings_: dict[str, Any], view: StepView, first: bool) -> None:
    """A block is empty after as many steps as it has positions, or as the schedule has."""
    view = with_answers(view)
    rule = build_policy(GenerationConfig(**settings_), commit_first=first)
    left = np.ones_like(view.masked)
    memory: tuple[object, ...] = ()
    bound = max(view.steps_per_block, left.shape[1]) + 1
    for step in range(bound):
        now = np.full(len(left), step, np.int32)
        commit = rule(replace(view, masked=left, step_in_block=now, step=now, memory=memory))
        memory = commit.memory
        if first and step == 0 and commit.finished is None:
            assert (commit.selected.sum(axis=1) == 1).all()
        left = left & ~commit.selected
        if commit.finished is not None:
            left = left & ~commit.finished[:, None]
    assert not left.any()


def with_answers(view: StepView, whole: StepView | None = None, row: int = 0) -> StepView:
    """Answer logits: the first two columns' own, and for one row those of the whole view."""
    if whole is not None and whole.answer_logits is not None:
        return replace(view, answer_logits=whole.answer_logits[row : row + 1])
    if view.logits is None:
        return view
    return replace(view, answer_logits=view.logits[:, :2] * np.float32(3))


@given(CONFIDENCES)
def test_bfloat16_rounds_to_nearest_even(confidences: list[float]) -> None:
    values = np.array(confidences, np.float32)
    np.testing.assert_array_equal(to_bfloat16(values), values.astype(ml_dtypes.bfloat16))


def test_ties_go_to_either_end() -> None:
    view = one_row([0.5, 0.9, 0.9, 0.9], [True, True, True, True])
    for name in ("schedule", "threshold", "local_leap"):
        extra = {} if name == "schedule" else {"threshold": 1.5}
        assert chosen(policy(policy=name, ties="first", **extra)(view)) == [1]
        assert chosen(policy(policy=name, ties="last", **extra)(view)) == [3]


def test_float64_confidences_tell_apart_what_float32_does_not() -> None:
    logits = np.zeros((1, 2, VOCAB), np.float32)
    logits[0, :, 3] = (40.0, 41.0)
    view = one_row([1.0, 1.0], [True, True], logits=logits)
    assert chosen(policy(policy="threshold", threshold=1.5)(view)) == [0]
    exact = policy(policy="threshold", threshold=1.5, confidence_dtype="float64")
    assert exact.needs_logits
    assert chosen(exact(view)) == [0], "both are 1 in float64 too"
    logits[0, :, 3] = (20.0, 21.0)
    assert chosen(exact(replace(view, logits=logits))) == [1]


def test_every_policy_of_the_registry_is_tested() -> None:
    assert {one["policy"] for one in ALL} | {"topk_margin"} == set(POLICIES)


def test_the_documented_table_is_the_registry() -> None:
    page = (Path(__file__).parents[1] / "docs" / "decoding.md").read_text(encoding="utf-8")
    table = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == 5:
            table[cells[0].strip("`")] = cells[3]
    assert table == {name: ", ".join(spec.reads) for name, spec in POLICIES.items()}


@pytest.mark.parametrize("name", ["threshold", "local_leap"])
@pytest.mark.parametrize("threshold", [1 + 1e-15, 1.00000001, 1.5])
def test_nothing_reaches_a_threshold_above_one(name: str, threshold: float) -> None:
    view = one_row([1.0, 1.0, 1.0], [True] * 9)
    policy = build_policy(GenerationConfig(policy=name, threshold=threshold))
    assert policy(view).selected.sum() == 1
