"""Answers and predictions of every candidate on the same problems."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from lacache_trt.accuracy.candidates import Candidate
from lacache_trt.accuracy.dataset import Problems
from lacache_trt.accuracy.decode import decode, equal_lengths
from lacache_trt.accuracy.models import Case, Weights, build_model
from lacache_trt.accuracy.predictions import PredictionTotals
from lacache_trt.accuracy.settings import AccuracySettings
from lacache_trt.demo.shipped import SETTINGS
from lacache_trt.engines.base import Int
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.config import ModelConfig
from lacache_trt.progress import Progress, SilentProgress


@dataclass
class Measured:
    """What one candidate did, problem by problem."""

    correct: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    tokens: dict[int, Int] = field(default_factory=dict)
    totals: PredictionTotals | None = None
    seconds: float = 0.0


def calibrate(
    config: ModelConfig,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    generation: GenerationConfig,
    device: torch.device,
    most_rows: int,
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Abs max [K] of every linear's input channels while the model answers the prompts."""
    model, ops = build_model(config, weights, Case("calibration", dtype), {})
    amax: dict[str, torch.Tensor] = {}

    def watch(name: str, x: torch.Tensor) -> None:
        found = x.float().abs().flatten(0, -2).amax(dim=0)
        amax[name] = torch.maximum(amax[name], found) if name in amax else found

    ops.on_input = watch
    progress = progress or SilentProgress()
    progress.start("calibrate", len(prompts))
    for members in equal_lengths([len(prompt) for prompt in prompts], most_rows):
        decode(model, [prompts[index] for index in members], generation, device)
        progress.advance(len(members))
    return amax


def measure(
    candidates: Sequence[Candidate],
    problems: Problems,
    config: ModelConfig,
    settings: AccuracySettings,
    progress: Progress,
    decoded: set[str],
) -> dict[str, Measured]:
    """Answers of the candidates named in `decoded`, and every candidate's predictions."""
    measured = {candidate.name: Measured() for candidate in candidates}
    for candidate in candidates:
        if candidate.name in decoded:
            _answer(candidate, problems, settings, measured[candidate.name], progress)
    _predict(candidates, problems, config, settings, measured, progress)
    return measured


def _answer(
    candidate: Candidate,
    problems: Problems,
    settings: AccuracySettings,
    into: Measured,
    progress: Progress,
) -> None:
    started = time.perf_counter()
    lengths = [len(prompt) for prompt in problems.prompts]
    progress.start(f"answers of {candidate.name}", len(problems) * len(settings.step_counts))
    for steps in settings.step_counts:
        generation = replace(SETTINGS, steps=steps)
        tokens = np.zeros((len(problems), SETTINGS.gen_length), np.int32)
        for members in equal_lengths(lengths, candidate.most_rows):
            prompts = [problems.prompts[index] for index in members]
            tokens[members] = candidate.answers(prompts, generation)
            progress.advance(len(members))
        into.tokens[steps] = tokens
        into.correct[steps] = problems.correct(tokens)
    into.seconds = time.perf_counter() - started


def _predict(
    candidates: Sequence[Candidate],
    problems: Problems,
    config: ModelConfig,
    settings: AccuracySettings,
    measured: Mapping[str, Measured],
    progress: Progress,
) -> None:
    lengths = [len(prompt) for prompt in problems.prompts]
    most = min(candidate.most_rows for candidate in candidates)
    progress.start("predictions of masked blocks", len(problems))
    baseline, others = candidates[0], candidates[1:]
    for candidate in others:
        measured[candidate.name].totals = PredictionTotals.empty(len(problems))
    for members in equal_lengths(lengths, most):
        for state in problems.states(members, settings.seed):
            expected = baseline.predictions(state)
            for candidate in others:
                totals = measured[candidate.name].totals
                if totals is not None:
                    totals.add(state, expected, candidate.predictions(state), config.mask_id)
        progress.advance(len(members))
