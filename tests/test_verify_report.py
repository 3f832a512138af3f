"""How far outputs are apart: what must not hide a NaN, and what is left where no token agrees."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lacache_trt.verify_report import largest_difference

EXPECTED = np.array([[1.0, -4.0], [2.0, 8.0]], np.float32)
ALL = np.ones((2, 2), np.bool_)


def test_a_nan_is_never_within_a_bound() -> None:
    found = EXPECTED.copy()
    found[1, 0] = np.nan
    figure = largest_difference(found, EXPECTED, ALL)
    assert math.isnan(figure)
    assert not figure <= 1e9
    assert math.isnan(largest_difference(EXPECTED, found, ALL))


@pytest.mark.parametrize("same", [ALL, np.array([[True, True], [True, False]])])
def test_difference_is_relative_to_the_largest_expected_value(same: np.ndarray) -> None:
    found = EXPECTED + np.array([[0.0, 0.5], [0.0, 0.0]], np.float32)
    largest = np.abs(EXPECTED[same]).max()
    assert largest_difference(found, EXPECTED, same) == pytest.approx(0.5 / largest)


def test_no_token_in_common_is_no_crash() -> None:
    assert largest_difference(EXPECTED + 1, EXPECTED, ~ALL) == 0.0
