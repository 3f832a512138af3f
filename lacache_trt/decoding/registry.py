"""The decoding policies by name: what `GenerationConfig.policy` and the command line accept.

Importing this file costs nothing: a policy's module (and NumPy) is loaded when it is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lacache_trt.decoding.policy import Policy
    from lacache_trt.generation import GenerationConfig


@dataclass(frozen=True)
class PolicySpec:
    """One entry of the registry.

    Attributes:
        summary: one line for the command line's help.
        reads: what it needs of a step beside the tokens.
        settings: the settings among `POLICY_SETTINGS` that this policy reads; a request that
            gives another one of them is refused instead of silently ignoring it.
        build: makes the policy for a validated configuration.
        draws_tokens: it draws tokens from logits itself, so the engine is asked for greedy ones.
    """

    summary: str
    reads: tuple[str, ...]
    settings: frozenset[str]
    build: Callable[[GenerationConfig], Policy]
    draws_tokens: bool = False


def _schedule(config: GenerationConfig) -> Policy:
    from lacache_trt.decoding.schedule import SchedulePolicy

    return SchedulePolicy(remasking=config.remasking)


def _threshold(config: GenerationConfig) -> Policy:
    from lacache_trt.decoding.threshold import ThresholdPolicy

    return ThresholdPolicy(threshold=config.setting("threshold"))


def _factor(config: GenerationConfig) -> Policy:
    from lacache_trt.decoding.threshold import FactorPolicy

    return FactorPolicy(factor=config.setting("factor"))


def _klass(config: GenerationConfig) -> Policy:
    from lacache_trt.decoding.klass import KlassPolicy

    return KlassPolicy(
        threshold=config.setting("threshold"),
        kl_threshold=config.setting("kl_threshold"),
        kl_history=config.setting("kl_history"),
    )


def _local_leap(config: GenerationConfig) -> Policy:
    from lacache_trt.decoding.local_leap import LocalLeapPolicy

    return LocalLeapPolicy(
        threshold=config.setting("threshold"),
        neighbour_threshold=config.setting("neighbour_threshold"),
        radius=config.setting("neighbour_radius"),
    )


def _prophet(config: GenerationConfig) -> Policy:
    from lacache_trt.decoding.prophet import ProphetPolicy

    return ProphetPolicy(answer_start=config.answer_start or 0, steps=config.steps)


def _origin(config: GenerationConfig) -> Policy:
    from lacache_trt.decoding.dream import OriginPolicy
    from lacache_trt.decoding.truncation import Truncation

    return OriginPolicy(Truncation.from_config(config), eps=config.setting("eps"))


def _ranked(config: GenerationConfig) -> Policy:
    from lacache_trt.decoding.dream import RankedPolicy
    from lacache_trt.decoding.truncation import Truncation

    return RankedPolicy(
        Truncation.from_config(config),
        score=config.policy,
        eps=config.setting("eps"),
        alg_temp=config.alg_temp,
    )


_COMPAT = frozenset({"confidence_dtype", "ties"})
_LLADA = _COMPAT | {"confidence_eos_eot_inf"}
_DREAM = frozenset({"top_p", "top_k", "eps", "ties"})
_LEAP = _LLADA | {"threshold", "neighbour_threshold", "neighbour_radius"}
_KLASS = _LLADA | {"threshold", "kl_threshold", "kl_history"}
_SURE, _DRAWN = ("confidence",), "logits when temperature, top_p or top_k cut"

POLICIES: dict[str, PolicySpec] = {
    "schedule": PolicySpec(
        "LLaDA: a fixed number of tokens per step", _SURE, _LLADA | {"remasking"}, _schedule
    ),
    "threshold": PolicySpec(
        "Fast-dLLM: all that are sure enough", _SURE, _LLADA | {"threshold"}, _threshold
    ),
    "factor": PolicySpec(
        "Fast-dLLM: the surer they are, the more", _SURE, _LLADA | {"factor"}, _factor
    ),
    "klass": PolicySpec(
        "KLASS: sure and settled", ("confidence", "logits of the block"), _KLASS, _klass
    ),
    "local_leap": PolicySpec("LocalLeap: less sure beside sure ones", _SURE, _LEAP, _local_leap),
    "prophet": PolicySpec(
        "Prophet: the schedule, until the answer is clear",
        ("confidence", "logits of five columns"),
        _LLADA | {"answer_start"},
        _prophet,
    ),
    "origin": PolicySpec(
        "Dream: each position independently at random", (_DRAWN,), _DREAM, _origin, True
    ),
    "maskgit_plus": PolicySpec(
        "Dream: most probable first", ("confidence", _DRAWN), _DREAM | {"alg_temp"}, _ranked, True
    ),
    "topk_margin": PolicySpec(
        "Dream: widest margin first", ("margin", _DRAWN), _DREAM | {"alg_temp"}, _ranked, True
    ),
    "entropy": PolicySpec(
        "Dream: lowest entropy first", ("neg_entropy", _DRAWN), _DREAM | {"alg_temp"}, _ranked, True
    ),
}
POLICY_SETTINGS: frozenset[str] = frozenset().union(*(spec.settings for spec in POLICIES.values()))


def build_policy(config: GenerationConfig, *, commit_first: bool = False) -> Policy:
    """The policy that `config.policy` names, inside the switches that hold for every policy.

    The name was checked when `config` was made. `commit_first`: a block's first step commits its
    first position alone.
    """
    policy = POLICIES[config.policy].build(config)
    if (config.confidence_dtype, config.ties, commit_first) == ("float32", "first", False):
        return policy
    from lacache_trt.decoding.wrappers import FirstFirst, LastOnTies, WithConfidence

    if config.confidence_dtype != "float32":
        policy = WithConfidence(policy, config.confidence_dtype)
    if config.ties == "last":
        policy = LastOnTies(policy)
    return FirstFirst(policy) if commit_first else policy
