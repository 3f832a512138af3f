"""The batched decoding against Runtime, and whole comparisons on tiny-llada."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from built import SHIPPED, Built
from eager import EagerSession
from typer.testing import CliRunner, Result

from lacache_trt.accuracy.candidates import EngineCandidate
from lacache_trt.accuracy.dataset import MASKED_SHARES, Problems
from lacache_trt.accuracy.decode import decode, equal_lengths, on_device, predict
from lacache_trt.accuracy.models import Case, build_model, load_weights
from lacache_trt.accuracy.report import AccuracyReport
from lacache_trt.accuracy.settings import AccuracySettings
from lacache_trt.accuracy.study import compare_engines
from lacache_trt.cli.main import app
from lacache_trt.demo.shipped import CHECKPOINT, SETTINGS
from lacache_trt.engines.base import Capabilities
from lacache_trt.errors import InvalidRequestError, NumericalError
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.checkpoint import Checkpoint
from lacache_trt.model.transformer import Transformer
from lacache_trt.runtime import Runtime

CPU = torch.device("cpu")
SOURCE = Checkpoint.open(CHECKPOINT)
WEIGHTS = load_weights(SOURCE, CPU)
PROBLEMS = Problems(CHECKPOINT, SOURCE.config, "held-out", 6)
FAST = GenerationConfig(gen_length=64, block_length=16, steps=16)


def model_in(dtype: torch.dtype) -> Transformer:
    return build_model(SOURCE.config, WEIGHTS, Case("plain", dtype), {})[0]


class EagerEngine:
    """The module as an engine."""

    name, device, config = "eager", "cpu", SOURCE.config
    capabilities = Capabilities(frozenset({"none", "exact"}), logits=True)

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def session(self) -> EagerSession:
        session = EagerSession(self._model)
        session.close = lambda: None  # type: ignore[attr-defined]
        return session

    def close(self) -> None:
        """Nothing is held."""


def tokens_of(
    runtime: Runtime, prompts: Sequence[list[int]], config: GenerationConfig
) -> np.ndarray:
    results = runtime.generate([list(prompt) for prompt in prompts], config)
    assert isinstance(results, list)
    return np.array([result.tokens for result in results])


@pytest.mark.parametrize(
    "config", [FAST, GenerationConfig(gen_length=64, block_length=32, steps=8)]
)
def test_float32_tokens_are_those_of_onnxruntime(
    config: GenerationConfig, runtimes: Callable[[str], Runtime]
) -> None:
    """Prompts of several lengths: pads here and there, exact caches there."""
    found = decode(model_in(torch.float32), PROBLEMS.prompts, config, CPU)
    expected = tokens_of(runtimes(SHIPPED), PROBLEMS.prompts, config)
    assert np.array_equal(found, expected)
    assert len({len(prompt) for prompt in PROBLEMS.prompts}) > 1


def test_one_token_per_step_is_onnxruntime_too(runtimes: Callable[[str], Runtime]) -> None:
    found = decode(model_in(torch.float32), PROBLEMS.prompts[:2], SETTINGS, CPU)
    assert np.array_equal(found, tokens_of(runtimes(SHIPPED), PROBLEMS.prompts[:2], SETTINGS))
    assert PROBLEMS.correct(np.concatenate([found, found, found])).sum() >= 1


def test_bfloat16_tokens_are_those_of_runtime() -> None:
    """The same arithmetic under Runtime's own loop."""
    model = model_in(torch.bfloat16)
    plain = GenerationConfig(gen_length=64, block_length=16, steps=16, cache="none")
    runtime = Runtime(EagerEngine(model))  # type: ignore[arg-type]
    found = decode(model, PROBLEMS.prompts[:4], plain, CPU)
    assert np.array_equal(found, tokens_of(runtime, PROBLEMS.prompts[:4], plain))


