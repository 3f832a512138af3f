"""The hidden directories beside an output, and who owns them.

`.NAME.tmp-PID-RANDOM` is being written, `.NAME.old-PID-RANDOM` has stepped aside for a moment.
Their owner holds a lock on the directory (flock), which ends with the process, SIGKILL included. A
process id says less: in containers every run has the same one. It decides only where the file
system has no such locks. A folder `.NAME.tmp-PID-RANDOM.scratch-*` belongs to whoever owns the
first part of its name.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from lacache_trt.closing import ClosesOnExit

SCRATCH_MARK = ".scratch-"
"""Stands in the name of a folder beside the temporary directory that shares its fate."""
_WAIT_SECONDS, _POLL_SECONDS = 5.0, 0.02


class DirectoryLock(ClosesOnExit):
    """At most one lock on a directory; two of them exclude each other, in one process too."""

    _descriptor = -1

    def __del__(self) -> None:  # a signal may have come before the release
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def close(self) -> None:
        """Give the lock back, if it was taken."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def take(self, path: Path) -> Literal["held", "busy", "unsupported"]:
        """Lock the directory without waiting.

        A directory that was renamed or deleted meanwhile counts as busy.

        Raises:
            OSError: there is no such directory, or it cannot be opened.
        """
        self.close()
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            return "busy"
        except OSError:  # some network file systems cannot lock a directory
            return "unsupported"
        if not self._is_at(path):
            self.close()
            return "busy"
        return "held"

    def create(self, path: Path) -> bool:
        """Make the directory and lock it; whether it is still there.

        Between the two steps it looks abandoned, and another run may clear it away.
        """
        path.mkdir()
        try:
            return self.take(path) != "busy"
        except FileNotFoundError:
            return False

    def wait_for(self, path: Path) -> None:
        """Lock what stands there, if anything does, once a build that published it lets go.

        After some seconds it goes on without: a forked child may keep a lock for no purpose.
        """
        deadline = time.monotonic() + _WAIT_SECONDS
        while path.is_dir() and not path.is_symlink():
            with suppress(FileNotFoundError):
                if self.take(path) != "busy" or time.monotonic() > deadline:
                    return
            time.sleep(_POLL_SECONDS)

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(path))
        except FileNotFoundError:
            return False


def sibling(out: Path, role: Literal["tmp", "old"]) -> Path:
    return out.parent / f".{out.name}.{role}-{os.getpid()}-{secrets.token_hex(4)}"


def recover(out: Path) -> None:
    """Clean up after processes that were killed while they wrote this output."""
    owner = rf"({re.escape(f'.{out.name}.')}(tmp|old)-(\d+)-[0-9a-f]{{8}})"
    pattern = re.compile(rf"{owner}({re.escape(SCRATCH_MARK)}\w+)?")
    with suppress(OSError):
        for entry in sorted(os.scandir(out.parent), key=lambda entry: entry.name):
            match = pattern.fullmatch(entry.name)
            if match is not None and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):  # another user's, or gone by now
                    _recover_one(Path(entry.path), match, out)


def _recover_one(path: Path, match: re.Match[str], out: Path) -> None:
    owner = path.with_name(match[1])
    with DirectoryLock() as lock:
        # The lock stays held meanwhile, so that two runs do not clear the same one.
        state = lock.take(owner if owner.is_dir() else path)
        if state == "busy" or (state == "unsupported" and _is_alive(int(match[3]))):
            return
        if match[2] == "old" and match[4] is None:
            put_back(path, out)
        else:
            remove(path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def put_back(old: Path, out: Path) -> None:
    """Give an artefact that stepped aside its name again, or delete it if that has a successor."""
    try:
        if old.is_dir() and not out.exists():
            os.rename(old, out)
    except OSError:
        if not out.exists():
            raise
    if out.exists():
        remove(old)


def remove(path: Path) -> None:
    """Delete a directory; a signal meanwhile unwinds once that is done."""
    try:
        shutil.rmtree(path, ignore_errors=True)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
