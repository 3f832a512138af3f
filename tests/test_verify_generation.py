"""`verify`'s check of whole generations: what it excuses, and what it must not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_engines import StubEngine, broken_confidence
from synthetic import make_llada
from typer.testing import CliRunner

from lacache_trt.cli.main import app
from lacache_trt.engines.base import StepOutputs
from lacache_trt.engines.builder import build_engine
from lacache_trt.engines.onnxruntime.engine import OnnxRuntimeEngine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.errors import ArtifactError
from lacache_trt.export.exporter import export_bundle
from lacache_trt.export.options import ExportOptions
from lacache_trt.verify_generation import Decisions, generations_agree, settings_for
from lacache_trt.verify_report import Check
from lacache_trt.verify_sizes import Sizes

BOUND = 1e-4
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5], [11]]


@pytest.fixture
def engine(engines: Callable[[str], OnnxRuntimeEngine]) -> OnnxRuntimeEngine:
    return engines("llada")


def check(engine: Any, reference: Any, bound: float = BOUND) -> Check:
    return generations_agree("g", engine, reference, PROMPTS, settings_for(8, 2), bound)


def test_a_right_engine_decides_alike(engine: OnnxRuntimeEngine) -> None:
    found = check(engine, engine)
    assert found.passed
    figures = found.figures
    assert figures["decisions"] == 3 * 16
    assert figures["differing"] == figures["excused"] == figures["unexplained_rows"] == 0
    assert figures["equal_rows"] == 3
    assert figures["exact_ms_per_step"] > 0


def flipped_at(calls: set[int]) -> Callable[[StepOutputs], StepOutputs]:
    """Another token everywhere, in these of the engine's steps."""
    count = iter(range(10_000))

    def change(outputs: StepOutputs) -> StepOutputs:
        return replace(outputs, token=outputs.token ^ 1) if next(count) in calls else outputs

    return change


def test_wrong_tokens_far_from_a_tie_fail(engine: OnnxRuntimeEngine) -> None:
    found = check(StubEngine(engine, change=flipped_at({3})), engine)
    assert not found.passed
    assert found.figures["differing"] == 3


def test_near_ties_are_excused_up_to_the_cap(engine: OnnxRuntimeEngine) -> None:
    """The reference says that every prediction is a tie; one differing decision is excused."""
    near = StubEngine(engine, change=lambda each: replace(each, margin=0 * each.margin))
    one_row = generations_agree(
        "g",
        StubEngine(engine, change=flipped_at({3})),
        near,
        PROMPTS[:1],
        settings_for(8, 2),
        BOUND,
    )
    assert one_row.passed
    assert (one_row.figures["excused"], one_row.figures["differing"]) == (1, 0)
    three_rows = check(StubEngine(engine, change=flipped_at({3})), near)
    assert not three_rows.passed
    assert (three_rows.figures["excused"], three_rows.figures["differing"]) == (3, 0)


def test_the_engines_own_margins_excuse_nothing(engine: OnnxRuntimeEngine) -> None:
    flip = flipped_at({3})

    def change(outputs: StepOutputs) -> StepOutputs:
        changed = flip(outputs)
        return replace(changed, margin=0 * changed.margin)

    assert not check(StubEngine(engine, change=change), engine).passed


def test_another_order_is_allowed_only_within_the_bound(engine: OnnxRuntimeEngine) -> None:
    def change(outputs: StepOutputs) -> StepOutputs:
        return replace(outputs, confidence=1 - outputs.confidence)

    found = check(StubEngine(engine, change=change), engine)
    assert not found.passed
    assert found.figures["differing"] > 0
    loose = check(StubEngine(engine, change=change), engine, bound=1.0)
    assert loose.figures["differing"] == 0
    assert loose.figures["swapped"] > 0


def test_a_runtime_that_goes_its_own_way_is_found(engine: OnnxRuntimeEngine) -> None:
    """Alike at every compared step, then wrong when left alone."""
    found = check(StubEngine(engine, change=flipped_at(set(range(16, 48)))), engine)
    assert found.figures["differing"] == 0
    assert found.figures["unexplained_rows"] == 3
    assert not found.passed