def test_rows_are_decoded_alike_alone_and_after_an_end_token() -> None:
    model = model_in(torch.float32)
    together = decode(model, PROBLEMS.prompts[:3], FAST, CPU)
    alone = [decode(model, [prompt], FAST, CPU)[0] for prompt in PROBLEMS.prompts[:3]]
    assert np.array_equal(together, np.stack(alone))
    end = SOURCE.config.eos_ids[0]
    for row in together.reshape(3, 4, 16):
        ended = (row == end).any(axis=1).argmax()
        assert (row[ended + 1 :] == end).all()


def test_what_decode_refuses() -> None:
    model = model_in(torch.float32)
    with pytest.raises(InvalidRequestError, match="one policy"):
        decode(model, PROBLEMS.prompts[:1], GenerationConfig(temperature=1.0), CPU)
    broken = {**WEIGHTS, "norm.weight": WEIGHTS["norm.weight"] * torch.nan}
    failing, _ = build_model(SOURCE.config, broken, Case("bf16"), {})
    with pytest.raises(NumericalError, match="NaN"):
        decode(failing, PROBLEMS.prompts[:1], FAST, CPU)


def test_groups_of_one_length() -> None:
    groups = list(equal_lengths([3, 5, 3, 3, 5], 2))
    assert groups == [[0, 2], [3], [1, 4]]


def test_states_mask_the_shares_they_say() -> None:
    states = list(PROBLEMS.states([1], seed=7))
    assert len(states) == SETTINGS.num_blocks * len(MASKED_SHARES)
    mask, gen = SOURCE.config.mask_id, SETTINGS.gen_length
    for index, state in enumerate(states):
        block, share = divmod(index, len(MASKED_SHARES))
        answer = state.canvas.tokens[0, -gen:]
        first = block * SETTINGS.block_length
        inside = answer[first : first + SETTINGS.block_length]
        assert (inside == mask).sum() == round(MASKED_SHARES[share] * SETTINGS.block_length)
        assert np.array_equal(inside == mask, state.masked[0])
        assert np.array_equal(answer[:first], PROBLEMS.answers[1, :first])
        assert (answer[first + SETTINGS.block_length :] == mask).all()
    again = list(PROBLEMS.states([0, 1], seed=7)) if _same_length(0, 1) else states
    assert np.array_equal(again[1].masked[-1], states[1].masked[0])


def _same_length(first: int, second: int) -> bool:
    return len(PROBLEMS.prompts[first]) == len(PROBLEMS.prompts[second])


def test_answers_are_scored() -> None:
    assert PROBLEMS.correct(PROBLEMS.answers).all()
    wrong = np.roll(PROBLEMS.answers, 1, axis=0)
    assert PROBLEMS.correct(wrong).sum() < len(PROBLEMS)


def test_an_engine_predicts_what_the_reference_predicts(models: Callable[[str], Built]) -> None:
    state = next(PROBLEMS.states([0], seed=0))
    with EngineCandidate(models(SHIPPED).engine, 4) as candidate:
        found, residuals = candidate.predictions(state)
    columns = torch.from_numpy(state.columns)
    canvas = on_device(state.canvas, CPU)
    expected = predict(model_in(torch.float32), canvas, columns, logits=True)[2]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert residuals == []


def test_engines_are_compared(models: Callable[[str], Built], tmp_path: Path) -> None:
    """An engine and its copy: no gap, no divergence."""
    other = Path(shutil.copytree(models(SHIPPED).engine, tmp_path / "copy"))
    settings = AccuracySettings(problems=3, steps=4, resamples=100)
    report = compare_engines([models(SHIPPED).engine, other], settings)
    assert [case.name for case in report.cases] == ["engine", "copy"]
    copy = report.cases[1]
    assert copy.gap[4].value == 0.0
    assert copy.same_answer[4] == 1.0
    assert copy.divergence is not None
    assert copy.divergence.high == 0.0
    assert copy.agreement is not None
    assert copy.agreement.low == 1.0
    with pytest.raises(InvalidRequestError, match="one name"):
        compare_engines([other, other], settings)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "accuracy", *map(str, arguments)])


