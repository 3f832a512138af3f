"""The paper's claims, answered with the numbers of a run.

LaCache (arXiv 2607.16339) says of FP8 in the FFNs: scales per 1x128 group lose less than scales per
token, those less than one scale per tensor (its Table 1), and quantising the first layer costs
accuracy, so that layer stays in 16 bits. Each claim is a pair of cases. Its evidence is how much
worse the second case is, problem by problem: exact match at each number of steps, disagreement with
the baseline's tokens, divergence from its predictions, and noise in the logits. The verdict follows
from the intervals alone (`report.Claim`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lacache_trt.accuracy.measurement import Measured
from lacache_trt.accuracy.models import only_layer
from lacache_trt.accuracy.report import Claim, Evidence
from lacache_trt.accuracy.statistics import Bootstrap, Values
from lacache_trt.model.config import ModelConfig

_PAIRS = (
    ("per group loses less than per token", "group", "token"),
    ("per token loses less than per tensor", "token", "tensor"),
    ("per group loses less than per tensor", "group", "tensor"),
    ("quantising layer 0 too hurts", "group", "group+layer0"),
)


def answer_claims(
    measured: Mapping[str, Measured],
    config: ModelConfig,
    scopes: Sequence[str],
    bootstrap: Bootstrap,
) -> tuple[Claim, ...]:
    """Every claim whose cases were measured, at every scope."""
    claims = []
    for scope in scopes:
        for statement, better, worse in _PAIRS:
            names = (f"{better}.{scope}", f"{worse}.{scope}")
            if all(name in measured for name in names):
                evidence = _evidence(measured[names[0]], measured[names[1]], bootstrap)
                claims.append(Claim(f"{statement} ({scope})", *names, evidence, bootstrap.problems))
    layers = [only_layer(layer) for layer in range(config.num_layers)]
    if len(layers) > 1 and all(name in measured for name in layers):
        claims.append(_first_layer_claim(measured, layers, bootstrap))
    return tuple(claims)


def _evidence(better: Measured, worse: Measured, bootstrap: Bootstrap) -> tuple[Evidence, ...]:
    found = [
        Evidence(
            f"exact match, {steps} steps",
            bootstrap.mean(
                better.correct[steps].astype(float) - worse.correct[steps].astype(float)
            ),
        )
        for steps in better.correct
    ]
    return (*found, *_prediction_evidence(_harms(worse) - _harms(better), better, worse, bootstrap))


def _prediction_evidence(
    harms: Values, better: Measured, worse: Measured | None, bootstrap: Bootstrap
) -> tuple[Evidence, ...]:
    """Evidence of single predictions; the noise of logits only where both cases have it."""
    names = ("token disagreement", "KL, nats")
    found = tuple(
        Evidence(name, bootstrap.mean(harm)) for name, harm in zip(names, harms, strict=True)
    )
    if worse is None or better.totals is None or worse.totals is None:
        return found
    if not len(better.totals.noise) or not len(worse.totals.noise):
        return found
    noise = bootstrap.decibels(worse.totals.noise[-1], better.totals.noise[-1])
    return (*found, Evidence("noise in the logits, dB", noise))


def _first_layer_claim(
    measured: Mapping[str, Measured], layers: Sequence[str], bootstrap: Bootstrap
) -> Claim:
    """Layer 0 alone in FP8 against the mean of each other layer alone in FP8."""
    others = np.mean([_harms(measured[name]) for name in layers[1:]], axis=0)
    harms = _harms(measured[layers[0]]) - others
    return Claim(
        "layer 0 is more sensitive than the other layers (its FFN alone in FP8)",
        f"the mean of {layers[1]} to {layers[-1]}",
        layers[0],
        _prediction_evidence(harms, measured[layers[0]], None, bootstrap),
        bootstrap.problems,
    )


def _harms(case: Measured) -> Values:
    """Token disagreement and KL of each problem: float64 [2, n]."""
    totals = case.totals
    if totals is None:
        return np.zeros((2, 1))
    disagreement = 1.0 - totals.agreeing / totals.positions
    return np.stack([disagreement, totals.divergence / totals.positions])