def test_a_nan_of_either_side_fails_the_check(engine: OnnxRuntimeEngine) -> None:
    broken = StubEngine(engine, change=broken_confidence)
    for pair in ((broken, engine), (engine, broken)):
        found = check(*pair)
        assert not found.passed
        assert found.problem is not None
        assert "NaN or infinite logits" in found.problem
        assert found.figures["rows"] == 3


def test_a_model_of_nans_fails_its_verification(tmp_path: Path) -> None:
    """A weight too large for float32 products; the report is complete and says which check."""
    huge = {"layers": 1, "seed": 3, "head_scale": 1e38, "tokenizer": True}
    checkpoint = make_llada(tmp_path / "checkpoint", **huge)  # type: ignore[arg-type]
    export_bundle(str(checkpoint), tmp_path / "bundle", ExportOptions(validate="off"))
    engine = tmp_path / "engine"
    build_engine(tmp_path / "bundle", engine, BuildOptions(engine="onnxruntime", threads=1))
    file = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["verify", str(engine), "--json", "--report", str(file)])
    assert done.exit_code == 1
    report = json.loads(done.stdout, parse_constant=lambda text: pytest.fail(f"{text} in JSON"))
    assert json.loads(file.read_text()) == report
    assert not report["passed"]
    checks = {each["name"]: each for each in report["checks"]}
    finite = checks["no NaN or infinite logits"]
    assert not finite["passed"]
    assert finite["figures"]["reuse"] > 0
    assert finite["figures"]["plain"] > 0
    assert checks["reuse is bitwise repeatable"]["passed"]
    assert not checks["confidence of reuse against plain"]["passed"]
    kinds = [name for name in checks if name.startswith("generations from")]
    assert len(kinds) == 2
    assert all("NaN or infinite" in checks[name]["problem"] for name in kinds)
    shown = CliRunner().invoke(app, ["verify", str(engine)])
    assert shown.exit_code == 1
    assert "FAILED" in shown.stdout


@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 3), st.integers(0, 2**31))
def test_the_same_outputs_always_decide_alike(rows: int, width: int, count: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    confidence = generator.integers(0, 4, (rows, width)).astype(np.float32) / 4
    outputs = StepOutputs(
        token=generator.integers(0, 9, (rows, width)).astype(np.int32),
        confidence=confidence,
        margin=confidence,
        neg_entropy=confidence,
        logits=np.zeros((rows, 0, 9), np.float32),
    )
    masked = generator.random((rows, width)) < 0.6
    found = Decisions(alike=np.ones(rows, np.bool_))
    chosen = found.add(outputs, outputs, masked, count, 0.0)
    assert found.alike.all()
    assert (found.differing, found.excused, found.swapped) == (0, 0, 0)
    assert found.total == chosen.sum() == np.minimum(masked.sum(axis=1), count).sum()


# --- sizes ---


def sizes(**ranges: list[int]) -> Sizes:
    full = {"B": [1, 1, 4], "N": [1, 64, 512], "Bk": [1, 8, 64], "W": [1, 8, 64]}
    rest = {"S": [1, 1, 2], "E": [1, 1, 2], "R": [0, 0, 0]}
    body = {"profiles": [{**full, **rest, **ranges}]}
    return Sizes.of(SimpleNamespace(body=body))  # type: ignore[arg-type]


def test_sizes_are_those_of_the_profile() -> None:
    assert sizes() == Sizes(3, (4, 8, 32), 512, 64)
    assert sizes(Bk=[32, 32, 32]).widths == (32,)
    assert sizes(Bk=[16, 16, 16]).widths == (16,)
    assert (sizes(B=[1, 1, 1]).rows, sizes(B=[8, 8, 8]).rows) == (1, 8)
    narrow = sizes(N=[64, 64, 64])
    assert narrow.blocks(32) == 1
    assert narrow.prompt_length(31, 32) == 31
    assert narrow.prompt_length(33, 32) == 32
    with pytest.raises(ArtifactError):
        sizes(N=[1])


@pytest.mark.parametrize("width", [1, 4, 8, 12, 13, 32, 48, 128])
def test_every_step_commits_alike(width: int) -> None:
    config = settings_for(width, 3)
    assert config.gen_length % config.steps == 0
    assert width % (config.gen_length // config.steps) == 0