def test_command_line(tmp_path: Path) -> None:
    """A whole comparison, small."""
    settings = (
        "--problems", 2, "--steps", 2, "--schemes", "group,tensor", "--scopes", "ffn",
        "--calibration-problems", 1, "--outlier-models", 1, "--resamples", 100,
    )  # fmt: skip
    saved = tmp_path / "report.json"
    result = invoke(*settings, "--json", "--save-result", saved)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert json.loads(saved.read_text()) == report
    cases = {case["name"]: case for case in report["cases"]}
    assert {"bf16", "fp32", "tensor.ffn", "group.ffn", "group+layer0.ffn"} <= set(cases)
    assert len(cases["group.ffn"]["sqnr_db"]) == SOURCE.config.num_layers + 1
    levels = [level["value"] for level in cases["group.ffn"]["sqnr_db"]]
    assert levels[0] is None
    assert 10 < levels[-1] < 60
    assert cases["group+layer0.ffn"]["sqnr_db"][0]["value"] < 60
    assert cases["group.ffn"]["divergence"]["value"] > cases["fp32"]["divergence"]["value"]
    assert {"tiny.exact_match.bf16", "tiny.exact_match.fp8", "tiny.exact_match_gap_bound.fp8"} <= (
        set(report["metrics"])
    )
    statements = [claim["statement"] for claim in report["claims"]]
    assert any("layer 0 is more sensitive" in statement for statement in statements)
    assert any("per group loses less than per tensor (ffn)" in text for text in statements)
    outliers = {(row["name"], row["outlier"]): row for row in report["outliers"]}
    assert outliers["fp32", 64.0]["logits_ulps"] < 0.1 < outliers["bf16", 64.0]["logits_ulps"]
    assert outliers["tensor.ffn", 4096.0]["logits_ulps"] > outliers["bf16", 4096.0]["logits_ulps"]


@pytest.mark.parametrize(
    ("flag", "value", "what"),
    [
        ("schemes", "", "schemes is empty"),
        ("schemes", "group,group", "the same twice"),
        ("scopes", ",", "scopes is empty"),
        ("steps", "8,8", "the same twice"),
    ],
)
def test_lists_that_compare_nothing_or_one_twice(flag: str, value: str, what: str) -> None:
    result = invoke(f"--{flag}", value, "--json")
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 2
    assert what in error["what"]
    assert flag in error["what"]


def test_tables_of_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_accuracy_statistics import bounded

    from lacache_trt.accuracy import study
    from lacache_trt.accuracy.report import CaseResult, Claim, Evidence

    score = {64: bounded(0.9, 1.0)}
    cases = (
        CaseResult("bf16", "bfloat16", "", "-", "none", score, {}, {}, None, None, (), 1.0),
        CaseResult("group.ffn", "1x128", "", "ffn", "1-5", score, {64: bounded(0, 0.01)},
                   {64: 0.5}, bounded(0, 1e-4), bounded(0.99, 1), (bounded(30, 31),), 1.0),
    )  # fmt: skip
    claim = Claim("a statement", "x", "y", (Evidence("KL", bounded(0.1, 0.2)),), 5000)
    report = AccuracyReport("bf16", "cpu", "0", {"problems": 2}, cases, (claim,))
    monkeypatch.setattr(study, "compare_schemes", lambda *arguments: report)
    shown = invoke().stdout
    for text in ("95.00", "+0.50 [+0.00, +1.00]", "50.0 [0.0, 100.0]", "99.500", "30.5"):
        assert text in shown
    assert "a statement: holds" in shown
    assert "y is worse by 0.15" in shown


def test_wrong_settings_are_usage_errors(tmp_path: Path) -> None:
    assert invoke("--scopes", "attention").exit_code == 2
    assert invoke("--schemes", "int4", "--problems", 2).exit_code == 2
    assert invoke("--checkpoint", tmp_path).exit_code == 3
