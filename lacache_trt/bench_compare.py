"""Two benchmark reports side by side: every number that both have, and how it changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lacache_trt.errors import InvalidRequestError
from lacache_trt.strict_json import read_object

_NAMES = ("cache", "graph", "kernel")
_COMPARED = "timings"


@dataclass(frozen=True)
class Change:
    """One number of both reports; `ratio` is new / old."""

    name: str
    old: float
    new: float
    ratio: float


@dataclass(frozen=True)
class SavedReport:
    """A report that `--save-result` wrote."""

    name: str
    fields: Mapping[str, object]

    def check(self, field: str, value: object) -> None:
        """Raise `InvalidRequestError` if it was measured on another engine or workload."""
        if _comparable(self.fields.get(field)) != _comparable(value):
            raise InvalidRequestError(
                f"{self.name} was measured on another {field}",
                got=self.fields.get(field),
                expected=value,
                fix="compare reports of the same command",
            )


def read_saved(path: Path) -> SavedReport:
    """Raises `ArtifactError` if the file cannot be read or is no JSON object."""
    return SavedReport(path.name, read_object(path))


def compare(old: SavedReport, report: Mapping[str, object]) -> list[Change]:
    """The timings of a saved report beside those of a new one.

    Raises `InvalidRequestError` if they do not time the same workload.
    """
    for field in ("engine", "workload"):
        old.check(field, report.get(field))
    numbers = dict(_numbers(old.fields.get(_COMPARED), ""))
    return [
        Change(name, numbers[name], new, new / numbers[name])
        for name, new in _numbers(report.get(_COMPARED), "")
        if numbers.get(name)
    ]


def _comparable(value: object) -> object:
    """A workload without the number of repeats."""
    if isinstance(value, Mapping):
        return {key: item for key, item in value.items() if key != "repeats"}
    return value


def _numbers(value: object, name: str) -> Iterator[tuple[str, float]]:
    """Dotted name and value of every number; list entries are named by what they time."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _numbers(item, _entry(item, index))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, float(value)


def _entry(item: object, index: int) -> str:
    if isinstance(item, Mapping):
        return next((str(item[key]) for key in _NAMES if key in item), str(index))
    return str(index)
