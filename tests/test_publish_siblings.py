"""Publishing: what killed builds left beside an output goes, what living ones own stays."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from published import leftovers, put
from sample_bundle import write_bundle

import lacache_trt.siblings as siblings
from lacache_trt.artifacts import load_manifest
from lacache_trt.errors import OutputError
from lacache_trt.publish import MANIFEST_NAME, publish_directory
from lacache_trt.siblings import SCRATCH_MARK, DirectoryLock


def _dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_killed_between_the_renames(tmp_path: Path) -> None:
    write_bundle(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / f".out.old-{_dead_pid()}-00000000")
    with (
        pytest.raises(ValueError, match="stop"),
        publish_directory(tmp_path / "out", overwrite=True),
    ):
        raise ValueError("stop")
    load_manifest(tmp_path / "out", "bundle")
    assert leftovers(tmp_path) == []


def test_living_writers_and_strangers_are_left_alone(tmp_path: Path) -> None:
    names = [f".out.tmp-{_dead_pid()}-00000000", ".out.tmp-x-00000000", ".other.tmp-1-00000000"]
    for name in names:
        (tmp_path / name).mkdir()
    stale = tmp_path / f".out.tmp-{_dead_pid()}-11111111"
    stale.mkdir()
    (tmp_path / f"{stale.name}{SCRATCH_MARK}a_b1").mkdir()
    with DirectoryLock() as lock:
        assert lock.take(tmp_path / names[0]) == "held"
        write_bundle(tmp_path / "out")
        assert leftovers(tmp_path) == sorted(names)


@pytest.mark.parametrize("successor", [True, False])
def test_an_owner_is_gone_though_its_process_id_lives(tmp_path: Path, successor: bool) -> None:
    """In a container each run has the process id of the one that was killed."""
    out, old = tmp_path / "out", tmp_path / f".out.old-{os.getpid()}-00000000"
    put(out, "old")
    out.rename(old)
    if successor:
        put(tmp_path / "other", "new")
        (tmp_path / "other").rename(out)
    stale = tmp_path / f".out.tmp-{os.getpid()}-00000000"
    stale.mkdir()
    (tmp_path / f"{stale.name}{SCRATCH_MARK}a_b1").mkdir()
    with pytest.raises(OutputError, match="not empty"), publish_directory(out):
        pass
    assert (out / "a").read_text() == ("new" if successor else "old")
    assert leftovers(tmp_path) == []


def test_a_build_in_another_thread_of_this_process_is_respected(tmp_path: Path) -> None:
    with publish_directory(tmp_path / "out", overwrite=True) as directory:
        (directory / MANIFEST_NAME).write_text("first")
        thread = threading.Thread(target=put, args=(tmp_path / "out", "second"))
        thread.start()
        thread.join()
        assert leftovers(tmp_path) == [directory.name]
        assert (tmp_path / "out" / "a").read_text() == "second"
    assert (tmp_path / "out" / MANIFEST_NAME).read_text() == "first"
    assert leftovers(tmp_path) == []


def _no_process(*_: object) -> None:
    raise ProcessLookupError


def test_the_scratch_folder_of_a_living_build_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "kill", _no_process)  # the build runs in another container
    with publish_directory(tmp_path / "out", overwrite=True) as directory:
        scratch = tmp_path / f"{directory.name}{SCRATCH_MARK}a_b1"
        scratch.mkdir()
        put(tmp_path / "out", "second")
        assert leftovers(tmp_path) == [directory.name, scratch.name]
        scratch.rmdir()
    assert leftovers(tmp_path) == []


def test_without_locks_the_process_id_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    living, dead = (f".out.tmp-{pid}-00000000" for pid in (os.getpid(), _dead_pid()))
    for name in (living, dead):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}{SCRATCH_MARK}a_b1").mkdir()
    for words in ("old", "new"):
        put(tmp_path / "out", words)
        assert (tmp_path / "out" / "a").read_text() == words
        assert leftovers(tmp_path) == [living, f"{living}{SCRATCH_MARK}a_b1"]


def _after_stepping_aside(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Run the action once, when an artefact has stepped aside and nothing stands in its place."""
    rename = os.rename

    def hook(source: Path, target: Path) -> None:
        rename(source, target)
        if ".old-" in str(target):
            monkeypatch.setattr(os, "rename", rename)
            action()

    monkeypatch.setattr(os, "rename", hook)


def test_another_build_between_the_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    put(out, "old")
    _after_stepping_aside(monkeypatch, lambda: put(out, "theirs"))
    with pytest.raises(OutputError, match="another build published") as caught:
        put(out, "ours")
    error = caught.value
    assert str(out) in str(error.got)
    assert error.expected
    assert "--force" in str(error.fix)
    assert "nothing was left behind" not in str(error)
    assert {entry.read_text() for entry in out.iterdir()} == {"theirs"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_what_a_living_build_put_aside_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = tmp_path / "out", []

    def other_run() -> None:
        monkeypatch.setattr(os, "kill", _no_process)
        with suppress(ValueError), publish_directory(out, overwrite=True):
            seen.extend([*leftovers(tmp_path), out.exists()])
            raise ValueError

    put(out, "old")
    _after_stepping_aside(monkeypatch, other_run)
    put(out, "new")
    assert [".old-" in str(name) for name in seen] == [True, False, False, False]
    assert seen[-1] is False
    assert (out / "a").read_text() == "new"
    assert leftovers(tmp_path) == []


KILLED = """
import os, signal
from pathlib import Path
from lacache_trt.publish import publish_directory
os.getpid, rename = lambda: {pid}, os.rename
def killed(source, target):
    rename(source, target)
    signal.raise_signal(signal.SIGKILL)
os.rename = killed
with publish_directory(Path({out!r}), overwrite=True) as directory:
    (directory / "manifest.json").write_text("new")
"""


def test_a_kill_between_the_renames_with_a_repeated_process_id(tmp_path: Path) -> None:
    out = tmp_path / "out"
    put(out, "old")
    code = KILLED.format(pid=os.getpid(), out=str(out))
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [name.split("-")[0] for name in leftovers(tmp_path)] == [".out.old", ".out.tmp"]
    assert not out.exists()
    with pytest.raises(OutputError, match="not empty"), publish_directory(out):
        pass
    assert {entry.read_text() for entry in out.iterdir()} == {"old"}
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("removed", [True, False])
def test_a_directory_cleared_away_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    mkdir, other = Path.mkdir, DirectoryLock()

    def hook(path: Path) -> None:
        mkdir(path)
        monkeypatch.undo()
        if removed:
            path.rmdir()
        else:
            assert other.take(path) == "held"

    monkeypatch.setattr(Path, "mkdir", hook)
    with other:
        put(tmp_path / "out", "new")
        assert (tmp_path / "out" / "a").read_text() == "new"
        assert len(leftovers(tmp_path)) == (not removed)
    put(tmp_path / "out", "newer")
    assert leftovers(tmp_path) == []


def test_a_build_waits_for_the_one_that_has_just_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    put(out, "old")
    with DirectoryLock() as lock:
        assert lock.take(out) == "held"
        thread = threading.Thread(target=put, args=(out, "new"))
        thread.start()
        time.sleep(0.3)
        assert (out / "a").read_text() == "old"
        lock.close()
        thread.join()
        assert (out / "a").read_text() == "new"
        assert lock.take(out) == "held"
        monkeypatch.setattr(siblings, "_WAIT_SECONDS", 0.05)
        put(out, "not for ever")
    assert (out / "a").read_text() == "not for ever"
    assert leftovers(tmp_path) == []
