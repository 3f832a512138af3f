"""The policy grid: its cases, its choice, its frontier, its picture, its command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from built import Built
from hypothesis import given
from hypothesis import strategies as st

from lacache_trt.bench_policies import bench_policies
from lacache_trt.cli.main import main
from lacache_trt.errors import InvalidRequestError
from lacache_trt.policy_grid import (
    BASE,
    STRENGTHS,
    CaseResult,
    GridSettings,
    cases,
    choose,
    mark_frontier,
)

SMALL = GridSettings(
    problems=2, held_out=3, policies="threshold", caches="exact,dual", suffixes="full", batch=2
)
POINTS = st.lists(
    st.tuples(st.integers(1, 64), st.integers(0, 10).map(lambda tenths: tenths / 10)),
    min_size=1,
    max_size=12,
)


def result(forwards: float, accuracy: float, name: str = "case") -> CaseResult:
    """A case with these two figures."""
    return CaseResult(name, {}, "engine", accuracy, forwards, 1.0, 1.0)


def test_the_grid_starts_with_the_full_schedule_and_repeats_nothing() -> None:
    settings = GridSettings(policies=",".join(STRENGTHS), caches="none,exact,prefix,dual")
    grid = list(cases("engine", settings))
    assert grid[0].config == BASE
    assert (BASE.steps, BASE.stop_in_block, BASE.stop_at_eos) == (64, True, True)
    assert len({case.config for case in grid}) == len(grid)
    assert len({case.name for case in grid}) == len(grid)
    assert len(grid) == 8 * sum(map(len, STRENGTHS.values()))
    assert all(case.config.stop_in_block for case in grid), "both sides stop at the end token"


@given(POINTS)
def test_the_frontier_is_what_nothing_beats(points: list[tuple[int, float]]) -> None:
    marked = mark_frontier([result(forwards, accuracy) for forwards, accuracy in points])
    assert [one.forwards for one in marked] == sorted(forwards for forwards, _ in points)
    for one in marked:
        beaten = any(
            (other[0] <= one.forwards and other[1] > one.accuracy)
            or (other[0] < one.forwards and other[1] >= one.accuracy)
            for other in points
        )
        if one.on_frontier:
            assert not beaten
        else:
            assert beaten or points.count((int(one.forwards), one.accuracy)) > 1


@given(POINTS, st.floats(0, 50))
def test_the_choice_is_the_fastest_within_the_loss(
    points: list[tuple[int, float]], gap: float
) -> None:
    found = [result(forwards, accuracy) for forwards, accuracy in points]
    chosen = choose(found, found[0], gap)
    allowed = [one for one in points if one[1] >= points[0][1] - gap / 100]
    assert chosen.forwards == min(forwards for forwards, _ in allowed)
    assert chosen.accuracy >= points[0][1] - gap / 100


@pytest.mark.parametrize(
    "changes",
    [
        {"policies": "threshold,nonsense"},
        {"caches": "fast"},
        {"suffixes": ""},
        {"problems": 0},
        {"batch": 0},
        {"gap_points": -1.0},
    ],
    ids=str,
)
def test_absurd_grids_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(changes))):
        replace(SMALL, **changes)  # type: ignore[arg-type]


def test_a_grid_on_an_engine(models: Callable[[str], Built]) -> None:
    report = bench_policies([models("llada").engine], SMALL)
    assert len(report.cases) == 1 + 2 * len(STRENGTHS["threshold"])
    assert [one.forwards for one in report.cases] == sorted(one.forwards for one in report.cases)
    for one in report.cases:
        assert 1 <= one.forwards <= 64
        assert one.ms_per_answer > 0
        assert one.tokens_per_forward <= 64
    held_out = report.held_out
    assert held_out.problems == 3
    assert held_out.gap_low <= held_out.gap_points <= held_out.gap_high
    ratio = held_out.baseline_forwards / held_out.chosen_forwards
    np.testing.assert_allclose(held_out.forwards_ratio, ratio)
    assert held_out.chosen in {one.name for one in report.cases}


def test_two_engines_of_one_name_are_refused(models: Callable[[str], Built]) -> None:
    engine = models("llada").engine
    with pytest.raises(InvalidRequestError, match="same name"):
        bench_policies([engine, engine], SMALL)


def command(engine: Path, *flags: str) -> list[str]:
    """The arguments of a small grid."""
    small = ("--problems", "2", "--held-out", "2", "--policies", "factor", "--caches", "exact")
    return ["bench", "policies", str(engine), *small, "--suffixes", "full", *flags]


def run(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> int:
    """Exit code of the command line."""
    monkeypatch.setattr(sys, "argv", ["lacache-trt", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_the_command_draws_and_prints_json(
    models: Callable[[str], Built],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    picture, saved = tmp_path / "frontier.png", tmp_path / "report.json"
    arguments = command(models("llada").engine, "--json", "--plot", str(picture))
    assert run(monkeypatch, [*arguments, "--save-result", str(saved)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(saved.read_text())
    assert {"cases", "held_out", "skipped"} <= set(printed)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 5000


def test_a_picture_needs_matplotlib(
    models: Callable[[str], Built],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "lacache_trt.frontier_plot", raising=False)
    code = run(monkeypatch, command(models("llada").engine, "--plot", str(tmp_path / "f.png")))
    assert code == 3
    assert "lacache-trt[plots]" in capsys.readouterr().err
