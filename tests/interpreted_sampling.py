"""SampleBlock kernels under Triton's interpreter; run by `test_kernels_interpreter.py`."""

from __future__ import annotations

import dataclasses

import interpreter_repair  # noqa: F401
import kernel_references as reference
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from kernel_references import SampleInputs
from torch import Tensor

from lacache_trt.plugins.sample_block import kernel, noise

CHUNK = 64


def sampled(inputs: SampleInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, rows, vocabulary = inputs.logits.shape
    token = torch.full((batch, rows), -7, dtype=torch.int32)
    scores = [torch.full((batch, rows), torch.nan) for _ in range(3)]
    size = kernel.workspace_size(batch, rows, vocabulary, CHUNK)
    kernel.launch(
        *inputs.tensors(), torch.full((size,), torch.nan), token, *scores, chunk=CHUNK, warps=1
    )
    return token, scores[0], scores[1], scores[2]


def check(inputs: SampleInputs) -> Tensor:
    token, *scores = sampled(inputs)
    want = reference.sample_scores(inputs)
    top = want.amax(-1)
    chosen = want.gather(-1, token.long()[..., None])[..., 0]
    hot = inputs.temperature.max() > 0
    assert bool((top - chosen <= (2e-5 if hot else 0.0)).all()), "not the argmax"
    if not hot:
        first = (want == top[..., None]).int().argmax(-1)
        assert torch.equal(token.long(), first), "a tie went to a higher id"
    for got, expected in zip(scores, reference.sample_block(inputs, token), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=3e-6, equal_nan=True)
    return token


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("vocabulary", [17, 64, 160, 331])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rule(vocabulary: int, guided: bool, temperature: float, dtype: torch.dtype) -> None:
    settings = {"temperature": temperature, "guided": guided}
    check(reference.sample_inputs(2, 3, vocabulary, dtype, "cpu", vocabulary, **settings))


def test_ties_take_the_lowest_id_and_have_no_margin() -> None:
    inputs = reference.sample_inputs(1, 2, 200, torch.float32, "cpu", seed=1)
    inputs.logits[:] = 0.25
    token = check(inputs)
    assert token.tolist() == [[0, 0]]
    inputs.logits[0, :, [150, 70, 190]] = 1.0
    assert check(inputs).tolist() == [[70, 70]]


def test_suppressed_and_excluded_ids() -> None:
    inputs = reference.sample_inputs(1, 2, 130, torch.float32, "cpu", seed=4)
    inputs = dataclasses.replace(
        inputs,
        suppress_ids=torch.tensor([[5, -1, 129, 64]], dtype=torch.int32),
        confidence_exclude_ids=torch.tensor([[6]], dtype=torch.int32),
    )
    inputs.logits[..., [5, 64, 129]] = torch.nan  # suppressed, so not seen
    inputs.logits[..., 6] = 30.0
    assert check(inputs).tolist() == [[6, 6]]
    assert sampled(inputs)[1].tolist() == [[0.0, 0.0]]


def test_empty_lists() -> None:
    inputs = reference.sample_inputs(1, 2, 40, torch.float32, "cpu", seed=4)
    empty = torch.zeros((1, 0), dtype=torch.int32)
    check(dataclasses.replace(inputs, suppress_ids=empty, confidence_exclude_ids=empty))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_bad_logits_give_nan(value: float) -> None:
    inputs = reference.sample_inputs(1, 3, 150, torch.float32, "cpu", seed=4)
    inputs.logits[0, 1, 100] = value
    _, confidence, margin, neg_entropy = sampled(inputs)
    for score in (confidence, margin, neg_entropy):
        assert score.isnan().tolist() == [[False, True, False]]


def test_minus_infinity_logits_are_ordinary() -> None:
    inputs = reference.sample_inputs(1, 2, 150, torch.float32, "cpu", seed=4)
    inputs.logits[0, :, 10:140] = -torch.inf
    check(inputs)


def test_a_batch_equals_its_rows() -> None:
    inputs = reference.sample_inputs(2, 3, 100, torch.float16, "cpu", seed=9, temperature=1.0)
    together = sampled(inputs)
    alone = SampleInputs(*(tensor[1:2] for tensor in inputs.tensors()))
    alone = dataclasses.replace(alone, guide_row=torch.zeros(1, dtype=torch.int32))
    for whole, part in zip(together, sampled(alone), strict=True):
        assert torch.equal(whole[1:2], part)


@triton.jit
def noise_kernel(seed, step, position, out, COUNT: tl.constexpr):
    ids = tl.arange(0, COUNT)
    drawn = kernel.gumbel_noise(tl.load(seed), tl.load(step), tl.load(position), ids)
    tl.store(out + ids, drawn)


WORD = st.integers(-(2**31), 2**31 - 1)


@examples(max_examples=30, deadline=None)
@given(seed=WORD, step=st.integers(0, 2**31 - 1), position=st.integers(0, 2**31 - 1))
def test_noise_equals_its_reference(seed: int, step: int, position: int) -> None:
    out = torch.full((64,), torch.nan)
    words = [torch.tensor([w], dtype=torch.int32) for w in (seed, step, position)]
    noise_kernel[(1,)](*words, out, COUNT=64)
    want = noise.gumbel(seed, step, position, np.arange(64))
    np.testing.assert_allclose(out.numpy(), want, rtol=2e-6, atol=2e-6)


def test_noise_bits_against_python_integers() -> None:
    def literal(seed: int, step: int, position: int, vocabulary_id: int) -> int:
        state = 0
        for word, key in zip((seed, step, position, vocabulary_id, 0), noise.KEYS, strict=True):
            state = pow(state + word % noise.PRIME + key, 5, noise.PRIME)
        return state >> 8

    for words in ((0, 0, 0, 0), (-5, 7, 3, 126463), (2**31 - 1, 1, 2, 3), (-(2**31), 9, 9, 9)):
        assert int(noise.gumbel_bits(*words)) == literal(*words)


def test_noise_is_gumbel() -> None:
    drawn = noise.gumbel(1, 2, np.arange(50)[:, None], np.arange(4000))
    assert abs(drawn.mean() - 0.5772) < 0.01
    assert abs(drawn.std() - np.pi / np.sqrt(6)) < 0.01
