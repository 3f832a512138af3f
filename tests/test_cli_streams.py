"""Stdout that is full: a disk without room, and a pipe that nobody reads for a while."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

SENT = "x" * 300_000
"""More than a pipe holds, so that the writer waits in the middle."""
VERB = f"""
import sys
from lacache_trt.cli.output import Output, guarded
output = Output(json=True)
def action():
    print("ready", file=sys.stderr, flush=True)
    output.result({{"text": "x" * {len(SENT)}}}, lambda: None)
    AFTER
import typer
try: guarded(output, action)
except typer.Exit as stop: sys.exit(stop.exit_code)
"""


def waiting(after: str = "", unbuffered: str = "") -> subprocess.Popen[str]:
    """A process that waits for room in the pipe, its document half written."""
    process = subprocess.Popen(
        [sys.executable, "-c", VERB.replace("AFTER", after)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    if process.stderr is None or process.stderr.readline() != "ready\n":
        pytest.fail("the process did not start")
    time.sleep(0.5)
    return process


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_document_end(number: signal.Signals, unbuffered: str) -> None:
    process = waiting(unbuffered=unbuffered)
    process.send_signal(number)
    time.sleep(0.3)
    out, err = process.communicate(timeout=30)
    assert json.loads(out) == {"text": SENT}
    assert (process.returncode, err) == (0, "")


def test_a_second_signal_ends_what_nobody_reads() -> None:
    process = waiting()
    process.send_signal(signal.SIGTERM)
    time.sleep(1.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    process.communicate()


def test_no_document_follows_the_first() -> None:
    process = waiting("raise OSError(28, 'no room')")
    out, err = process.communicate(timeout=30)
    assert json.loads(out) == {"text": SENT}
    assert process.returncode == 3
    assert "no room" in err


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "arguments",
    ["--help", "--version", "export --help", "bench --help", "doctor", "doctor --json"],
)
def test_a_full_disk_is_no_bug(arguments: str, unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "lacache_trt.cli", *arguments.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    expected = "error: the system refused\n  got:      [Errno 28] No space left on device\n"
    assert (result.returncode, result.stderr) == (3, expected)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("inspect nowhere", 3),
        ("inspect nowhere --json", 3),
        ("generate x y --gen-length 7", 2),
        ("generate --nope", 2),
        ("nosuch", 2),
    ],
)
def test_errors_that_nobody_can_read_keep_their_exit_code(arguments: str, code: int) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "lacache_trt.cli", *arguments.split()],
            stdout=subprocess.PIPE,
            stderr=full,
            timeout=120,
            check=False,
        )
    assert result.returncode == code
