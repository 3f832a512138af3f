"""Publishing: a directory is complete or absent, whatever happens while it is written."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from published import leftovers, put
from sample_bundle import MODEL, write_bundle

import lacache_trt.publish as publish
import lacache_trt.siblings as siblings
from lacache_trt.artifacts import load_manifest, publish_directory, write_manifest
from lacache_trt.errors import LaCacheError, OutputError


def fail_halfway(out: Path, error: BaseException) -> None:
    with publish_directory(out) as directory:
        (directory / "half").write_text("half")
        raise error


def test_error_leaves_nothing(tmp_path: Path) -> None:
    for error in (ValueError("no"), KeyboardInterrupt(), SystemExit(1)):
        with pytest.raises(type(error)):
            fail_halfway(tmp_path / "out", error)
        assert list(tmp_path.iterdir()) == []


def test_existing_output(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write_bundle(out)
    with pytest.raises(OutputError, match="not empty") as caught:
        write_bundle(out)
    assert "--force" in str(caught.value.fix)
    load_manifest(out)
    with publish_directory(out, overwrite=True) as directory:
        (directory / "new").write_text("new")
        load_manifest(out)
        write_manifest(directory, "engine", {"model": MODEL.to_json()})
    assert load_manifest(out).kind == "engine"
    assert leftovers(tmp_path) == []


def test_overwriting_keeps_the_old_one_on_errors(tmp_path: Path) -> None:
    write_bundle(tmp_path / "out")
    with pytest.raises(ValueError, match="no"), publish_directory(tmp_path / "out", overwrite=True):
        raise ValueError("no")
    load_manifest(tmp_path / "out")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("overwrite", [True, False])
def test_foreign_directories_are_never_deleted_nor_is_it_offered(
    tmp_path: Path, overwrite: bool
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    home = publish_directory(tmp_path / "home", overwrite=overwrite)
    with pytest.raises(OutputError, match="not an artefact") as caught, home:
        pass
    assert "not written by lacache-trt" in str(caught.value.fix)
    assert "force" not in str(caught.value)
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_unusable_outputs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    cases = [
        ("missing/out", "does not exist"),
        ("file", "is a file"),
        ("link", "symbolic link"),
        ("file/out", "does not exist"),
        ("/", "root directory"),
    ]
    for name, words in cases:
        with pytest.raises(OutputError, match=words) as caught, publish_directory(tmp_path / name):
            pass
        assert caught.value.fix
    assert leftovers(tmp_path) == []


def test_two_writers_of_one_output(tmp_path: Path) -> None:
    first = publish_directory(tmp_path / "o")
    with pytest.raises(OutputError, match="not empty"), first:
        write_bundle(tmp_path / "o")
    load_manifest(tmp_path / "o")
    assert leftovers(tmp_path) == []


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutputError, match="disk is full"), publish_directory(tmp_path / "out"):
        full()
    monkeypatch.setattr(publish.os, "fsync", full)
    with pytest.raises(OutputError, match="disk is full"):
        write_bundle(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    write_bundle(tmp_path / "out")


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, who may write everywhere: refuse in the same words.
    def denied(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(OutputError, match="no permission") as caught:
        write_bundle(tmp_path / "out")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_parent(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(OutputError, match="no permission"):
            write_bundle(tmp_path / "out")
    finally:
        tmp_path.chmod(0o755)


def test_errors_of_what_is_read_stay_themselves(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), publish_directory(tmp_path / "out"):
        (tmp_path / "checkpoint" / "model.safetensors").read_bytes()
    with pytest.raises(OutputError), publish_directory(tmp_path / "out") as directory:
        (directory / "missing" / "file").write_text("x")


def test_works_outside_of_the_main_thread(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            write_bundle(tmp_path / "out")
        except LaCacheError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures
    load_manifest(tmp_path / "out")


def test_signal_handlers_are_restored(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    write_bundle(tmp_path / "out")
    assert signal.getsignal(signal.SIGTERM) is before


WRITER = """
import sys, time
from pathlib import Path
from lacache_trt.artifacts import publish_directory, write_manifest
sys.path.insert(0, {tests!r})
from published import leftovers, put
from sample_bundle import MODEL
out = Path({out!r})
print("ready", flush=True)
for _ in range({rounds}):
    with publish_directory(out, overwrite=True) as directory:
        for index in range(20):
            (directory / f"part-{{index}}").write_bytes(b"x" * 20000)
            time.sleep(0.001)
        write_manifest(directory, "bundle", {{"model": MODEL.to_json()}})
    print("done", flush=True)
time.sleep({linger})
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(rounds: int) -> subprocess.Popen[str]:
        code = WRITER.format(
            tests=str(Path(__file__).parent), out=str(tmp_path / "out"), rounds=rounds, linger=0
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_clean_up(
    tmp_path: Path, writer: Callable[[int], subprocess.Popen[str]], number: signal.Signals
) -> None:
    process = writer(1000)
    time.sleep(0.06)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode not in (0, None)
    if (tmp_path / "out").exists():
        load_manifest(tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_kill_at_random_moments(
    tmp_path: Path, writer: Callable[[int], subprocess.Popen[str]]
) -> None:
    rng, left_behind = random.Random(0), 0
    for _ in range(8):
        process = writer(1000)
        time.sleep(rng.uniform(0.0, 0.15))
        process.kill()
        process.communicate(timeout=20)
        if (tmp_path / "out").exists():
            load_manifest(tmp_path / "out", "bundle")
        left_behind += bool(leftovers(tmp_path))
    assert left_behind, "no kill hit a write: the test proves nothing"
    with publish_directory(tmp_path / "out", overwrite=True) as directory:
        (directory / "a").touch()
        write_manifest(directory, "bundle", {"model": MODEL.to_json()})
    assert leftovers(tmp_path) == []


def _interrupted_at(moment: int, action: Callable[[], None]) -> bool:
    """Run the action with Ctrl-C at that line of what publishes; whether it has so many lines."""
    passed, files = 0, {publish.__file__, siblings.__file__, shutil.__file__}
    # Python swallows what is raised in `__del__`.
    skipped = {"_termination_as_exception", "__del__"}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal passed
        code = frame.f_code
        if code.co_filename not in files or code.co_name in skipped:
            return None
        if event == "line":
            passed += 1
            if passed == moment:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except (KeyboardInterrupt, OSError):  # shutil may then close a descriptor twice
        return True
    finally:
        sys.settrace(before)
    return False


def test_ctrl_c_at_any_line_leaves_one_artefact_and_nothing_else(tmp_path: Path) -> None:
    out, found = tmp_path / "out", []
    put(out, "old")
    while _interrupted_at(len(found) + 1, lambda: put(out, "new")):
        assert [entry.name for entry in tmp_path.iterdir()] == ["out"], f"line {len(found) + 1}"
        assert sorted(entry.name for entry in out.iterdir()) == ["a", "b", publish.MANIFEST_NAME]
        (words,) = {entry.read_text() for entry in out.iterdir()}
        found.append(words)
        if words == "new":
            put(out, "old")
    assert found == sorted(found, reverse=True), "the new one stands as soon as it is there"
    assert {"old", "new"} == set(found)
    assert {entry.read_text() for entry in out.iterdir()} == {"new"}


def test_an_output_that_overlaps_its_input(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "link").symlink_to(source)
    for out in (source, tmp_path / "link", source / "out", tmp_path, source / ".." / "source"):
        with pytest.raises(OutputError, match="overlap"):
            publish.refuse_overlap(out, source)
    publish.refuse_overlap(tmp_path / "sources", source)
    publish.refuse_overlap(source / "out", source, inside_allowed=True)
