"""SIGTERM and SIGHUP as an exception, so that everything on the way out is tidied."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

WATCHED = (signal.SIGTERM, signal.SIGHUP)


class Terminated(BaseException):
    """The process was asked to end; `exit_code` is what a shell shows for such an end."""

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        self.exit_code = 128 + number
        super().__init__(self.name)


@contextmanager
def termination_raises() -> Iterator[None]:
    """Raise `Terminated` inside the block; once, so that a second signal stops no tidying.

    A signal that is ignored (nohup) or handled already stays as it is, and only the main thread may
    set handlers.
    """
    watched = []
    if threading.current_thread() is threading.main_thread():
        watched = [number for number in WATCHED if signal.getsignal(number) is signal.SIG_DFL]
    for number in watched:
        signal.signal(number, _raise_once)
    try:
        yield
    finally:
        for number in watched:
            signal.signal(number, signal.SIG_DFL)


def _raise_once(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise Terminated(number)
