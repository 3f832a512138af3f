"""Which implementation runs at which shape: measured when the engine is built, then fixed.

A table entry is keyed by (K, N) of the weight and a ceiling of M; the entry with the smallest
ceiling that is at least M decides. A fixed table makes a run reproducible: the same engine
directory always runs the same kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from lacache_trt.errors import ArtifactError

Table = TypeVar("Table", bound="ChoiceTable")


@dataclass(frozen=True)
class ChoiceTable:
    """Implementation names by weight shape (K, N) and M ceiling."""

    entries: Mapping[tuple[int, int], Mapping[int, str]]
    NAMES: ClassVar[tuple[str, ...]] = ()
    """The implementations; the first one runs where nothing was measured."""

    def choice(self, m: int, k: int, n: int) -> str:
        """Name of the implementation for a shape."""
        by_ceiling = self.entries.get((k, n), {})
        fitting = [ceiling for ceiling in by_ceiling if ceiling >= m]
        if not by_ceiling:
            return self.NAMES[0]
        return by_ceiling[min(fitting) if fitting else max(by_ceiling)]

    def to_json(self) -> list[dict[str, Any]]:
        """The manifest's form."""
        return [
            {"k": k, "n": n, "m_up_to": ceiling, "implementation": name}
            for (k, n), by_ceiling in self.entries.items()
            for ceiling, name in by_ceiling.items()
        ]

    @classmethod
    def from_json(cls: type[Table], data: object) -> Table:
        """Read the manifest's form strictly."""
        entries: dict[tuple[int, int], dict[int, str]] = {}
        for row in data if isinstance(data, list) else [None]:
            fields = row if isinstance(row, dict) else {}
            name = fields.get("implementation")
            numbers: list[Any] = [fields.get(key) for key in ("k", "n", "m_up_to")]
            known = isinstance(name, str) and name in cls.NAMES
            if not known or not all(type(value) is int for value in numbers):
                raise ArtifactError(
                    "the GEMM table of the manifest is malformed",
                    got=row,
                    expected=f"k, n, m_up_to and one of {', '.join(cls.NAMES)}",
                    fix="build the engine again",
                )
            k, n, ceiling = numbers
            entries.setdefault((k, n), {})[ceiling] = str(name)
        return cls(entries)
