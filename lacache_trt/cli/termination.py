"""Ctrl-C, SIGTERM and SIGHUP as an exception, so that everything on the way out is tidied.

Native code may turn that exception into another one, and it runs only where Python runs, which a
long call keeps from it. So which signal came first is remembered, and a thread ends the process on
a later one, whatever the main thread does.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import Any

from lacache_trt.cli.entry import end_at_once

_Handler = Callable[[int, FrameType | None], Any] | signal.Handlers
_REPLACED: dict[signal.Signals, tuple[_Handler, ...]] = {
    signal.SIGINT: (signal.default_int_handler, end_at_once),
    signal.SIGTERM: (signal.SIG_DFL,),
    signal.SIGHUP: (signal.SIG_DFL,),
}
# A terminal that closes sends SIGHUP twice: from the shell and from the kernel.
_SAME_S = 1.0
_PATIENCE_S = 3.0
_AGAIN_S = 0.1
_WAITING = b"stopping when the current step lets go; a second signal stops at once\n"


class Terminated(BaseException):
    """The process was asked to end by SIGTERM or SIGHUP."""


class Received:
    """The first signal, or None; after `ignore_more` none raises an exception any longer."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._over = False

    @property
    def put_off(self) -> bool:
        """Whether `handle` is to be called again, as it could not raise."""
        return self.first is not None and not self._over

    def ignore_more(self) -> None:
        """The work is over, and what is left must not be torn apart."""
        self._over = True

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise on the first signal only, so that the next one stops no tidying."""
        if self._over:
            return
        self.first = self.first or signal.Signals(number)
        if _in_native_import(frame):
            return
        self._over = True
        if self.first == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(self.first.name)


def _in_native_import(frame: FrameType | None) -> bool:
    """Whether native code is being imported: some crashes when Python raises inside of that."""
    while frame is not None:
        if frame.f_code.co_name in ("create_module", "exec_module") and isinstance(
            frame.f_locals.get("self"), ExtensionFileLoader
        ):
            return True
        frame = frame.f_back
    return False


@contextmanager
def termination_raises() -> Iterator[Received]:
    """Raise `KeyboardInterrupt` or `Terminated` inside the block on the first signal.

    A later one ends the process at once. A signal that is ignored (nohup) or handled already stays
    as it is, and only the main thread may set handlers.
    """
    received = Received()
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in _REPLACED}
        before = {number: own for number, own in found.items() if own in _REPLACED[number]}
    if not before:
        yield received
        return
    for number in before:
        signal.signal(number, received.handle)
    try:
        with _watched(received, frozenset(before)):
            yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _watched(received: Received, numbers: frozenset[int]) -> Iterator[None]:
    """Watch, in a thread, the signals' numbers that Python's own handler writes into a pipe."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    watch = _Watch(reading, received, numbers)
    thread = threading.Thread(target=watch.run, name="signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)
        thread.join()
        os.close(reading)


class _Watch:
    """Repeats a signal that was put off, says if the first one takes long, ends on the second."""

    def __init__(self, reading: int, received: Received, numbers: frozenset[int]) -> None:
        self._reading, self._received, self._numbers = reading, received, numbers
        self._first: float | None = None
        self._told = False
        self._main = threading.get_ident()

    def run(self) -> None:
        """Until the pipe is closed."""
        while True:
            waits = None if self._first is None else _AGAIN_S
            if not select.select([self._reading], [], [], waits)[0]:
                self._tick()
                continue
            numbers = os.read(self._reading, 512)
            if not numbers:
                return
            for number in self._numbers.intersection(numbers):
                self._count(number)

    def _count(self, number: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
        elif now - self._first >= _SAME_S:
            os._exit(128 + number)

    def _tick(self) -> None:
        number = self._received.first
        if number is not None and self._received.put_off:
            signal.pthread_kill(self._main, number)
            os.read(self._reading, 1)  # that one's number, which does not count
        waited = 0.0 if self._first is None else time.monotonic() - self._first
        if waited >= _PATIENCE_S and not self._told:
            self._told = True
            with suppress(OSError):
                os.write(2, _WAITING)
