"""The grid of `bench policies`: its settings, its cases, its report. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from lacache_trt.errors import InvalidRequestError
from lacache_trt.generation import GenerationConfig
from lacache_trt.validation import Interval, check_integer, check_number

# The canvas that tiny-llada was trained for. Answers end at their end token, in every case alike:
# nothing is decoded behind it, and nothing behind it is counted.
BASE = GenerationConfig(gen_length=64, block_length=32, steps=64, stop_in_block=True)
STRENGTHS: dict[str, tuple[dict[str, Any], ...]] = {
    "schedule": tuple({"steps": steps} for steps in (64, 32, 16, 8)),
    "threshold": tuple({"threshold": value} for value in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)),
    "factor": tuple({"factor": value} for value in (0.3, 0.5, 1.0, 2.0)),
    "klass": (
        {"threshold": 0.9, "kl_threshold": 0.01},
        {"threshold": 0.6, "kl_threshold": 0.015},
        {"threshold": 0.6, "kl_threshold": 0.1},
    ),
    "local_leap": (
        {"threshold": 0.9, "neighbour_threshold": 0.75},
        {"threshold": 0.8, "neighbour_threshold": 0.6},
        {"threshold": 0.7, "neighbour_threshold": 0.5},
    ),
    "entropy": tuple({"steps": steps} for steps in (32, 16)),
    "maskgit_plus": tuple({"steps": steps} for steps in (32, 16)),
    "topk_margin": tuple({"steps": steps} for steps in (32, 16)),
}
# One block stands behind tiny-llada's first, so DPad's window is a block long. The model was
# trained on whole canvases of 64: much thinner samples than this one cost it all of its answers.
DPAD = {"suffix": "dpad", "suffix_window": 32, "suffix_sigma": 2.0, "suffix_scale": 2.5}


@dataclass(frozen=True)
class GridSettings:
    """What to try, and on how many problems.

    Attributes:
        problems: problems of the tune split for each setting; the choice is made on them.
        held_out: held-out problems for the baseline and the chosen setting.
        policies: policies to try, for example `schedule,threshold`.
        caches: caches to try.
        suffixes: suffixes to try, `full` and `dpad`.
        batch: problems decoded together.
        gap_points: most percentage points that a chosen setting may lose on the tune split.
        resamples: draws of the paired bootstrap.
    """

    problems: int = 64
    held_out: int = 256
    policies: str = "schedule,threshold,factor,klass,local_leap"
    caches: str = "exact,prefix,dual"
    suffixes: str = "full,dpad"
    batch: int = 16
    gap_points: float = 1.0
    resamples: int = 2000

    def __post_init__(self) -> None:
        check_integer("problems", self.problems, Interval(2, 1_000_000))
        check_integer("held_out", self.held_out, Interval(2, 1_000_000))
        check_integer("batch", self.batch, Interval(1, 4096))
        check_integer("resamples", self.resamples, Interval(100, 100_000))
        check_number("gap_points", self.gap_points, Interval(0, 100))
        for name, known in (
            ("policies", tuple(STRENGTHS)),
            ("caches", ("none", "exact", "prefix", "dual")),
            ("suffixes", ("full", "dpad")),
        ):
            unknown = sorted(set(self.names(name)) - set(known))
            if unknown or not self.names(name):
                raise InvalidRequestError(
                    f"{name} names something that the grid does not have",
                    got=", ".join(unknown) or "nothing",
                    expected="some of " + ", ".join(known),
                    fix=f"leave out {', '.join(unknown)}" if unknown else f"--{name} {known[0]}",
                )

    def names(self, field: str) -> tuple[str, ...]:
        """The entries of a comma-separated field."""
        return tuple(part.strip() for part in getattr(self, field).split(",") if part.strip())


@dataclass(frozen=True)
class Case:
    """One setting of the grid on one engine."""

    engine: str
    config: GenerationConfig

    @property
    def changes(self) -> dict[str, Any]:
        """What differs from the baseline."""
        used = {field.name: self.config.setting(field.name) for field in fields(self.config)}
        return {name: value for name, value in used.items() if value != BASE.setting(name)}

    @property
    def name(self) -> str:
        """Short and unique within a grid."""
        config = self.config
        names = sorted({name for strength in STRENGTHS[config.policy] for name in strength})
        strength = ", ".join(f"{name} {config.setting(name):g}" for name in names)
        suffix = "" if config.suffix == "full" else " + dpad"
        return f"{config.policy} ({strength}) | {config.cache}{suffix} | {self.engine}"


def cases(engine: str, settings: GridSettings) -> Iterator[Case]:
    """The grid of one engine; its first case is LLaDA's full schedule with exact caches."""
    yield Case(engine, BASE)
    for suffix in settings.names("suffixes"):
        dropped: dict[str, Any] = DPAD if suffix == "dpad" else {}
        for cache in settings.names("caches"):
            for policy in settings.names("policies"):
                for strength in STRENGTHS[policy]:
                    chosen = {"policy": policy, "cache": cache, **strength, **dropped}
                    config = replace(BASE, **chosen)
                    if config != BASE:
                        yield Case(engine, config)


