"""Progress bars on stderr, one line a stage."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bars


class RichProgress:
    """Implements `lacache_trt.progress.Progress`; a context manager that tidies the terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = self._new_bars()
        self._task: TaskID | None = None
        self._total = 1

    def start(self, stage: str, total: int | None = None) -> None:
        """Finish the current stage and show the next one."""
        self._finish()
        self._task, self._total = self._bars.add_task(stage, total=total), total or 1
        self._bars.start()

    def advance(self, amount: int = 1) -> None:
        """Move the bar of the current stage."""
        if self._task is not None:
            self._bars.advance(self._task, amount)

    def pause(self) -> None:
        """Finish what is shown, so that something else can be drawn; `start` continues below."""
        self._finish()
        self._bars.stop()
        # A restarted display would move up by its old height, over what was drawn meanwhile.
        self._bars = self._new_bars()

    def _new_bars(self) -> Bars:
        return Bars(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )

    def __enter__(self) -> RichProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._finish()
        self._bars.stop()

    def _finish(self) -> None:
        if self._task is None:
            return
        self._bars.update(self._task, total=self._total, completed=self._total)
        self._task = None
