"""The model that ships in FP8 on ONNX Runtime: every kind of cache, the commands, real problems.

Exact against plain is judged as in `test_fp8_engine`: an ulp before a quantiser may become a step
of E4M3 behind it, so tokens are equal or the plain step's best two logits are near.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from built import SHIPPED, Built
from canvases import block_tokens, greedy, random_shape, relative_error
from fp8_models import build_fp8_once
from typer.testing import CliRunner, Result

from lacache_trt import GenerationConfig, Runtime
from lacache_trt.artifacts import load_manifest
from lacache_trt.cli.main import app
from lacache_trt.demo.problems import is_correct, problem
from lacache_trt.engines.onnxruntime.engine import OnnxRuntimeEngine
from lacache_trt.generation import GenerationResult
from lacache_trt.verify import _check_recipe

WORST, TIE, CASES = 5e-2, 0.1, 12
PROBLEMS = [problem("held-out", index) for index in range(2)]
QUESTIONS = [each.question for each in PROBLEMS]


@pytest.fixture(scope="module")
def directory(models: Callable[[str], Built]) -> Path:
    """The FP8 engine directory."""
    return build_fp8_once(models(SHIPPED))


@pytest.fixture(scope="module")
def runtime(directory: Path) -> Iterator[Runtime]:
    """It, open."""
    with Runtime.load(directory) as opened:
        yield opened


def settings(**changes: Any) -> GenerationConfig:
    """64 tokens in two blocks, four a step."""
    return GenerationConfig(**{"gen_length": 64, "block_length": 32, "steps": 16, **changes})


@pytest.fixture(scope="module")
def plain(runtime: Runtime) -> list[GenerationResult]:
    """The answers without caches."""
    return runtime.generate(QUESTIONS, settings(cache="none"))


def run(*arguments: object) -> Result:
    """What a command line does."""
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_exact_equals_plain_in_tokens(runtime: Runtime) -> None:
    engine = runtime.engine
    assert isinstance(engine, OnnxRuntimeEngine)
    session = engine.session()
    for seed in range(CASES):
        shape = random_shape(seed)
        canvas, block = shape.canvas(engine.config), shape.block_columns
        sampling = greedy(shape.rows, engine.config)
        plain = session.plain(canvas, block, sampling, block)
        session.fill(canvas, block)
        reuse = session.reuse(block_tokens(canvas, block), sampling, block)
        assert relative_error(reuse.logits, plain.logits) <= WORST
        for row, place in np.argwhere(reuse.token != plain.token):
            logits = plain.logits[row, place].copy()
            logits[engine.config.mask_id] = -np.inf
            second, best = np.sort(logits)[-2:]
            assert best - second < TIE


def test_real_problems_come_out_the_same_with_and_without_caches(
    runtime: Runtime, plain: list[GenerationResult]
) -> None:
    exact = runtime.generate(QUESTIONS, settings(cache="exact"))
    assert [one.tokens for one in exact] == [one.tokens for one in plain]
    right = [is_correct(a, b.text or "") for a, b in zip(PROBLEMS, exact, strict=True)]
    assert any(right)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_the_approximate_caches_work_in_fp8(
    runtime: Runtime, plain: list[GenerationResult], cache: Any
) -> None:
    """Refreshed at every step they are no approximation; else they take windows, and answer."""
    fresh = runtime.generate(QUESTIONS, settings(cache=cache, refresh_every=1))
    assert [one.tokens for one in fresh] == [one.tokens for one in plain]
    found = runtime.generate(QUESTIONS, settings(cache=cache))
    assert {one.forwards for one in found} == {16}
    mask = runtime.engine.config.mask_id
    assert all(len(one.tokens) == 64 and mask not in one.tokens for one in found)


def test_verify_accepts_the_directory_and_its_own_bundle(directory: Path) -> None:
    """Against its own plain graph; an engine from the bundle would be the same one once more."""
    _check_recipe(load_manifest(directory), directory / "bundle")
    done = run("verify", directory, "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 0, report
    assert report["passed"]
    names = [check["name"] for check in report["checks"]]
    assert "tokens of reuse against plain" in names
    assert "reuse_kv against reuse" in names


def test_verify_refuses_a_bundle_with_another_recipe(
    directory: Path, models: Callable[[str], Built]
) -> None:
    done = run("verify", directory, "--bundle", models(SHIPPED).bundle)
    assert done.exit_code == 2
    assert "not quantised as the engine" in done.stderr
    assert f"--bundle {directory / 'bundle'}" in " ".join(done.stderr.split())


def test_inspect_describes_engine_and_bundle(directory: Path) -> None:
    for path in (directory, directory / "bundle"):
        found = json.loads(run("inspect", path, "--json").stdout)
        assert found["fp8"] == load_manifest(path).body["fp8"]
        assert len(found["fp8"]["linears"]) == 10
        assert "10 in 5 of 6 layers" in run("inspect", path).stdout


def test_generate_answers_from_the_command_line(directory: Path) -> None:
    done = run("generate", directory, QUESTIONS[0], "--gen-length", 64, "--steps", 32, "--json")
    assert done.exit_code == 0, done.stderr
    assert is_correct(PROBLEMS[0], done.stdout)
