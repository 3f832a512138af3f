"""Where randomness enters: the hash, draws about positions, and tokens drawn from logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from reference_decoding import noise as reference_noise
from reference_decoding import noise_bits

from lacache_trt.decoding.draws import (
    ALG_TEMP_ID,
    ORIGIN_TRANSFER_ID,
    RANDOM_REMASKING_ID,
    gumbel,
    position_bits,
    uniform,
)
from lacache_trt.decoding.dream import transfer_fractions
from lacache_trt.decoding.policy import StepView
from lacache_trt.decoding.registry import build_policy
from lacache_trt.decoding.truncation import NOISE_SPAN, Truncation, kept_ids
from lacache_trt.generation import GenerationConfig
from lacache_trt.plugins.sample_block.noise import gumbel_bits

VOCAB, MASK_ID = 11, 10
WORDS = st.integers(0, 2**31 - 2)


def flat_view(
    scores: NDArray[np.float32], logits: NDArray[np.float32] | None = None, steps: int = 1
) -> StepView:
    """The first of `steps` steps, everything masked; rows are seeded 7, 8, ...."""
    rows, columns = scores.shape
    return StepView(
        masked=np.ones((rows, columns), np.bool_),
        token=np.zeros((rows, columns), np.int32),
        confidence=scores,
        margin=scores,
        neg_entropy=scores,
        logits=logits,
        positions=np.tile(np.arange(columns, dtype=np.int32), (rows, 1)),
        seed=np.arange(7, 7 + rows),
        step=np.full(rows, 3, np.int32),
        step_in_block=np.zeros(rows, np.int32),
        masked_at_start=np.full(rows, columns, np.int32),
        steps_per_block=steps,
        suppress_ids=(MASK_ID,),
    )


def test_uniform_numbers_stay_inside_the_open_interval() -> None:
    ends = uniform(np.array([0, 2**23 - 1]))
    assert 0 < ends[0] < ends[1] < 1
    assert np.isfinite(gumbel(np.array([0, 2**23 - 1]))).all()


@given(WORDS, st.integers(0, 10**6), st.integers(0, 10**6), WORDS)
def test_noise_is_the_hash_written_in_python_integers(
    seed: int, step: int, position: int, identity: int
) -> None:
    bits = gumbel_bits(seed, step, position, np.array([identity]))
    assert bits.tolist() == [noise_bits(seed, step, position, identity)]
    expected = reference_noise(seed, step, position, identity)
    assert math.isclose(gumbel(bits)[0], expected, rel_tol=1e-12, abs_tol=1e-12)


small_logits = arrays.arrays(np.float64, VOCAB, elements=st.integers(-4, 4).map(float))


@given(small_logits, st.sampled_from([None, 0.1, 0.5, 0.9, 1.0]), st.sampled_from([None, 1, 4, 99]))
def test_kept_ids_follow_the_two_cuts(
    logits: NDArray[np.float64], top_p: float | None, top_k: int | None
) -> None:
    logits = logits.copy()
    logits[MASK_ID] = -np.inf
    p = np.exp(logits) / np.exp(logits).sum()
    order = sorted(range(MASK_ID), key=lambda token: (-logits[token], token))
    kept = order
    if top_p is not None and top_p < 1:
        sums = np.cumsum(p[order])
        kept = [t for i, t in enumerate(order) if i == 0 or sums[i - 1] <= top_p]
        near = np.abs(sums - top_p).min() < 1e-12
        if near:
            return
    if top_k is not None:
        threshold = sorted(logits[kept], reverse=True)[:top_k][-1]
        kept = [token for token in kept if logits[token] >= threshold]
    assert kept_ids(logits, top_p, top_k).tolist() == sorted(kept)


def drawn(truncation: Truncation, logits: NDArray[np.float32], count: int) -> NDArray[np.int32]:
    """Tokens of `count` positions with the same logits and different noise."""
    view = flat_view(np.zeros((1, count), np.float32), np.tile(logits, (1, count, 1)))
    tokens: NDArray[np.int32] = truncation.predict(view, view.masked).token[0]
    return tokens


def test_tokens_are_drawn_from_the_divided_and_truncated_distribution() -> None:
    logits = np.linspace(2, -2, VOCAB).astype(np.float32)
    tokens = drawn(Truncation(0.8, top_p=None, top_k=4), logits, 8000)
    p = np.exp(logits[:4].astype(np.float64) / 0.8)
    expected = 8000 * p / p.sum()
    found = np.bincount(tokens, minlength=VOCAB)
    assert found[4:].sum() == 0
    chi_square = ((found[:4] - expected) ** 2 / expected).sum()
    assert chi_square < 16.3, found  # 0.1% quantile for 3 degrees of freedom


def test_skipping_hopeless_ids_changes_no_token() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(VOCAB).astype(np.float32) * NOISE_SPAN
    logits[MASK_ID] = 100
    tokens = drawn(Truncation(1.0), logits, 2000)
    noise = gumbel(gumbel_bits(7, 3, np.arange(2000)[:, None], np.arange(MASK_ID)))
    np.testing.assert_array_equal(tokens, (logits[:MASK_ID] + noise).argmax(-1))
    assert len(set(tokens.tolist())) > 1


def test_positions_are_drawn_without_replacement_by_confidence() -> None:
    """The first position of softmax(score / alg_temp) is drawn with its probability."""
    count = 8000
    scores = np.tile(np.array([0.9, 0.6, 0.3], np.float32), (count, 1))
    view = flat_view(scores, steps=2)
    commit = build_policy(GenerationConfig(policy="maskgit_plus", alg_temp=0.5))(view)
    assert (commit.selected.sum(axis=1) == 1).all()
    p = np.exp(scores[0].astype(np.float64) / 0.5)
    expected = count * p / p.sum()
    chi_square = ((commit.selected.sum(axis=0) - expected) ** 2 / expected).sum()
    assert chi_square < 13.8  # 0.1% quantile for 2 degrees of freedom
    origin = build_policy(GenerationConfig(policy="origin"))(view).selected
    wanted = transfer_fractions(np.array([0], np.int32), 2, 1e-3)[0]
    assert abs(origin.mean() - wanted) < 4 * math.sqrt(0.25 / origin.size)
    assert abs(np.corrcoef(origin.T.astype(float))[0, 1]) < 0.05


def test_draws_of_different_purposes_differ() -> None:
    view = flat_view(np.zeros((1, 50), np.float32))
    purposes = (RANDOM_REMASKING_ID, ORIGIN_TRANSFER_ID, ALG_TEMP_ID, 0)
    draws = [position_bits(view, purpose) for purpose in purposes]
    assert all((draws[a] != draws[b]).any() for a in range(4) for b in range(a))
    assert len({view.masked.shape, *(draw.shape for draw in draws)}) == 1


@pytest.mark.parametrize("least", [1e-150, 1e-310, 5e-324])
def test_the_smallest_temperatures_take_the_best(least: float) -> None:
    logits = np.linspace(-2, 2, VOCAB).astype(np.float32)
    assert (drawn(Truncation(least), logits, 4) == MASK_ID - 1).all()
    view = flat_view(np.array([[0.2, 0.5, 0.9]], np.float32), steps=2)
    commit = build_policy(GenerationConfig(policy="maskgit_plus", alg_temp=least))(view)
    assert commit.selected.tolist() == [[False, False, True]]
