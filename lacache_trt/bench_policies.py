"""Accuracy against speed: policy × cache × suffix × engine on the problems of tiny-llada.

Every case answers the same problems of the tune split; the one with the fewest forwards within
the allowed loss is chosen there, and only it and the baseline (LLaDA's schedule, one token per
step) see the held-out split. Forwards are those up to the answer's end token, on both sides. An
engine of lower precision is one more directory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import numpy as np
from numpy.typing import NDArray

import lacache_trt
from lacache_trt.accuracy.statistics import Bootstrap
from lacache_trt.bench import machine_facts
from lacache_trt.demo.problems import Problem, is_correct, problem
from lacache_trt.errors import InvalidRequestError
from lacache_trt.generation import GenerationConfig, GenerationResult
from lacache_trt.policy_grid import (
    BASE,
    Case,
    CaseResult,
    GridReport,
    GridSettings,
    HeldOut,
    cases,
    choose,
    mark_frontier,
)
from lacache_trt.progress import Progress, SilentProgress
from lacache_trt.runtime import Runtime

_SEED = 0


@dataclass(frozen=True)
class _Answers:
    """What a case said: right answers bool [n], forwards and tokens before the end int [n]."""

    right: NDArray[np.bool_]
    forwards: NDArray[np.int64]
    tokens: NDArray[np.int64]
    seconds: float


def bench_policies(
    directories: Sequence[Path],
    settings: GridSettings | None = None,
    progress: Progress | None = None,
) -> GridReport:
    """Run the grid on built engines of tiny-llada; the first one is the baseline's.

    Raises `InvalidRequestError` for engines with the same name, or without a tokenizer.
    """
    settings, progress = settings or GridSettings(), progress or SilentProgress()
    asked = [problem("tune", index) for index in range(settings.problems)]
    with ExitStack() as stack:
        runtimes = _opened(directories, stack)
        device = next(iter(runtimes.values())).engine.device
        grid, skipped = _possible(runtimes, settings)
        progress.start("tune split", len(grid))
        results = []
        for case in grid:
            answers = _answers(runtimes[case.engine], asked, case.config, settings.batch)
            results.append(_result(case, answers))
            progress.advance()
        best = grid[results.index(choose(results, results[0], settings.gap_points))]
        held_out = _held_out(runtimes, grid[0], best, settings, progress)
    return GridReport(
        device,
        lacache_trt.__version__,
        machine_facts(),
        {**asdict(settings), "gen_length": BASE.gen_length, "block_length": BASE.block_length},
        tuple(mark_frontier(results)),
        held_out,
        tuple(skipped),
    )


def _opened(directories: Sequence[Path], stack: ExitStack) -> dict[str, Runtime]:
    runtimes: dict[str, Runtime] = {}
    for directory in directories:
        name = Path(directory).resolve().name
        if name in runtimes:
            raise InvalidRequestError(
                "two engine directories have the same name",
                got=name,
                expected="a name of its own for every engine",
                fix="rename one of the directories",
            )
        runtimes[name] = stack.enter_context(Runtime.load(directory))
        if runtimes[name].codec is None:
            raise InvalidRequestError(
                "the engine directory has no tokenizer",
                got=str(directory),
                expected="an engine of tiny-llada, or of a model trained on the same problems",
            )
    if not runtimes:
        raise InvalidRequestError("no engine to measure", expected="at least one directory")
    return runtimes


def _possible(runtimes: dict[str, Runtime], settings: GridSettings) -> tuple[list[Case], list[str]]:
    """The cases that the engines can run, and what had to be left out."""
    grid: list[Case] = []
    skipped: list[str] = []
    for name, runtime in runtimes.items():
        can = runtime.engine.capabilities
        for case in cases(name, settings):
            if case.config.cache not in can.caches:
                reason = f"cache={case.config.cache!r} on {name}"
            elif case.config.policy == "klass" and not can.logits:
                reason = f"policy='klass' on {name}, which returns no logits"
            else:
                grid.append(case)
                continue
            if reason not in skipped:
                skipped.append(reason)
    return grid, skipped


def _answers(
    runtime: Runtime, asked: Sequence[Problem], config: GenerationConfig, batch: int
) -> _Answers:
    results: list[GenerationResult] = []
    started = time.perf_counter()
    for first in range(0, len(asked), batch):
        questions = [one.question for one in asked[first : first + batch]]
        found = runtime.generate(list(questions), config, raw=True)
        results += found if isinstance(found, list) else [found]
    seconds = time.perf_counter() - started
    ends = set(runtime.engine.config.eos_ids)
    pairs = zip(asked, results, strict=True)
    return _Answers(
        np.array([is_correct(one, result.text or "") for one, result in pairs]),
        np.array([result.forwards for result in results]),
        np.array([_before_end(result.tokens, ends) for result in results]),
        seconds,
    )


def _before_end(tokens: Sequence[int], ends: set[int]) -> int:
    return next((place for place, token in enumerate(tokens) if token in ends), len(tokens))


def _result(case: Case, answers: _Answers) -> CaseResult:
    return CaseResult(
        name=case.name,
        settings=case.changes,
        engine=case.engine,
        accuracy=float(answers.right.mean()),
        forwards=float(answers.forwards.mean()),
        tokens_per_forward=float(answers.tokens.sum() / answers.forwards.sum()),
        ms_per_answer=1e3 * answers.seconds / len(answers.right),
    )


def _held_out(
    runtimes: dict[str, Runtime],
    baseline: Case,
    chosen: Case,
    settings: GridSettings,
    progress: Progress,
) -> HeldOut:
    asked = [problem("held-out", index) for index in range(settings.held_out)]
    progress.start("held-out split", 2)
    found = []
    for case in (baseline, chosen):
        found.append(_answers(runtimes[case.engine], asked, case.config, settings.batch))
        progress.advance()
    before, after = found
    gap = Bootstrap(len(asked), settings.resamples, _SEED).gap(before.right, after.right)
    steps = [mean(map(float, one.forwards)) for one in found]
    return HeldOut(
        baseline=baseline.name,
        chosen=chosen.name,
        problems=len(asked),
        baseline_accuracy=float(before.right.mean()),
        chosen_accuracy=float(after.right.mean()),
        gap_points=100 * gap.value,
        gap_low=100 * gap.low,
        gap_high=100 * gap.high,
        baseline_forwards=steps[0],
        chosen_forwards=steps[1],
        forwards_ratio=steps[0] / steps[1],
    )
