"""Where `lacache-trt` starts: Ctrl-C ends it without a word until a verb can tidy up.

Nothing has been written by then. An exception instead would end in a traceback, or be lost where
Python drops those of a callback, of which its import system has many.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Take Ctrl-C over, unless it is ignored or handled already, then load the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    from lacache_trt.cli.main import main as run

    run()


def end_at_once(number: int, _frame: FrameType | None) -> None:
    """The handler of SIGINT outside of verbs."""
    os._exit(128 + number)
