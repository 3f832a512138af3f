"""Progress as lines on stderr, for logs and pipes: at once, then one every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from types import TracebackType

_EVERY_S = 5.0
_ALIVE_S = 60.0
_MOST_COUNTED = 10_000


class LineProgress:
    """Implements `lacache_trt.progress.Progress`; a thread prints what has changed.

    Args:
        every_s: seconds between two lines.
        alive_s: seconds until a line is printed although nothing changed.
    """

    def __init__(self, every_s: float = _EVERY_S, alive_s: float = _ALIVE_S) -> None:
        self._every_s, self._alive_s = every_s, alive_s
        self._started = self._printed = time.monotonic()
        self._stage: str | None = None
        self._total: int | None = None
        self._done = 0
        self._last = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def start(self, stage: str, total: int | None = None) -> None:
        """Note the stage; the first one is printed at once."""
        first = self._stage is None
        self._done, self._total, self._stage = 0, total, stage
        if first:
            self._print()

    def advance(self, amount: int = 1) -> None:
        """Count; the thread prints."""
        self._done += amount

    def __enter__(self) -> LineProgress:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if error is None and self._state() != self._last:
            self._print()

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            silent = time.monotonic() - self._printed
            if self._stage is not None and (self._state() != self._last or silent >= self._alive_s):
                self._print()

    def _state(self) -> str:
        done, total = self._done, self._total
        if total is None:
            return f"{self._stage or ''}{f': {done} done' if done else ''}"
        if total < _MOST_COUNTED:
            return f"{self._stage}: {done} of {total}"
        return f"{self._stage}: {100 * done // total}%"

    def _print(self) -> None:
        self._last, self._printed = self._state(), time.monotonic()
        with suppress(OSError):  # work goes on when nobody reads its log
            elapsed = self._printed - self._started
            print(f"[{elapsed:.0f} s] {self._last}", file=sys.stderr, flush=True)
