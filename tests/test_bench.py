"""Benchmarks of single steps on a real engine, and the comparison of two reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from built import Built

from lacache_trt.artifacts import load_manifest
from lacache_trt.bench import bench_engine, workload_facts
from lacache_trt.bench_compare import compare, read_saved
from lacache_trt.bench_report import BenchSettings
from lacache_trt.bench_steps import CALLS_PER_REPEAT, bench_steps
from lacache_trt.errors import ArtifactError, CapacityError, InvalidRequestError
from lacache_trt.generation import GenerationConfig

CONFIG = GenerationConfig(gen_length=16, block_length=8, steps=4)
SETTINGS = BenchSettings(batch=2, prompt_length=5, repeats=1, warmup=0)


def test_steps_of_an_engine_without_device_times(models: Callable[[str], Built]) -> None:
    report = bench_steps(models("llada").engine, SETTINGS, CONFIG)
    assert report.engine == "onnxruntime"
    assert [timing.graph for timing in report.timings] == ["fill", "reuse", "plain"]
    assert all(timing.wall_ms >= 0 for timing in report.timings)
    assert report.timings[1].wall_ms_p95 >= report.timings[1].wall_ms > 0
    assert {timing.device_ms for timing in report.timings} == {None}
    assert report.cache_bytes == 2 * 21 * _bytes_per_token(models("llada"))
    assert CALLS_PER_REPEAT >= 5


def test_steps_on_a_canvas_that_the_model_has_not(models: Callable[[str], Built]) -> None:
    built = models("llada")
    longest = load_manifest(built.engine).model.max_length
    too_long = replace(SETTINGS, prompt_length=longest - CONFIG.gen_length + 1)
    with pytest.raises(CapacityError, match=f"at most {longest} together"):
        bench_steps(built.engine, too_long, CONFIG)


def test_unknown_caches_are_refused_by_every_benchmark() -> None:
    with pytest.raises(InvalidRequestError, match="unknown cache") as caught:
        BenchSettings(caches="none,exat")
    assert "'exact'" in str(caught.value.fix)


def test_what_changes_the_work_is_part_of_the_workload() -> None:
    """A report is compared with one of the same settings only."""
    base = replace(CONFIG, policy="threshold")
    facts = workload_facts(SETTINGS, base)
    for change in (
        {"threshold": 0.5},
        {"suffix": "dpad"},
        {"temperature": 1.0},
        {"cfg_scale": 1.0},
    ):
        assert workload_facts(SETTINGS, replace(base, **change)) == {**facts, **change}  # type: ignore[arg-type]
    assert workload_facts(SETTINGS, replace(base, threshold=0.9)) == facts


def test_settings_that_end_answers_are_left_out(models: Callable[[str], Built]) -> None:
    config = replace(CONFIG, policy="threshold", stop_in_block=True, eos_truncation=0.9)
    whole = bench_engine(models("llada").engine, replace(SETTINGS, caches="exact"), config)
    assert whole.timings[0].tokens_per_forward > 0
    refreshed = replace(CONFIG, cache="dual", refresh_every=2)
    assert bench_engine(models("llada").engine, SETTINGS, refreshed).timings[0].cache == "none"


def _bytes_per_token(built: Built) -> int:
    return load_manifest(built.engine).model.cache_bytes_per_token(4)


def test_changes_are_named_by_what_was_timed(
    models: Callable[[str], Built], tmp_path: Path
) -> None:
    report = bench_steps(models("llada").engine, SETTINGS, CONFIG)
    halved = replace(
        report,
        timings=tuple(replace(timing, wall_ms=timing.wall_ms / 2) for timing in report.timings),
    )
    old = tmp_path / "old.json"
    old.write_text(json.dumps(asdict(halved)))
    saved = read_saved(old)
    changes = {change.name: change for change in compare(saved, asdict(report))}
    assert changes["reuse.wall_ms"].ratio == pytest.approx(2)
    assert changes["reuse.wall_ms_p95"].ratio == pytest.approx(1)
    assert "reuse.device_ms" not in changes
    more = asdict(replace(report, workload={**report.workload, "repeats": 9}))
    assert len(compare(saved, more)) == len(changes)
    other = asdict(replace(report, workload={**report.workload, "batch": 3}))
    with pytest.raises(InvalidRequestError, match="another workload"):
        compare(saved, other)
    old.write_text("[]")
    with pytest.raises(ArtifactError):
        read_saved(old)
