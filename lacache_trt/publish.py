"""A directory that is complete or absent, whatever happens while it is written.

The work goes to a hidden sibling `.NAME.tmp-PID-RANDOM`; when it is finished every file and
directory is flushed to disk and one rename makes it visible as `NAME`. An artefact that it replaces
steps aside to `.NAME.old-PID-RANDOM` first. An exception, Ctrl-C or SIGTERM leaves the old or the
new artefact and no sibling. SIGKILL or a power cut may leave siblings that nobody owns: the next
run for this output puts back an old artefact without a successor and removes the others.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from lacache_trt.errors import OutputError
from lacache_trt.siblings import DirectoryLock, put_back, recover, remove, sibling

MANIFEST_NAME = "manifest.json"
_EXPECTED = "a new or empty directory in a folder that exists"
_ALWAYS_OUTPUT = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_OCCUPIED = {errno.ENOTEMPTY, errno.EEXIST}


@contextmanager
def publish_directory(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty temporary directory that becomes `out` when the block ends normally.

    Args:
        out: the directory to create; absent or empty, unless `overwrite`.
        overwrite: replace an artefact that stands there. A directory without `manifest.json` is
            never replaced, so that a mistyped path cannot delete anything else.

    Raises:
        OutputError: `out` cannot be written, or the disk is full.
    """
    out = Path(os.path.abspath(out))
    recover(out)
    _refuse_unwritable(out, overwrite)
    temporary, lock = sibling(out, "tmp"), DirectoryLock()
    with _termination_as_exception(), lock:
        try:
            while not lock.create(temporary):
                temporary = sibling(out, "tmp")
            yield temporary
            _flush(temporary)
            _replace(temporary, out, overwrite)
        except OSError as error:
            remove(temporary)
            if _is_output_failure(error, temporary, out):
                raise _output_error(error, out) from error
            raise
        except BaseException:
            remove(temporary)
            raise


def refuse_overlap(out: Path, source: Path, *, inside_allowed: bool = False) -> None:
    """Refuse an output that would replace the input, hold it or, by default, lie inside of it.

    A file more makes a bundle one that its manifest does not describe; a checkpoint may hold more.
    """
    target, origin = Path(os.path.realpath(out)), Path(os.path.realpath(source))
    if origin.is_relative_to(target) or (target.is_relative_to(origin) and not inside_allowed):
        raise OutputError(
            "the output and the input overlap",
            got=f"output {out}, input {source}",
            expected="an output directory beside the input",
            fix="choose another output directory",
        )


def _refuse_unwritable(out: Path, overwrite: bool) -> None:
    if not out.name:
        raise OutputError(
            "the output is the root directory",
            got=out,
            expected=_EXPECTED,
            fix="name a new directory",
        )
    if not out.parent.is_dir():
        raise OutputError(
            "the folder that should hold the output does not exist",
            got=out.parent,
            expected=_EXPECTED,
            fix=f"mkdir -p {out.parent}",
        )
    if out.is_symlink():
        raise OutputError(
            "the output is a symbolic link",
            got=out,
            expected=_EXPECTED,
            fix="name the directory that it points to",
        )
    if not out.exists():
        return
    if not out.is_dir():
        raise OutputError(
            "the output exists and is a file",
            got=out,
            expected=_EXPECTED,
            fix="choose another name",
        )
    _refuse_occupied(out, overwrite)


def _refuse_occupied(out: Path, overwrite: bool) -> None:
    try:
        entries = {entry.name for entry in os.scandir(out)}
    except OSError as error:
        raise _output_error(error, out) from error
    if not entries:
        return
    if MANIFEST_NAME not in entries:
        raise OutputError(
            "the output directory is not empty, and it is not an artefact of this toolkit",
            got=f"{out} without {MANIFEST_NAME}",
            expected=_EXPECTED,
            fix="choose another directory: this one was not written by lacache-trt",
        )
    if not overwrite:
        raise OutputError(
            "the output directory is not empty",
            got=out,
            expected=_EXPECTED,
            fix="choose another directory, or add --force (overwrite=True) to replace it",
        )


def _flush(directory: Path) -> None:
    for folder, _, names in os.walk(directory):
        for path in (*(os.path.join(folder, name) for name in names), folder):
            _sync(path)


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(temporary: Path, out: Path, overwrite: bool) -> None:
    """Rename into place; an existing artefact steps aside and comes back if that fails."""
    old = sibling(out, "old")
    with DirectoryLock() as lock:
        lock.wait_for(out)
        # Another process may have published the same output in the meantime.
        _refuse_unwritable(out, overwrite)
        try:
            if overwrite and out.is_dir():
                os.rename(out, old)
            os.rename(temporary, out)
            _sync(out.parent)
            remove(old)
        except BaseException as error:  # a signal too, wherever it came
            put_back(old, out)
            if isinstance(error, OSError) and error.errno in _OCCUPIED:
                raise _overtaken(out) from error
            raise


def _overtaken(out: Path) -> OutputError:
    return OutputError(
        "another build published this output while this one was about to; that one stands",
        got=f"{out}, written meanwhile",
        expected="one build of an output at a time",
        fix="keep it, or build again with --force (overwrite=True) to replace it",
    )


def _is_output_failure(error: OSError, temporary: Path, out: Path) -> bool:
    """Whether the error concerns what is being written, not what the caller reads."""
    if error.errno in _ALWAYS_OUTPUT:
        return True
    names = [Path(str(name)) for name in (error.filename, error.filename2) if name is not None]
    return any(name.is_relative_to(folder) for name in names for folder in (temporary, out))


def _output_error(error: OSError, out: Path) -> OutputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(out.parent).free
        return OutputError(
            "the disk is full or the quota is used up; nothing was left behind",
            got=f"{free / 2**20:.0f} MiB free in {out.parent}",
            expected="room for the whole output beside it",
            fix="free some space, or choose an output on another disk",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return OutputError(
            "no permission to write the output",
            got=f"{out.parent}: {error.strerror}",
            expected="a folder that this user may write to",
            fix="choose a folder that you can write to",
        )
    return OutputError(
        "the output could not be written; nothing was left behind",
        got=f"{out}: {error}",
        expected=_EXPECTED,
        fix="choose another output directory",
    )


@contextmanager
def _termination_as_exception() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack instead of ending the process on the spot.

    Only where nobody else has installed a handler, and only in the main thread, where Python
    allows it; a host application's own handlers stay untouched.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watched = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in watched:
        signal.signal(number, _exit_for_signal)
    try:
        yield
    finally:
        for number in watched:
            signal.signal(number, signal.SIG_DFL)


def _exit_for_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
