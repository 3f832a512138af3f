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
        settings: the settings among `POLICY_SETTINGS` that this policy reads; a request that
            changes another one of them is refused instead of silently ignoring it.
        build: makes the policy for a validated configuration.
    """

    summary: str
    settings: frozenset[str]
    build: Callable[[GenerationConfig], Policy]


def _schedule(config: GenerationConfig) -> Policy:
    from lacache_trt.decoding.schedule import SchedulePolicy

    return SchedulePolicy(remasking=config.remasking)


def _origin(config: GenerationConfig) -> Policy:
    from lacache_trt.decoding.dream import OriginPolicy
    from lacache_trt.decoding.truncation import Truncation

    return OriginPolicy(Truncation.from_config(config), eps=config.eps)


def _ranked(config: GenerationConfig) -> Policy:
    from lacache_trt.decoding.dream import RankedPolicy
    from lacache_trt.decoding.truncation import Truncation

    return RankedPolicy(
        Truncation.from_config(config),
        score=config.policy,
        eps=config.eps,
        alg_temp=config.alg_temp,
    )


_LLADA = frozenset({"remasking", "confidence_eos_eot_inf"})
_DREAM = frozenset({"top_p", "top_k", "eps"})

POLICIES: dict[str, PolicySpec] = {
    "schedule": PolicySpec("LLaDA: a fixed number of tokens per step", _LLADA, _schedule),
    "origin": PolicySpec("Dream: each position independently at random", _DREAM, _origin),
    "maskgit_plus": PolicySpec("Dream: most probable first", _DREAM | {"alg_temp"}, _ranked),
    "topk_margin": PolicySpec("Dream: widest margin first", _DREAM | {"alg_temp"}, _ranked),
    "entropy": PolicySpec("Dream: lowest entropy first", _DREAM | {"alg_temp"}, _ranked),
}
POLICY_SETTINGS: frozenset[str] = frozenset().union(*(spec.settings for spec in POLICIES.values()))


def build_policy(config: GenerationConfig) -> Policy:
    """The policy that `config.policy` names; the name was checked when `config` was made."""
    return POLICIES[config.policy].build(config)
