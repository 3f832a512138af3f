"""Suffix dropout and the layout of a pruned canvas."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_decoding import noise_bits
from toy_runtime import MODEL

from lacache_trt.decoding import rows
from lacache_trt.decoding.layout import lay_out
from lacache_trt.decoding.suffix import keep_probabilities, kept_distances
from lacache_trt.generation import GenerationConfig

SUFFIX_ID = 2**30 + 2**20


@given(st.integers(0, 40), st.integers(1, 50), st.floats(0, 6), st.floats(0, 5))
def test_probabilities_are_the_normal_density_over_a_grid(
    length: int, window: int, sigma: float, scale: float
) -> None:
    found = keep_probabilities(length, window, sigma, scale)
    assert found.shape == (length,)
    for distance in range(length):
        z = sigma * distance / (window - 1) if window > 1 else 0.0
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        expected = scale * density if distance < window else 0.0
        assert found[distance] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("sigma", "scale", "window", "expected"), [(4, 2.0, 256, 64), (3, 1.6, 256, 68)]
)
def test_as_many_are_kept_as_the_published_settings_say(
    sigma: float, scale: float, window: int, expected: int
) -> None:
    assert keep_probabilities(512, window, sigma, scale).sum() == pytest.approx(expected, abs=1)
    counts = []
    for seed in range(40):
        config = GenerationConfig(
            gen_length=512,
            steps=512,
            suffix="dpad",
            suffix_sigma=sigma,
            suffix_scale=scale,
            suffix_window=window,
            suffix_seed=seed,
        )
        counts.append(len(kept_distances(config, 0)))
    assert abs(np.mean(counts) - expected) < 4
    assert len(set(counts)) > 5


@given(st.integers(0, 7), st.integers(0, 2**31 - 2), st.integers(1, 80))
def test_draws_are_the_seeded_hash(block: int, seed: int, window: int) -> None:
    config = GenerationConfig(
        gen_length=64,
        block_length=8,
        steps=64,
        suffix="dpad",
        suffix_seed=seed,
        suffix_window=window,
    )
    found = kept_distances(config, block).tolist()
    p = keep_probabilities(64 - 8 * (block + 1), window, 4.0, 2.0)
    expected = [
        distance
        for distance, limit in enumerate(p)
        if (noise_bits(seed, block, 0, SUFFIX_ID + distance) + 0.5) / 2**23 < limit
    ]
    assert found == expected


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=4),
    st.integers(0, 50),
    st.booleans(),
    st.data(),
)
def test_a_layout_keeps_true_positions_and_every_block(
    shapes: list[tuple[int, int]], seed: int, block_aligned: bool, data: st.DataObject
) -> None:
    config = GenerationConfig(
        gen_length=16, block_length=4, steps=16, suffix="dpad", suffix_window=9, suffix_seed=seed
    )
    prompts = [tuple(range(1, length + 1)) for length, _ in shapes]
    blocks = np.array([block for _, block in shapes], np.int32)
    if block_aligned:
        blocks[:] = blocks[0]
    ends = np.array([data.draw(st.integers(block + 1, 4)) for block in blocks], np.int32)
    canvas = rows.pad_left(prompts, 16, MODEL)
    columns = canvas.tokens.shape[1]
    layout = lay_out(blocks, ends, columns, config, block_aligned=block_aligned)
    seen = layout.pick(canvas)
    full_blocks = rows.columns_of_blocks(blocks, columns, config)
    for row, prompt in enumerate(prompts):
        real = range(int(seen.valid_from[row]), int(seen.valid_to[row]))
        generated = int(blocks[row] + 1) * 4
        kept = [generated + int(d) for d in kept_distances(config, int(blocks[row]))]
        expected = [*range(len(prompt) + generated)]
        expected += [len(prompt) + c for c in kept if c < ends[row] * 4]
        assert seen.positions[row, real].tolist() == expected
        assert seen.tokens[row, real][: len(prompt)].tolist() == list(prompt)
        block = full_blocks[row] + layout.offset[row]
        np.testing.assert_array_equal(layout.index[row, block], full_blocks[row])
    if block_aligned:
        assert (layout.offset == 0).all()


def test_a_layout_that_keeps_everything_is_the_canvas_itself() -> None:
    config = GenerationConfig(gen_length=16, block_length=4, steps=16)
    canvas = rows.pad_left([(1, 2), (3,)], 16, MODEL)
    blocks, ends = np.array([0, 3], np.int32), np.array([4, 4], np.int32)
    assert lay_out(blocks, ends, 18, config, block_aligned=False).pick(canvas) is canvas
