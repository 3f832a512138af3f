"""How long work reports what it is doing, without knowing who shows it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """One stage at a time: `start`, any number of `advance`, then the next `start`."""

    def start(self, stage: str, total: int | None = None) -> None:
        """Begin a stage of `total` units, or of unknown length."""

    def advance(self, amount: int = 1) -> None:
        """Count `amount` more units of the current stage as done."""


class SilentProgress:
    """Reports nothing; the default of the library calls."""

    def start(self, stage: str, total: int | None = None) -> None:
        """Ignore the stage."""

    def advance(self, amount: int = 1) -> None:
        """Ignore the units."""
