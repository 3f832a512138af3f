"""What `verify` found, as data, JSON and Markdown."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

EXCUSED_FRACTION = 1e-3
"""Of the tokens compared, near ties that may come out otherwise; one always may."""


def largest_difference(
    found: NDArray[np.float32], expected: NDArray[np.float32], same: NDArray[np.bool_]
) -> float:
    """Largest difference where `same`, over the largest expected value; NaN if there is a NaN.

    0 if nothing is the same: then the tokens differ, which is another check.
    """
    with np.errstate(invalid="ignore"):  # inf - inf is a NaN, which is what is wanted
        difference = np.where(same, np.abs(found - expected), 0.0).max()
    scale = np.where(same, np.abs(expected), 0.0).max()
    return float(difference / np.maximum(scale, 1e-30))


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what is compared.
        passed: whether it held.
        figures: the numbers behind it.
        problem: why it could not be carried through, if it could not.
    """

    name: str
    passed: bool
    figures: dict[str, float]
    problem: str | None = None

    @property
    def shown(self) -> str:
        """The figures and the problem in one line."""
        parts = [f"{name} {value:.4g}" for name, value in self.figures.items()]
        return ", ".join([*parts, self.problem] if self.problem else parts) or "none"


@dataclass(frozen=True)
class VerifyReport:
    """What was checked on which engine."""

    engine: str
    device: str
    dtype: str
    reference: str
    bound: float
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Every check held."""
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain types, `passed` included; a figure that is no finite number is null."""
        data = {"passed": self.passed, **asdict(self)}
        for check in data["checks"]:
            figures = check["figures"].items()
            check["figures"] = {name: v if math.isfinite(v) else None for name, v in figures}
        return data

    def to_markdown(self) -> str:
        """A table to paste into a report."""
        lines = [
            f"**{'passed' if self.passed else 'FAILED'}**: {self.engine} engine on {self.device}, "
            f"{self.dtype}, against {self.reference}, bound {self.bound:g}",
            "",
            "| check | held | figures |",
            "|---|---|---|",
        ]
        for check in self.checks:
            lines.append(f"| {check.name} | {'yes' if check.passed else 'NO'} | {check.shown} |")
        return "\n".join(lines) + "\n"
