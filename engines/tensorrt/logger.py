"""Keeps TensorRT's last messages, so that a failure can say what TensorRT said."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from lacache_trt.engines.tensorrt.interrupts import Interrupts

_KEPT = 12
_LOG = logging.getLogger("lacache_trt.tensorrt")


def new_logger(trt: Any, interrupts: Interrupts | None = None) -> Any:
    """A logger for `trt` with a method `last_errors`; everything goes to Python's logging too.

    What Python's logging raises is kept in `interrupts`, if they are given.
    """
    levels = {
        trt.ILogger.INTERNAL_ERROR: logging.ERROR,
        trt.ILogger.ERROR: logging.ERROR,
        trt.ILogger.WARNING: logging.WARNING,
        trt.ILogger.INFO: logging.INFO,
        trt.ILogger.VERBOSE: logging.DEBUG,
    }

    class Logger(trt.ILogger):  # type: ignore[misc]
        """See `new_logger`."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._errors: deque[str] = deque(maxlen=_KEPT)

        def log(self, severity: Any, message: str) -> None:
            """Called by TensorRT, from any thread."""
            level = levels.get(severity, logging.INFO)
            if level >= logging.ERROR:
                self._errors.append(message)
                level = logging.INFO  # a typed exception follows and carries the message
            try:
                _LOG.log(level, "%s", message)
            except BaseException as error:  # the bindings would print and drop it
                if interrupts is None:
                    raise
                interrupts.keep(error)

        def last_errors(self) -> str:
            """The last error messages, oldest first; empty if there were none."""
            return "\n".join(self._errors)

    return Logger()
