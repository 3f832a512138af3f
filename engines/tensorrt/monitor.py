"""Shows a TensorRT build as stages of `lacache_trt.progress.Progress`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lacache_trt.engines.tensorrt.interrupts import Interrupts
from lacache_trt.progress import Progress


def new_monitor(trt: Any, progress: Progress, label: str, interrupts: Interrupts) -> Any:
    """An `IProgressMonitor` that reports the outermost phases; their inner ones nest in threads.

    It cancels the build once something is kept in `interrupts`, as what `progress` raises is.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """See `new_monitor`."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._lock = threading.Lock()
            self._phase: str | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            """A phase of `num_steps` begins."""
            with self._lock:
                if not parent_phase:
                    self._phase = phase_name
                    stage = f"{label}: {phase_name[:1].lower()}{phase_name[1:]}"
                    self._report(progress.start, stage, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            """A step is done; False would cancel the build."""
            with self._lock:
                if phase_name == self._phase:
                    self._report(progress.advance)
            return not interrupts.kept

        def phase_finish(self, phase_name: str) -> None:
            """A phase is done."""
            with self._lock:
                if phase_name == self._phase:
                    self._phase = None

        def _report(self, show: Callable[..., None], *facts: object) -> None:
            try:
                show(*facts)
            except BaseException as error:  # the bindings would print and drop it
                interrupts.keep(error)

    return Monitor()
