"""What a study found, as plain records, and the verdicts that follow from them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from lacache_trt.accuracy.statistics import Bounded

PAPERS_CASE = "group.ffn"
LEAST_PROBLEMS = 100


@dataclass(frozen=True)
class CaseResult:
    """One case beside the baseline.

    Attributes:
        name: of the case, or of the engine directory.
        title: of its scheme.
        source: where the scheme comes from.
        scope: what it quantises.
        layers: how many layers it quantises, as text.
        exact_match: share of problems answered right, by number of steps.
        gap: exact match of the baseline minus this one's, paired, by number of steps.
        same_answer: share of problems whose tokens are all the baseline's, by number of steps.
        divergence: KL of the baseline's predictions to this one's, in nats per masked position.
        agreement: share of masked positions where both predict the same token.
        sqnr_db: signal to noise in decibels of the residual stream after each layer, then of the
            logits, at the block's rows; empty for engines and for the baseline.
        seconds: spent on its answers.
    """

    name: str
    title: str
    source: str
    scope: str
    layers: str
    exact_match: dict[int, Bounded]
    gap: dict[int, Bounded]
    same_answer: dict[int, float]
    divergence: Bounded | None
    agreement: Bounded | None
    sqnr_db: tuple[Bounded, ...]
    seconds: float


@dataclass(frozen=True)
class Evidence:
    """One measure of a claim: how much worse the worse case is, in the measure's unit."""

    measure: str
    harm: Bounded

    @property
    def says(self) -> str:
        """`for`, `against` or `open`, by where zero lies."""
        if self.harm.low > 0:
            return "for"
        return "against" if self.harm.high < 0 else "open"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and what our numbers say.

    Attributes:
        statement: the claim.
        better: the case that should be better.
        worse: the case that should be worse.
        evidence: every measure of the pair.
        problems: how many problems the intervals rest on.
        verdict: `holds` if some interval lies above zero and none below, `does not hold` if some
            lies below and none above, `mixed` if both occur, `not resolved` if every interval
            contains zero. With fewer than `LEAST_PROBLEMS` problems a bootstrap interval says too
            little, and so does the verdict.
    """

    statement: str
    better: str
    worse: str
    evidence: tuple[Evidence, ...]
    problems: int
    verdict: str = field(init=False, default="")

    def __post_init__(self) -> None:
        said = {item.says for item in self.evidence}
        verdict = {
            (True, False): "holds",
            (False, True): "does not hold",
            (True, True): "mixed",
            (False, False): "not resolved",
        }[("for" in said, "against" in said)]
        if self.problems < LEAST_PROBLEMS:
            verdict = f"too few problems to say ({self.problems})"
        object.__setattr__(self, "verdict", verdict)


@dataclass(frozen=True)
class OutlierResult:
    """A case on random models with planted outlier channels.

    Attributes:
        name: of the case.
        outlier: factor of the planted channels.
        logits_ulps: worst error of a logit, in bf16 ulps of the largest logit of its row.
        caches_ulps: worst error of a cache that `fill` returns, in the same unit, by name.
    """

    name: str
    outlier: float
    logits_ulps: float
    caches_ulps: dict[str, float]


@dataclass(frozen=True)
class AccuracyReport:
    """A whole study."""

    baseline: str
    device: str
    toolkit_version: str
    workload: dict[str, object]
    cases: tuple[CaseResult, ...]
    claims: tuple[Claim, ...] = ()
    outliers: tuple[OutlierResult, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Numbers under stable names; `fp8` is the paper's case.

        `tiny.exact_match.CASE` at one token per step, `.steps8` appended for other step counts;
        `tiny.exact_match_gap_bound.CASE` is the upper end of the interval of baseline - case.
        """
        found: dict[str, float] = {}
        for case in self.cases:
            name = "fp8" if case.name == PAPERS_CASE else case.name
            most = max(case.exact_match, default=0)
            for steps, score in case.exact_match.items():
                suffix = "" if steps == most else f".steps{steps}"
                found[f"tiny.exact_match.{name}{suffix}"] = score.value
                if steps in case.gap:
                    bound = case.gap[steps].high
                    found[f"tiny.exact_match_gap_bound.{name}{suffix}"] = bound
            if case.divergence is not None:
                found[f"tiny.kl.{name}"] = case.divergence.value
            if case.agreement is not None:
                found[f"tiny.token_agreement.{name}"] = case.agreement.value
        for row in self.outliers:
            found[f"outlier{row.outlier:g}.logits_ulps.{row.name}"] = row.logits_ulps
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain types, the metrics included; levels without noise, infinite, become null."""
        plain: dict[str, Any] = _plain({**asdict(self), "metrics": self.metrics()})
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