@dataclass(frozen=True)
class CaseResult:
    """What one case gave on the tune split.

    Attributes:
        name: policy, strength, cache, suffix and engine.
        settings: what differs from the baseline.
        engine: name of the engine directory.
        accuracy: share of right final numbers.
        forwards: model steps per answer, up to its end token.
        tokens_per_forward: tokens before the end token, per forward.
        ms_per_answer: wall-clock milliseconds per answer at this batch size.
        on_frontier: no other case has both fewer forwards and at least this accuracy.
    """

    name: str
    settings: dict[str, Any]
    engine: str
    accuracy: float
    forwards: float
    tokens_per_forward: float
    ms_per_answer: float
    on_frontier: bool = False


@dataclass(frozen=True)
class HeldOut:
    """The chosen case against the baseline, on the same held-out problems.

    Attributes:
        baseline: its name.
        chosen: the name of the case that the tune split chose.
        problems: held-out problems.
        baseline_accuracy: share of right answers of the baseline.
        chosen_accuracy: share of right answers of the chosen case.
        gap_points: baseline minus chosen, in percentage points.
        gap_low: lower end of its 95% interval, paired bootstrap over problems.
        gap_high: upper end.
        baseline_forwards: model steps per answer.
        chosen_forwards: the same of the chosen case.
        forwards_ratio: the first divided by the second.
    """

    baseline: str
    chosen: str
    problems: int
    baseline_accuracy: float
    chosen_accuracy: float
    gap_points: float
    gap_low: float
    gap_high: float
    baseline_forwards: float
    chosen_forwards: float
    forwards_ratio: float


@dataclass(frozen=True)
class GridReport:
    """What was tried, on what."""

    device: str
    toolkit_version: str
    machine: dict[str, object]
    workload: dict[str, object]
    cases: tuple[CaseResult, ...]
    held_out: HeldOut
    skipped: tuple[str, ...]


def mark_frontier(results: list[CaseResult]) -> list[CaseResult]:
    """The results by forwards, with those marked that no other one beats on both counts."""
    ordered = sorted(results, key=lambda one: (one.forwards, -one.accuracy))
    marked, best = [], -1.0
    for one in ordered:
        marked.append(replace(one, on_frontier=one.accuracy > best))
        best = max(best, one.accuracy)
    return marked


def choose(results: list[CaseResult], baseline: CaseResult, gap_points: float) -> CaseResult:
    """The case with the fewest forwards that loses at most this many points on the tune split."""
    enough = [one for one in results if one.accuracy >= baseline.accuracy - gap_points / 100]
    return min(enough, key=lambda one: (one.forwards, -one.accuracy))
