"""Benchmarks of an engine without a plain graph, as every TensorRT engine is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from built import Built
from trt_engines import NAME, fakes, write_engine
from typer.testing import CliRunner

import lacache_trt.runtime
from lacache_trt.artifacts import Manifest
from lacache_trt.cli.main import app
from lacache_trt.engines.tensorrt.engine import load

WORKLOAD = ("--gen-length", "16", "--block-length", "8", "--steps", "16", "--prompt-length", "5")


@pytest.fixture
def engine(models: Callable[[str], Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose plans a simulated TensorRT executes."""
    built = models(NAME)
    manifest = write_engine(built, tmp_path / "engine")

    def load_directory(found: Manifest) -> Any:
        return load(found, *fakes(built, found))

    monkeypatch.setattr(lacache_trt.runtime, "load_engine", load_directory)
    return manifest.directory


def bench(*arguments: object) -> Any:
    workload = (*WORKLOAD, "--repeats", "1", "--warmup", "0")
    return CliRunner().invoke(app, ["bench", *map(str, arguments), *workload])


def test_a_cache_that_the_engine_lacks_is_skipped_and_named(engine: Path) -> None:
    report = json.loads(bench("generate", engine, "--json").stdout)
    assert [timing["cache"] for timing in report["timings"]] == ["exact"]
    assert report["timings"][0]["ms_per_step"] > 0
    assert report["skipped"] == ["none"]
    assert (
        "skipped: none, which the tensorrt engine does not have" in bench("generate", engine).stdout
    )


def test_an_engine_without_any_of_the_caches_is_an_error(engine: Path) -> None:
    result = bench("generate", engine, "--caches", "none")
    assert result.exit_code == 2
    assert "--caches exact" in result.stderr


def test_a_graph_that_the_engine_lacks_is_skipped_and_named(engine: Path) -> None:
    report = json.loads(bench("step", engine, "--json").stdout)
    assert [timing["graph"] for timing in report["timings"]] == ["fill", "reuse"]
    assert report["timings"][1]["wall_ms"] > 0
    assert report["skipped"] == ["plain"]
    assert "skipped: plain" in bench("step", engine).stdout
