"""The whole comparison: answers, predictions, claims.

All candidates answer the same problems and predict the same partly masked blocks; the first one is
the baseline. Every difference is paired by problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import lacache_trt
from lacache_trt.accuracy.candidates import Candidate, EngineCandidate, TorchCandidate
from lacache_trt.accuracy.claims import answer_claims
from lacache_trt.accuracy.dataset import Problems
from lacache_trt.accuracy.measurement import Measured, calibrate, measure
from lacache_trt.accuracy.models import (
    Case,
    build_model,
    device_title,
    load_weights,
    pick_device,
    standard_cases,
)
from lacache_trt.accuracy.outliers import outlier_results
from lacache_trt.accuracy.predictions import PredictionTotals
from lacache_trt.accuracy.report import AccuracyReport, CaseResult
from lacache_trt.accuracy.schemes import SCHEMES
from lacache_trt.accuracy.settings import AccuracySettings, split_names
from lacache_trt.accuracy.statistics import Bootstrap, Bounded
from lacache_trt.demo.shipped import CHECKPOINT, SETTINGS
from lacache_trt.errors import InvalidRequestError
from lacache_trt.model.checkpoint import Checkpoint
from lacache_trt.model.config import ModelConfig
from lacache_trt.progress import Progress, SilentProgress


def compare_schemes(
    settings: AccuracySettings | None = None,
    checkpoint: Path | None = None,
    progress: Progress | None = None,
) -> AccuracyReport:
    """Measure the schemes of `settings` in the torch reference; the baseline is bf16.

    Args:
        settings: what to compare and on how much.
        checkpoint: tiny-llada, or a model trained on the same problems.
        progress: told which case is running.
    """
    settings, progress = settings or AccuracySettings(), progress or SilentProgress()
    device = pick_device(settings.device)
    source = Checkpoint.open(checkpoint or CHECKPOINT)
    weights = load_weights(source, device)
    names = tuple(SCHEMES) if settings.schemes == "all" else split_names(settings.schemes)
    cases = standard_cases(source.config, names, settings.scope_names)
    tune = Problems(source.directory, source.config, "tune", settings.calibration_problems)
    amax = calibrate(source.config, weights, tune.prompts, SETTINGS, device, settings.batch_rows)
    candidates: list[Candidate] = []
    for case in cases:
        model, ops = build_model(source.config, weights, case, amax)
        candidates.append(TorchCandidate(case.name, model, ops, device, settings.batch_rows))
    problems = Problems(source.directory, source.config, "held-out", settings.problems)
    decoded = {case.name for case in cases if case.decoded}
    measured = measure(candidates, problems, source.config, settings, progress, decoded)
    bootstrap = Bootstrap(len(problems), settings.resamples, settings.seed)
    return AccuracyReport(
        baseline=cases[0].name,
        device=device_title(device),
        toolkit_version=lacache_trt.__version__,
        workload=_workload(settings, source.directory.name),
        cases=tuple(
            _result(case.name, measured, cases[0].name, bootstrap, _described(case))
            for case in cases
        ),
        claims=answer_claims(measured, source.config, settings.scope_names, bootstrap),
        outliers=outlier_results(cases, settings.outlier_models, settings.seed, device),
    )


def compare_engines(
    directories: Sequence[Path],
    settings: AccuracySettings | None = None,
    checkpoint: Path | None = None,
    progress: Progress | None = None,
) -> AccuracyReport:
    """Measure built engines with the same statistics; the first directory is the baseline."""
    settings, progress = settings or AccuracySettings(), progress or SilentProgress()
    source = Checkpoint.open(checkpoint or CHECKPOINT)
    names = [directory.name for directory in directories]
    if len(set(names)) < len(names):
        raise InvalidRequestError("two engine directories have one name", got=", ".join(names))
    candidates: list[EngineCandidate] = []
    try:
        for directory in directories:
            candidates.append(EngineCandidate(directory, settings.batch_rows))
            _check_same_model(candidates[-1], source.config)
        problems = Problems(source.directory, source.config, "held-out", settings.problems)
        measured = measure(candidates, problems, source.config, settings, progress, set(names))
        devices = ", ".join(dict.fromkeys(candidate.device for candidate in candidates))
    finally:
        for candidate in candidates:
            candidate.close()
    bootstrap = Bootstrap(len(problems), settings.resamples, settings.seed)
    return AccuracyReport(
        baseline=names[0],
        device=devices,
        toolkit_version=lacache_trt.__version__,
        workload=_workload(settings, source.directory.name),
        cases=tuple(_result(name, measured, names[0], bootstrap) for name in names),
    )


@dataclass(frozen=True)
class _Description:
    """What a table says of a case."""

    title: str = "engine"
    source: str = ""
    scope: str = ""
    layers: str = ""


def _described(case: Case) -> _Description:
    if case.scheme is None:
        return _Description(str(case.dtype).removeprefix("torch."), "", "-", "none")
    first, last = case.layers[0], case.layers[-1]
    layers = str(first) if first == last else f"{first}-{last}"
    return _Description(case.scheme.title, case.scheme.source, case.scope, layers)


def _result(
    name: str,
    measured: Mapping[str, Measured],
    baseline: str,
    bootstrap: Bootstrap,
    description: _Description | None = None,
) -> CaseResult:
    mine, base = measured[name], measured[baseline]
    said = description or _Description()
    other = {} if name == baseline else mine.correct
    divergence, agreement, noise = _compared(mine.totals, bootstrap)
    return CaseResult(
        name=name,
        title=said.title,
        source=said.source,
        scope=said.scope,
        layers=said.layers,
        exact_match={steps: bootstrap.mean(right) for steps, right in mine.correct.items()},
        gap={steps: bootstrap.gap(base.correct[steps], right) for steps, right in other.items()},
        same_answer={
            steps: float((base.tokens[steps] == mine.tokens[steps]).all(axis=1).mean())
            for steps in other
        },
        divergence=divergence,
        agreement=agreement,
        sqnr_db=noise,
        seconds=mine.seconds,
    )


def _compared(
    totals: PredictionTotals | None, bootstrap: Bootstrap
) -> tuple[Bounded | None, Bounded | None, tuple[Bounded, ...]]:
    """Divergence, agreement and noise levels; nothing for the baseline."""
    if totals is None:
        return None, None, ()
    levels = zip(totals.signal, totals.noise, strict=True)
    return (
        bootstrap.mean(totals.divergence / totals.positions),
        bootstrap.mean(totals.agreeing / totals.positions),
        tuple(bootstrap.decibels(signal, noise) for signal, noise in levels),
    )


def _workload(settings: AccuracySettings, model: str) -> dict[str, object]:
    return {
        "model": model,
        "problems": settings.problems,
        "steps": list(settings.step_counts),
        "gen_length": SETTINGS.gen_length,
        "block_length": SETTINGS.block_length,
        "calibration_problems": settings.calibration_problems,
        "resamples": settings.resamples,
        "seed": settings.seed,
    }


def _check_same_model(candidate: EngineCandidate, config: ModelConfig) -> None:
    got = replace(candidate.model_config, dtype=config.dtype)
    if got != config:
        raise InvalidRequestError(
            f"{candidate.name} was not built from this checkpoint",
            got=got,
            expected=config,
            fix="name the checkpoint with --checkpoint",
        )
