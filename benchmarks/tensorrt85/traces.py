"""What an engine predicted at every step of whole generations, and how two engines compare.

A row's generation is a chain of decisions: which position to commit, and to what. Two engines agree
while their decisions do. At the first that differs the inputs were still the same, so the reference
alone says whether it was a near tie: its best two tokens there, or its best two positions, closer
than the bound. One near tie changes everything after it, hence it is counted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lacache_trt.engines.base import Engine
from lacache_trt.generation import GenerationConfig, GenerationResult
from lacache_trt.runtime import Runtime

KEPT = ("block_tokens", "token", "confidence", "margin")
Arrays = dict[str, NDArray[Any]]


class RecordingEngine:
    """An engine whose sessions remember each step's inputs and predictions."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.steps: list[Arrays] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def session(self) -> Any:
        return _RecordingSession(self._engine.session(), self.steps)


class _RecordingSession:
    def __init__(self, session: Any, steps: list[Arrays]) -> None:
        self._session, self._steps = session, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def reuse(self, block_tokens: NDArray[np.int32], *arguments: Any, **named: Any) -> Any:
        tokens = block_tokens.copy()
        outputs = self._session.reuse(block_tokens, *arguments, **named)
        kept = {name: getattr(outputs, name).copy() for name in KEPT[1:]}
        self._steps.append({"block_tokens": tokens, **kept})
        return outputs


def generate_traced(
    engine: Engine, prompts: Sequence[list[int]], config: GenerationConfig, batch: int
) -> Arrays:
    """Whole generations in batches: `tokens` [rows, G], and each of KEPT as [steps, rows, Bk]."""
    found: list[Arrays] = []
    for first in range(0, len(prompts), batch):
        recording = RecordingEngine(engine)
        results = Runtime(recording).generate(list(prompts[first : first + batch]), config)
        rows: list[GenerationResult] = results if isinstance(results, list) else [results]
        trace = {name: np.stack([step[name] for step in recording.steps]) for name in KEPT}
        found.append({**trace, "tokens": np.array([row.tokens for row in rows], np.int32)})
    joined = {name: np.concatenate([each[name] for each in found], axis=1) for name in KEPT}
    return {**joined, "tokens": np.concatenate([each["tokens"] for each in found])}


@dataclass
class Comparison:
    """Two engines' generations.

    Attributes:
        rows: generations.
        equal_rows: of which all tokens are equal.
        equal_tokens: fraction of the tokens.
        decisions: taken on the same inputs by both.
        near_ties: first differing decisions that the reference holds for a near tie.
        wrong: first differing decisions that it does not.
        worst_confidence: largest difference of a confidence at the same inputs and token.
    """

    rows: int
    equal_rows: int
    equal_tokens: float
    decisions: int = 0
    near_ties: int = 0
    wrong: list[dict[str, float]] = field(default_factory=list)
    worst_confidence: float = 0.0


def compare(reference: Arrays, got: Arrays, mask_id: int, bound: float) -> Comparison:
    """See the module; every row of the two traces is the same prompt."""
    same = reference["tokens"] == got["tokens"]
    result = Comparison(len(same), int(same.all(axis=1).sum()), float(same.mean()))
    steps = len(reference["token"])
    for row in range(len(same)):
        inputs = reference["block_tokens"][:, row], got["block_tokens"][:, row]
        alike = (inputs[0] == inputs[1]).all(axis=1)
        count = int(np.argmin(alike)) if not alike.all() else steps
        result.decisions += count
        for step in range(count):
            _compare_step(result, reference, got, step, row)
        if count < steps or not same[row].all():
            gaps = decision_gaps(reference, count - 1, row, mask_id)
            if min(gaps.values()) <= bound:
                result.near_ties += 1
            else:
                result.wrong.append({"row": row, "step": count - 1, **gaps})
    return result


def _compare_step(result: Comparison, reference: Arrays, got: Arrays, step: int, row: int) -> None:
    same = reference["token"][step, row] == got["token"][step, row]
    left, right = (each["confidence"][step, row][same] for each in (reference, got))
    if len(left):
        result.worst_confidence = max(result.worst_confidence, float(np.abs(left - right).max()))


def decision_gaps(trace: Arrays, step: int, row: int, mask_id: int) -> dict[str, float]:
    """How clearly the reference chose its token, and its position, at a step."""
    masked = trace["block_tokens"][step, row] == mask_id
    confidence = np.where(masked, trace["confidence"][step, row], -np.inf)
    order = np.argsort(-confidence, kind="stable")
    runner_up = confidence[order[1]] if len(order) > 1 else -np.inf
    margin = float(trace["margin"][step, row][order[0]])
    return {"token": margin, "position": float(confidence[order[0]] - runner_up)}


def save(path: Path, trace: Arrays) -> None:
    """Write a trace."""
    np.savez_compressed(path, **trace)


def read(path: Path) -> Arrays:
    """Read a trace."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}
