"""When a request must be over."""

from __future__ import annotations

import time


class Deadline:
    """`GenerationConfig.deadline_s` from a request's start."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """The time is over."""
        return self._end is not None and time.monotonic() >= self._end
