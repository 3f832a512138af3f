"""Row bookkeeping: prompts checked, padded on the left, doubled for guidance, ids by option."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_runtime import MODEL, VOCAB

from lacache_trt.decoding import rows
from lacache_trt.errors import CapacityError, InvalidRequestError
from lacache_trt.generation import GenerationConfig

PROMPTS = st.lists(
    st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=4
)


@given(PROMPTS, st.integers(1, 12), st.integers(0, 5))
def test_pad_left_keeps_prompts_and_masks_answers(
    prompts: list[tuple[int, ...]], gen_length: int, spare: int
) -> None:
    needed = max(map(len, prompts)) + gen_length
    canvas = rows.pad_left(prompts, gen_length, MODEL, needed + spare)
    assert canvas.tokens.shape == canvas.positions.shape == (len(prompts), needed + spare)
    assert {part.dtype for part in vars(canvas).values()} == {np.dtype(np.int32)}
    for row, prompt in enumerate(prompts):
        first, last = canvas.valid_from[row], canvas.valid_to[row]
        real = canvas.tokens[row, first:last].tolist()
        assert real == [*prompt, *[MODEL.mask_id] * gen_length]
        assert canvas.positions[row, first:last].tolist() == list(range(last - first))
        assert (canvas.positions[row, :first] == 0).all()
        assert (canvas.tokens[row, :first] == MODEL.eos_ids[0]).all()


def test_pad_left_refuses_a_canvas_that_is_too_short() -> None:
    with pytest.raises(CapacityError, match="7 columns needed"):
        rows.pad_left([(1, 2, 3)], 4, MODEL, 6)


@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 20), st.data())
def test_blocks_tile_the_generated_part(
    blocks: int, block_length: int, before: int, data: st.DataObject
) -> None:
    config = GenerationConfig(blocks * block_length, block_length, blocks)
    columns = before + config.gen_length
    chosen = data.draw(st.lists(st.integers(0, blocks - 1), min_size=1, max_size=4))
    found = rows.columns_of_blocks(np.array(chosen, np.int32), columns, config)
    assert found.dtype == np.int32
    for block, row in zip(chosen, found, strict=True):
        start = before + block * block_length
        assert row.tolist() == list(range(start, start + block_length))


@given(PROMPTS, st.integers(1, 6))
def test_guidance_doubles_rows_and_masks_prompts(
    prompts: list[tuple[int, ...]], gen_length: int
) -> None:
    canvas = rows.pad_left(prompts, gen_length, MODEL)
    canvas.tokens[:, -1] = 3
    before = canvas.tokens.copy()
    doubled, guide_row = rows.add_guidance_rows(canvas, gen_length, MODEL.mask_id)
    count = len(prompts)
    assert guide_row.tolist() == [*range(count, 2 * count)] * 2
    np.testing.assert_array_equal(canvas.tokens, before)
    np.testing.assert_array_equal(doubled.tokens[:count], canvas.tokens)
    assert (doubled.tokens[count:, :-gen_length] == MODEL.mask_id).all()
    np.testing.assert_array_equal(doubled.tokens[count:, -gen_length:], before[:, -gen_length:])
    for name in ("positions", "valid_from", "valid_to"):
        part = getattr(doubled, name)
        np.testing.assert_array_equal(part[:count], part[count:])


def test_mix_guidance_leaves_unguided_rows_alone() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 2, 5)).astype(np.float32)
    guide = np.array([2, 1, 2], np.int32)
    mixed = rows.mix_guidance(logits, guide, np.full(3, 1.5, np.float32))
    np.testing.assert_array_equal(mixed[1:], logits[1:])
    np.testing.assert_allclose(mixed[0], 2.5 * logits[0] - 1.5 * logits[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ((), "empty"),
        (np.array([], np.int32), "empty"),
        ("text", "not a sequence"),
        (b"text", "not a sequence"),
        (None, "not a sequence"),
        (5, "not a sequence"),
        ({1, 2}, "not a sequence"),
        (np.array([[1]]), "not a sequence"),
        ([1, 2.0], "token 1 .* not an int"),
        ([True], "token 0 .* not an int"),
        (["1"], "token 0 .* not an int"),
        ([1, None], "token 1 .* not an int"),
        (np.array([1.0]), "token 0 .* not an int"),
        ([-1], "token 0 .* outside the vocabulary"),
        ([0, VOCAB], "token 1 .* outside the vocabulary"),
        ([10**5000], "token 0 .* outside the vocabulary"),
        ([1, MODEL.mask_id], "token 1 .* mask id"),
    ],
)
def test_bad_prompts_are_refused(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        rows.check_prompt(prompt, MODEL, 8)
    error = caught.value
    assert all((error.got is not None, error.expected, error.fix))


def test_an_empty_prompt_is_to_be_written() -> None:
    with pytest.raises(InvalidRequestError, match="empty") as caught:
        rows.check_prompt([], MODEL, 8)
    assert caught.value.fix == "write a prompt"


def test_the_mask_id_refusal_explains_the_reference() -> None:
    with pytest.raises(InvalidRequestError, match="LLaDA would treat the position as one more"):
        rows.check_prompt([MODEL.mask_id], MODEL, 8)


@pytest.mark.parametrize(
    ("prompt", "fix"),
    [
        (["one question", "another"], "a list of prompts only to generate"),
        ([[1, 2], [3]], "a list of prompts only to generate"),
        (
            [{"role": "user", "content": "What?"}],
            "runtime.codec.encode(runtime.codec.apply_chat_template(messages))",
        ),
        ([1.5], "pass token ids"),
    ],
)
def test_a_prompt_of_other_things_says_what_to_pass(prompt: list[object], fix: str) -> None:
    with pytest.raises(InvalidRequestError, match="token 0 of the prompt is not an int") as caught:
        rows.check_prompt(prompt, MODEL, 8)
    assert fix in str(caught.value.fix)


@pytest.mark.parametrize("length", [249, 256, 1000])
def test_prompts_beyond_the_context_are_refused(length: int) -> None:
    assert len(rows.check_prompt([1] * 248, MODEL, 8)) == 248
    with pytest.raises(CapacityError, match="at most 256 together"):
        rows.check_prompt([1] * length, MODEL, 8)


def test_good_prompts_become_plain_ints() -> None:
    found = rows.check_prompt(np.array([1, 2], np.int64), MODEL, 8)
    assert found == (1, 2)
    assert {type(token) for token in rows.check_prompt([np.int32(4), 5], MODEL, 8)} == {int}


def test_ids_by_option() -> None:
    mask, ends = MODEL.mask_id, MODEL.eos_ids
    plain = GenerationConfig()
    assert rows.suppressed_ids(plain, MODEL) == (mask,)
    assert rows.suppressed_ids(replace(plain, logits_eos_inf=True), MODEL) == (mask, ends[0])
    assert rows.confidence_excluded_ids(plain, MODEL) == ()
    both = replace(plain, confidence_eos_eot_inf=True)
    assert rows.confidence_excluded_ids(both, MODEL) == ends


def test_llada_without_tokenizer_still_excludes_its_turn_end() -> None:
    llada = replace(MODEL, vocab_size=126464, mask_id=126336, eos_ids=(126081,))
    config = GenerationConfig(confidence_eos_eot_inf=True)
    assert rows.confidence_excluded_ids(config, llada) == (126081, 126348)
    named = replace(llada, eos_ids=(126081, 126348))
    assert rows.confidence_excluded_ids(config, named) == (126081, 126348)


def test_id_rows_are_never_empty() -> None:
    assert rows.id_rows((), 2).tolist() == [[-1], [-1]]
    assert rows.id_rows((4, 7), 2).tolist() == [[4, 7], [4, 7]]
    assert rows.id_rows((4,), 1).dtype == np.int32
