"""Bootstrap intervals, divergence, verdicts: against loops and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lacache_trt.accuracy.predictions import best_tokens, divergence
from lacache_trt.accuracy.report import AccuracyReport, CaseResult, Claim, Evidence, OutlierResult
from lacache_trt.accuracy.settings import AccuracySettings, ActivationSettings
from lacache_trt.accuracy.statistics import Bootstrap, Bounded
from lacache_trt.errors import InvalidRequestError, NumericalError


def test_mean_is_the_plain_bootstrap() -> None:
    """The same draws, one resample at a time."""
    values = np.random.default_rng(1).standard_normal(37) ** 3
    found = Bootstrap(37, 500, seed=9).mean(values)
    rng = np.random.default_rng(9)
    means = sorted(values[rng.integers(0, 37, 37)].mean() for _ in range(500))
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(means[math.ceil(0.025 * 500) - 1])
    assert found.high == pytest.approx(means[math.ceil(0.975 * 500) - 1])


def test_interval_of_a_large_sample_is_the_normal_one() -> None:
    values = np.random.default_rng(0).standard_normal(2000)
    found = Bootstrap(2000, 4000, seed=0).mean(values)
    width = 1.96 * values.std() / math.sqrt(2000)
    assert found.high - found.value == pytest.approx(width, rel=0.08)
    assert found.value - found.low == pytest.approx(width, rel=0.08)


def test_constant_values_have_no_interval() -> None:
    found = Bootstrap(10, 100, seed=0).mean(np.full(10, 0.25))
    assert (found.value, found.low, found.high) == (0.25, 0.25, 0.25)


def test_gap_is_paired() -> None:
    """Two candidates that fail on other problems: the pairing decides the width."""
    rng = np.random.default_rng(4)
    right = rng.random(1000) < 0.9
    flipped = right.copy()
    flipped[np.flatnonzero(right)[:10]] = False
    found = Bootstrap(1000, 2000, seed=1).gap(right, flipped)
    assert found.value == pytest.approx(0.01)
    assert 0.003 < found.low < 0.006 < 0.015 < found.high < 0.018


def test_gap_without_a_loss_is_the_binomial_bound() -> None:
    right = np.array([True] * 90 + [False] * 10)
    found = Bootstrap(100, 200, seed=0).gap(right, right)
    assert (found.value, found.low) == (0.0, 0.0)
    assert (1 - found.high) ** 100 == pytest.approx(0.025)


def test_decibels() -> None:
    signal, noise = np.full(8, 1000.0), np.full(8, 1.0)
    bootstrap = Bootstrap(8, 100, seed=0)
    assert bootstrap.decibels(signal, noise).value == pytest.approx(30.0)
    assert bootstrap.decibels(signal, np.zeros(8)).value == math.inf
    assert bootstrap.decibels(signal, np.zeros(8)).high == math.inf


def test_broken_values_are_errors() -> None:
    with pytest.raises(NumericalError, match="NaN"):
        Bootstrap(3, 100, seed=0).mean(np.array([0.0, np.nan, 1.0]))
    with pytest.raises(InvalidRequestError, match="at least two"):
        Bootstrap(1, 100, seed=0)


def test_divergence_of_two_classes() -> None:
    """p = sigmoid(a), q = sigmoid(b); the mask id in the middle does not count."""
    first = torch.tensor([[2.0, 99.0, 0.0]])
    second = torch.tensor([[0.5, -99.0, 0.0]])
    p, q = (1 / (1 + math.exp(-value)) for value in (2.0, 0.5))
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert float(divergence(first, second, 1)) == pytest.approx(expected, rel=1e-12)
    assert float(divergence(first, first, 1)) == 0.0
    assert float(best_tokens(first, 1)) == 0
    assert torch.isnan(divergence(first, second * torch.nan, 1)).all()


def bounded(low: float, high: float) -> Bounded:
    return Bounded((low + high) / 2, low, high)


@pytest.mark.parametrize(
    ("intervals", "verdict"),
    [
        ([(0.1, 0.2), (-0.1, 0.2)], "holds"),
        ([(-0.2, -0.1), (-0.1, 0.2)], "does not hold"),
        ([(-0.2, -0.1), (0.1, 0.2)], "mixed"),
        ([(-0.1, 0.1), (0.0, 0.2)], "not resolved"),
    ],
)
def test_verdict_follows_from_the_intervals(
    intervals: list[tuple[float, float]], verdict: str
) -> None:
    evidence = tuple(Evidence("m", bounded(*interval)) for interval in intervals)
    assert Claim("a claim", "a", "b", evidence, problems=100).verdict == verdict
    assert "too few" in Claim("a claim", "a", "b", evidence, problems=99).verdict


def test_metric_names() -> None:
    case = CaseResult(
        "group.ffn",
        "",
        "",
        "",
        "",
        {64: bounded(0.9, 1), 8: bounded(0.7, 0.8)},
        {64: bounded(0, 0.01), 8: bounded(0, 0.02)},
        {},
        bounded(0, 1e-4),
        None,
        (),
        0.0,
    )
    outlier = OutlierResult("bf16", 64.0, 2.5, {})
    metrics = AccuracyReport("bf16", "cpu", "0", {}, (case,), (), (outlier,)).metrics()
    assert metrics == {
        "tiny.exact_match.fp8": pytest.approx(0.95),
        "tiny.exact_match_gap_bound.fp8": 0.01,
        "tiny.exact_match.fp8.steps8": 0.75,
        "tiny.exact_match_gap_bound.fp8.steps8": 0.02,
        "tiny.kl.fp8": pytest.approx(5e-5),
        "outlier64.logits_ulps.bf16": 2.5,
    }


def test_settings() -> None:
    chosen = AccuracySettings(scopes="ffn, all", steps=8)
    assert (chosen.scope_names, chosen.step_counts) == (("ffn", "all"), (8,))
    for wrong in ({"problems": 1}, {"scopes": "everything"}, {"scopes": ","}, {"device": "tpu"}):
        with pytest.raises(InvalidRequestError):
            AccuracySettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError):
        ActivationSettings(problems=0)
