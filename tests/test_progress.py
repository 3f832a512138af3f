"""Progress where nobody sees bars: few lines, on stderr, and nothing of it on stdout."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from built import Built
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lacache_trt.accuracy import study
from lacache_trt.cli.main import app
from lacache_trt.cli.output import Output
from lacache_trt.cli.progress_lines import LineProgress
from lacache_trt.errors import InvalidRequestError
from lacache_trt.progress import Progress, SilentProgress

LINE = re.compile(r"\[\d+ s\] (.+)")


def shown(text: str) -> list[str]:
    """What the lines say; every line is one of progress."""
    matches = [LINE.fullmatch(line) for line in text.splitlines()]
    assert all(matches), text
    return [match.group(1) for match in matches if match]


def test_the_first_stage_is_said_at_once_and_the_end_at_the_end(capsys: Any) -> None:
    with LineProgress() as progress:
        progress.start("copy", 3)
        assert shown(capsys.readouterr().err) == ["copy: 0 of 3"]
        for stage in range(2000):
            progress.start(f"stage {stage}", 20_000)
            progress.advance(5_000)
    captured = capsys.readouterr()
    assert shown(captured.err) == ["stage 1999: 25%"]
    assert captured.out == ""


def test_changes_are_said_in_between_and_a_standstill_rarely(capsys: Any) -> None:
    with LineProgress(every_s=0.02, alive_s=0.3) as progress:
        progress.start("kernels")
        progress.advance(7)
        deadline = time.monotonic() + 20
        seen = ""
        while seen.count("kernels: 7 done") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            seen += capsys.readouterr().err
    times = shown(seen)
    assert times == ["kernels", "kernels: 7 done", "kernels: 7 done"]


def test_an_error_adds_no_line(capsys: Any) -> None:
    def work() -> None:
        with LineProgress() as progress:
            progress.start("weights", 10**9)
            progress.advance(10**8)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        work()
    assert shown(capsys.readouterr().err) == ["weights: 0%"]


def test_a_log_that_cannot_be_written_stops_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stderr", Full())
    with LineProgress() as progress:
        progress.start("weights", 2)
        progress.advance(2)
    monkeypatch.undo()
    assert len(tried) == 2


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 10**12))
def test_no_more_than_the_total_is_ever_said(amounts: list[int], total: int) -> None:
    progress = LineProgress()
    progress._stage, progress._total = "weights", total
    for amount in amounts:
        progress.advance(min(amount, total - progress._done))
    said = progress._state()
    numbers = [int(number) for number in re.findall(r"\d+", said)]
    assert numbers[0] <= (total if " of " in said else 100)


def test_bars_lines_and_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    from lacache_trt.cli.progress import RichProgress

    with Output().progress() as logged, Output().progress(lines=False) as silent:
        assert isinstance(logged, LineProgress)
        assert isinstance(silent, SilentProgress)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Output().progress(lines=False) as bars:
        assert isinstance(bars, RichProgress)


def test_verify_reports_on_stderr_alone(models: Callable[[str], Built]) -> None:
    done = CliRunner().invoke(app, ["verify", str(models("llada-one").engine), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["passed"]
    said = shown(done.stderr)
    assert said[0].startswith("checking files: ")
    assert said[-1] == "verify: 4 of 4"
    assert len(said) <= 2 + done_seconds(done.stderr) / 4


def done_seconds(text: str) -> float:
    """Seconds that the last line names."""
    return float(re.findall(r"\[(\d+) s\]", text)[-1])


@pytest.mark.parametrize("verb", ["policies", "accuracy"])
def test_benchmarks_say_what_they_do(
    verb: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(first: Any, second: Any, *rest: Any) -> None:
        progress: Progress = rest[-1] if rest else SilentProgress()
        progress.start("tune split", 60)
        progress.advance(2)
        raise InvalidRequestError("enough")

    monkeypatch.setattr("lacache_trt.bench_policies.bench_policies", measure)
    monkeypatch.setattr(study, "compare_schemes", measure)
    target = [str(tmp_path)] if verb == "policies" else []
    done = CliRunner().invoke(app, ["bench", verb, *target, "--json"])
    assert json.loads(done.stdout)["error"]["what"] == "enough"
    assert shown(done.stderr.splitlines()[0]) == ["tune split: 0 of 60"]
