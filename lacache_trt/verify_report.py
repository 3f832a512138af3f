"""What `verify` found, as data, JSON and Markdown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One comparison: its name, whether it held, and the figures behind it."""

    name: str
    passed: bool
    figures: dict[str, float]


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
        """Plain types, `passed` included."""
        return {"passed": self.passed, **asdict(self)}

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
            figures = ", ".join(f"{name} {value:.3g}" for name, value in check.figures.items())
            lines.append(f"| {check.name} | {'yes' if check.passed else 'NO'} | {figures} |")
        return "\n".join(lines) + "\n"
