"""Paired bootstrap over problems, and what is measured of two predictions.

Problems are drawn with replacement; every statistic of a study uses the same draws, so differences
between cases are paired (Efron and Tibshirani 1993, percentile intervals). An interval is two-sided
with 95%: its upper end is exceeded with 2.5%.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lacache_trt.errors import InvalidRequestError, NumericalError

Values = NDArray[np.float64]
TAIL = 0.025
_CHUNK = 256


@dataclass(frozen=True)
class Bounded:
    """An estimate and its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


class Bootstrap:
    """The draws of a study: how often each problem occurs in each resample, uint16 [R, n]."""

    def __init__(self, problems: int, resamples: int, seed: int) -> None:
        if problems < 2:
            raise InvalidRequestError(
                "a bootstrap needs at least two problems", got=problems, expected="2 or more"
            )
        rng = np.random.default_rng(seed)
        self._counts = np.zeros((resamples, problems), np.uint16)
        for row in self._counts:
            row[:] = np.bincount(rng.integers(0, problems, problems), minlength=problems)

    @property
    def problems(self) -> int:
        """How many problems are drawn."""
        return int(self._counts.shape[1])

    def mean(self, values: Values | NDArray[np.bool_]) -> Bounded:
        """Mean over problems of one value each."""
        checked = _finite(values)
        totals = self._totals(checked) / len(checked)
        return _bounded(float(checked.mean()), totals)

    def decibels(self, signal: Values, noise: Values) -> Bounded:
        """10 log10 of the summed signal energy over the summed noise energy."""
        total, error = _finite(signal), _finite(noise)
        resampled = _ratio_decibels(self._totals(total), self._totals(error))
        value = _ratio_decibels(np.array([total.sum()]), np.array([error.sum()]))
        return _bounded(float(value[0]), resampled)

    def gap(self, baseline: NDArray[np.bool_], other: NDArray[np.bool_]) -> Bounded:
        """Exact match of the baseline minus that of the other, paired problem by problem.

        If the other loses no problem that the baseline has right, resampling cannot find a loss
        either; the upper end is then the exact binomial one, 1 - 0.025 ** (1 / n).
        """
        difference = baseline.astype(np.float64) - other.astype(np.float64)
        found = self.mean(difference)
        if (difference > 0).any():
            return found
        highest = 1.0 - TAIL ** (1.0 / len(difference))
        return Bounded(found.value, found.low, max(found.high, highest))

    def _totals(self, values: Values) -> Values:
        """Sum of the drawn values of every resample."""
        parts = [
            self._counts[first : first + _CHUNK].astype(np.float64) @ values
            for first in range(0, len(self._counts), _CHUNK)
        ]
        return np.concatenate(parts)


def _bounded(value: float, resampled: Values) -> Bounded:
    low, high = np.quantile(resampled, [TAIL, 1 - TAIL], method="inverted_cdf")
    return Bounded(value, float(low), float(high))


def _ratio_decibels(signal: Values, noise: Values) -> Values:
    """Infinite without noise."""
    with np.errstate(divide="ignore"):
        return np.asarray(10.0 * (np.log10(signal) - np.log10(noise)), np.float64)


def _finite(values: Values | NDArray[np.bool_]) -> Values:
    checked = np.asarray(values, np.float64)
    if not np.isfinite(checked).all():
        raise NumericalError(
            "a statistic of a problem is NaN or infinite",
            got=f"{int((~np.isfinite(checked)).sum())} of {checked.size} problems",
            expected="finite values",
            fix="leave this scheme out, or look at its activations",
        )
    return checked
