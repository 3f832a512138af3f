"""The judgement of differing tokens: it excuses rounding and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from canvases import Shape

from lacache_trt.engines.base import StepOutputs

pytest.importorskip("triton")
import gpu_models
import near_ties

CONFIG = replace(
    gpu_models.GROUPED,
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=64,
    vocab_size=200,
    mask_id=199,
)
SHAPE = Shape(40, 16, (12,), (0,), (40,), 0)


class StandIn:
    """The module in bfloat16 as an engine; `reuse` is off by `wrong` at random."""

    def __init__(self, weights: dict[str, torch.Tensor], wrong: float) -> None:
        self.config, self._weights, self._wrong = CONFIG, weights, wrong

    def session(self) -> StandIn:
        self._session = gpu_models.DeviceSession(CONFIG, self._weights, torch.bfloat16)
        self.fill, self.plain = self._session.fill, self._session.plain
        return self

    def reuse(self, *inputs: object) -> StepOutputs:
        step = self._session.reuse(*inputs)
        noise = np.random.default_rng(1).normal(0, self._wrong, step.logits.shape)
        logits = (step.logits + noise).astype(np.float32)
        return replace(step, logits=logits, token=logits.argmax(-1).astype(np.int32))

    def close(self) -> None:
        """Nothing to give back."""


def figures_with(wrong: float, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    monkeypatch.setattr(gpu_models, "DEVICE", "cpu")
    monkeypatch.setattr(near_ties, "DEVICE", "cpu")
    weights = gpu_models.random_weights(CONFIG, torch.bfloat16)
    references = tuple(
        gpu_models.DeviceSession(CONFIG, weights, kind) for kind in (torch.float64, torch.bfloat16)
    )
    found = near_ties.Predictions(torch.finfo(torch.bfloat16).eps)
    for seed in range(4):
        shape = replace(SHAPE, seed=seed)
        near_ties.walk_block(StandIn(weights, wrong), references, shape, 8, found)
    return found.figures()


def test_a_right_engine_needs_no_more_than_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = figures_with(0.0, monkeypatch)
    assert figures["predictions"] == 4 * sum(range(2, 17, 2))
    assert figures["not_excused"] == 0
    assert figures["plain_error_ulps"] == figures["module_error_ulps"]
    assert figures["exact_error_ulps"] <= 2 * figures["module_error_ulps"]
    assert 0 < figures["bound_ulps"] < 20


def test_a_wrong_engine_is_not_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = figures_with(4.0, monkeypatch)
    assert figures["not_excused"] > 0
    assert figures["largest_differing_gap_ulps"] > figures["bound_ulps"]
    assert figures["exact_error_ulps"] > 2 * figures["module_error_ulps"]
