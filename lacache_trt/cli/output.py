"""Where a verb's results, progress and errors go.

Results go to stdout, everything else to stderr. With `--json`, stdout holds exactly one JSON
document: the result, or `{"error": {...}}`; the readable form of an error is on stderr either way.
What fails once the result is being printed, as writing it to a file too, is said on stderr and by
the exit code alone.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import typer

from lacache_trt.cli.termination import Received, termination_raises
from lacache_trt.errors import LaCacheError
from lacache_trt.progress import Progress, SilentProgress

if TYPE_CHECKING:
    from rich.console import Console

BROKEN_PIPE = 141
PIPE_WIDTH = 200
DEBUG_VARIABLE = "LACACHE_TRT_DEBUG"


@dataclass
class Output:
    """How this call reports: as JSON or for a reader; with tracebacks or without.

    Attributes:
        json: results and errors as JSON.
        debug: errors with tracebacks.
        received: the signals of this call, if it takes care of them.
        printed: the one JSON document has been begun, so no other may follow.
    """

    json: bool = False
    debug: bool = False
    received: Received | None = field(default=None, init=False)
    printed: bool = field(default=False, init=False)

    def result(self, data: Mapping[str, object], render: Callable[[], None]) -> None:
        """Print the result: `data` with `--json`, else whatever `render` prints."""
        if self.json:
            text = json.dumps(data, indent=2, default=str)
            # Half a document helps nobody: a signal waits for its end, a second one stops at once.
            if self.received is not None:
                self.received.ignore_more()
            self.printed = True
            _print_whole(text)
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
        say(text)


def say(text: str) -> None:
    """A line on stderr; that nobody can read it changes no result and no exit code."""
    with suppress(OSError):
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
        output.received = received
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
        _drop_stdout()
        raise typer.Exit(BROKEN_PIPE) from None
    if isinstance(error, OSError):
        _drop_unwritable()
        _fail(output, _refused(error), error)
    raise error


def stop_unprinted(error: OSError) -> NoReturn:
    """End the process where no verb runs yet: help or the version could not be printed."""
    _drop_stdout()
    refused = _refused(error)
    say(f"error: {refused}")
    sys.exit(refused.exit_code)


def _refused(error: OSError) -> LaCacheError:
    return LaCacheError("the system refused", got=str(error))


def _print_whole(text: str) -> None:
    """Print ASCII text. Where Python does not buffer, `print` loses what a signal cuts off."""
    raw = getattr(sys.stdout, "buffer", None)
    if not isinstance(raw, io.RawIOBase):
        print(text, flush=True)
        return
    rest = f"{text}\n".encode("ascii")
    while rest:
        rest = rest[os.write(raw.fileno(), rest) :]


def _drop_unwritable() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _drop_stdout()


def _drop_stdout() -> None:
    """Let what is still buffered go nowhere when the interpreter flushes it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stop(output: Output, number: signal.Signals) -> NoReturn:
    what = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    exit_code = 128 + number
    print_error_json(output, LaCacheError(what), exit_code)
    say(f"{what}; partial output was discarded")
    raise typer.Exit(exit_code) from None


def _fail(output: Output, error: LaCacheError, cause: BaseException | None = None) -> NoReturn:
    if output.debug or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
        with suppress(OSError):
            traceback.print_exception(cause or error)
    print_error_json(output, error, error.exit_code)
    say(f"error: {error}")
    raise typer.Exit(error.exit_code) from None


def print_error_json(output: Output, error: LaCacheError, exit_code: int) -> None:
    """The error as the one JSON document of stdout, if JSON is wanted and none was begun."""
    if not output.json or output.printed:
        return
    fields = {"got": error.got, "expected": error.expected, "fix": error.fix}
    document = {
        "type": type(error).__name__,
        "what": error.what,
        **{name: None if value is None else str(value) for name, value in fields.items()},
        "exit_code": exit_code,
    }
    with suppress(OSError):  # the failure may be that nothing can be written to stdout
        print(json.dumps({"error": document}), flush=True)  # a line: it may end JSON lines
