"""Keeps what is raised inside of TensorRT's calls, where its bindings would print and drop it.

A signal's handler runs wherever Python runs next, and during a build that is inside of a callback,
even before its first line. There a handler's KeyboardInterrupt, or an error of whoever shows the
progress, gets lost. So handlers are wrapped for the length of the calls, callbacks catch, and what
was kept is raised when TensorRT has returned.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """The first exception that was raised where it could not pass."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    @property
    def kept(self) -> bool:
        """Whether there is one, that is: whether to stop."""
        return self._error is not None

    def keep(self, error: BaseException) -> None:
        """Remember an exception; later ones follow from the first. Called from any thread."""
        if self._error is None:
            self._error = error

    def check(self) -> None:
        """Raise what was kept."""
        if self._error is not None:
            raise self._error


@contextmanager
def interrupts_kept() -> Iterator[Interrupts]:
    """For the length of calls that drop exceptions; at the end raises the one that was kept.

    It goes before an error of the block, which then is about a call that was stopped.
    """
    interrupts = Interrupts()
    with ExitStack() as restored:
        try:
            _wrap_handlers(interrupts, restored)
            yield interrupts
        except BaseException as error:
            interrupts.keep(error)
    interrupts.check()


def _wrap_handlers(interrupts: Interrupts, restored: ExitStack) -> None:
    """Wrap every handler that is Python's. They run in the main thread, which alone sets them."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in signal.Signals:
        handler = signal.getsignal(number)
        if callable(handler):
            restored.callback(signal.signal, number, handler)
            signal.signal(number, _keeping(handler, interrupts))


def _keeping(handler: Callable[..., Any], interrupts: Interrupts) -> Callable[..., None]:
    def handle(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except BaseException as error:
            interrupts.keep(error)

    return handle
