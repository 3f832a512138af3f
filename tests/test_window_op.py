"""AttentionWindow: reference against float64 brute force, ONNX function against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from canvases import Shape, bounded, relative_error
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_ops_functions import brute_attention, compare, head_counts, run_reference, widened
from window_cases import WindowShape, windows

from lacache_trt.model.columns import place_columns
from lacache_trt.plugins.attention_window.op import ATTENTION_WINDOW

Array = NDArray[Any]


def window_inputs(
    case: WindowShape, heads: tuple[int, int], head_dim: int, dtype: str, queries: int | None = None
) -> dict[str, Array]:
    """Random operands; the cache holds junk at the window's columns."""
    rng = np.random.default_rng(case.shape.seed)
    columns = case.columns
    rows, width = columns.shape

    def normal(count: int, length: int, scale: float) -> Array:
        return (rng.standard_normal((rows, count, length, head_dim)) * scale).astype(dtype)

    inputs = {
        "q_w": normal(heads[0], queries or width, 2.0),
        "k_w": normal(heads[1], width, 1.0),
        "v_w": normal(heads[1], width, 1.0),
        "k": normal(heads[1], case.shape.length, 1.0),
        "v": normal(heads[1], case.shape.length, 1.0),
        "window_columns": columns,
        "valid_from": np.array(case.shape.valid_from, np.int32),
        "valid_to": np.array(case.shape.valid_to, np.int32),
    }
    for row in range(rows):
        stale = columns[row][columns[row] >= 0]
        inputs["k"][row][:, stale] = 33.0
        inputs["v"][row][:, stale] = 77.0
    return inputs


cases = given(
    case=windows(max_rows=2, max_side=12),
    heads=head_counts,
    head_dim=st.sampled_from([2, 8, 16]),
)


@bounded(20)
@cases
def test_the_reference_is_the_formula(
    case: WindowShape, heads: tuple[int, int], head_dim: int
) -> None:
    inputs = widened(window_inputs(case, heads, head_dim, "float32"))
    (out,) = run_reference(ATTENTION_WINDOW, inputs)
    group = heads[0] // heads[1]
    rng = np.random.default_rng(case.shape.seed)
    for row in range(case.shape.rows):
        slots = {int(c): i for i, c in enumerate(inputs["window_columns"][row]) if c >= 0}
        valid = range(case.shape.valid_from[row], case.shape.valid_to[row])
        for slot in rng.choice(list(slots.values()), 2):
            for head in range(heads[0]):
                own = head // group
                keys, values = (
                    [
                        inputs[f"{name}_w"][row, own, slots[c]]
                        if c in slots
                        else inputs[name][row, own, c]
                        for c in valid
                    ]
                    for name in "kv"
                )
                *_, expected = brute_attention(inputs["q_w"][row, head, slot], keys, values)
                place = slice(head * head_dim, (head + 1) * head_dim)
                np.testing.assert_allclose(out[row, slot, place], expected, atol=1e-12)


@bounded(25)
@given(
    case=windows(max_rows=3, max_side=24),
    heads=head_counts,
    head_dim=st.sampled_from([2, 16, 64]),
    dtype=st.sampled_from(["float32", "float32", "float16"]),
    queries=st.sampled_from([None, 1, 5]),
)
def test_the_function_equals_the_reference(
    case: WindowShape, heads: tuple[int, int], head_dim: int, dtype: str, queries: int | None
) -> None:
    """Windows of any width at both ends of the canvas, pads, few query rows (the last layer)."""
    inputs = window_inputs(case, heads, head_dim, dtype, queries)
    exact = run_reference(ATTENTION_WINDOW, widened(inputs))
    assert exact[0].shape[:2] == (case.shape.rows, queries or case.columns.shape[1])
    compare(ATTENTION_WINDOW, inputs, exact, dtype)


def test_stale_columns_and_pads_are_not_read() -> None:
    """Other junk at the window's columns and in the pads' rows: the same bits."""
    case = WindowShape(Shape(30, 4, (3, 20), (0, 6), (30, 29), 5), (3, 0), (6, 2))
    assert (case.columns < 0).any()
    inputs = window_inputs(case, (4, 2), 16, "float32")
    (out,) = run_reference(ATTENTION_WINDOW, inputs)
    for row, columns in enumerate(case.columns):
        real = columns[columns >= 0]
        inputs["k"][row][:, real], inputs["v"][row][:, real] = -5.0, 1e30
        inputs["k_w"][row][:, columns < 0], inputs["v_w"][row][:, columns < 0] = 9.0, 1e30
    (again,) = run_reference(ATTENTION_WINDOW, inputs)
    np.testing.assert_array_equal(out, again)


def test_fake_shapes_are_the_real_ones() -> None:
    case = WindowShape(Shape(11, 3, (2, 5), (0, 1), (9, 11), 0), (0, 2), (3, 0))
    inputs = window_inputs(case, (4, 2), 8, "float16", queries=2)
    tensors = tuple(map(torch.from_numpy, inputs.values()))
    ((dtype, size),) = ATTENTION_WINDOW.output_specs(*tensors)
    (value,) = ATTENTION_WINDOW.call(*tensors)
    assert (value.dtype, tuple(value.shape)) == (dtype, tuple(size))


@pytest.mark.parametrize("heads", [1, 3])
@bounded(15)
@given(case=windows(max_rows=3, max_side=10))
def test_place_columns(heads: int, case: WindowShape) -> None:
    """A block's K in the cache of layer 0, column by column."""
    block = case.shape.block_columns
    whole = torch.randn(case.shape.rows, heads, case.shape.length, 4)
    part = torch.randn(case.shape.rows, heads, case.shape.width, 4)
    expected = whole.clone()
    for row, columns in enumerate(block.tolist()):
        expected[row][:, columns] = part[row]
    found = place_columns(whole, part, torch.from_numpy(block))
    assert relative_error(found, expected) == 0.0
