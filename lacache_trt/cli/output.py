"""Where a verb's results, progress and errors go.

Results go to stdout, everything else to stderr. With `--json`, stdout holds exactly one JSON
document: the result, or `{"error": {...}}`; the readable form of an error is on stderr either way.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import typer

from lacache_trt.cli.termination import termination_raises
from lacache_trt.errors import LaCacheError
from lacache_trt.progress import Progress, SilentProgress

if TYPE_CHECKING:
    from rich.console import Console

BROKEN_PIPE = 141
PIPE_WIDTH = 200
DEBUG_VARIABLE = "LACACHE_TRT_DEBUG"


@dataclass(frozen=True)
class Output:
    """How this call reports: as JSON or for a reader; with tracebacks or without."""

    json: bool = False
    debug: bool = False

    def result(self, data: Mapping[str, object], render: Callable[[], None]) -> None:
        """Print the result: `data` with `--json`, else whatever `render` prints."""
        if self.json:
            print(json.dumps(data, indent=2, default=str))
        else:
            render()

    @contextmanager
    def progress(self, *, lines: bool = True) -> Iterator[Progress]:
        """Bars on stderr if that is a terminal, else a line every few seconds, or silence."""
        if sys.stderr.isatty():
            from lacache_trt.cli.progress import RichProgress

            with RichProgress() as bars:
                yield bars
        elif lines:
            from lacache_trt.cli.progress_lines import LineProgress

            with LineProgress() as log:
                yield log
        else:
            yield SilentProgress()

    def note(self, text: str) -> None:
        """A line for the reader, next to the result."""
        print(text, file=sys.stderr)


def console() -> Console:
    """A console on stdout; plain text in long lines when it is not a terminal."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=PIPE_WIDTH)


def guarded(output: Output, action: Callable[[], None]) -> None:
    """Run a verb; every failure that can be expected becomes a message and an exit code."""
    with termination_raises() as received:
        try:
            action()
            sys.stdout.flush()
            received.ignore_more()
        except BaseException as error:
            received.ignore_more()
            # After a signal any error may be what native code made of it.
            if received.first is not None:
                _stop(output, received.first)
            _report(output, error)


def _report(output: Output, error: BaseException) -> NoReturn:
    if isinstance(error, LaCacheError):
        _fail(output, error)
    if isinstance(error, KeyboardInterrupt):
        _stop(output, signal.SIGINT)
    if isinstance(error, BrokenPipeError):
        # Whoever read our output has seen enough; the interpreter must not flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None
    if isinstance(error, OSError):
        _fail(output, LaCacheError("the system refused", got=str(error)), error)
    raise error


def _stop(output: Output, number: signal.Signals) -> NoReturn:
    what = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    exit_code = 128 + number
    print_error_json(output, LaCacheError(what), exit_code)
    print(f"{what}; partial output was discarded", file=sys.stderr)
    raise typer.Exit(exit_code) from None


def _fail(output: Output, error: LaCacheError, cause: BaseException | None = None) -> NoReturn:
    if output.debug or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
        traceback.print_exception(cause or error)
    print_error_json(output, error, error.exit_code)
    print(f"error: {error}", file=sys.stderr)
    raise typer.Exit(error.exit_code) from None


def print_error_json(output: Output, error: LaCacheError, exit_code: int) -> None:
    """The error as the one JSON document of stdout, if JSON is wanted."""
    if not output.json:
        return
    fields = {"got": error.got, "expected": error.expected, "fix": error.fix}
    document = {
        "type": type(error).__name__,
        "what": error.what,
        **{name: None if value is None else str(value) for name, value in fields.items()},
        "exit_code": exit_code,
    }
    with suppress(OSError):  # the failure may be that nothing can be written to stdout
        print(json.dumps({"error": document}, indent=2), flush=True)
