"""Settings that exclude or ignore each other: refused, and the refusal says why."""

from __future__ import annotations

from typing import Any

import pytest

from lacache_trt import GenerationConfig
from lacache_trt.combinations import WINDOW_CACHES
from lacache_trt.errors import InvalidRequestError

PROPHET: dict[str, Any] = {"policy": "prophet", "answer_start": 3}
NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"policy": "origin", "cache": "dual"}, "stale caches"),
    ({"policy": "origin", "cache": "prefix"}, "stale caches"),
    ({"remasking": "random", "cache": "dual"}, "stale caches"),
    ({**PROPHET, "cache": "prefix"}, "does not run the answer's columns"),
    ({**PROPHET, "cache": "dual"}, "does not run the answer's columns"),
    ({**PROPHET, "suffix": "dpad"}, "left out of the canvas"),
    ({**PROPHET, "eos_truncation": 0.9}, "cut off"),
    ({**PROPHET, "no_empty_answer": True}, "fills in"),
    ({"policy": "prophet"}, "never ends early"),
    ({"policy": "prophet", "answer_start": 128}, "reach beyond the generated part"),
    ({"policy": "prophet", "answer_start": 124}, "reach beyond the generated part"),
    (
        {"policy": "prophet", "answer_start": 0, "gen_length": 4, "block_length": 4, "steps": 4},
        "reach beyond the generated part",
    ),
    ({"eos_truncation": 0.9, "logits_eos_inf": True}, "no end token is ever confident"),
    ({"eos_truncation": 0.9, "confidence_eos_eot_inf": True}, "no end token is ever confident"),
    ({"eos_truncation": 0.9, "stop_at_eos": False}, "no meaning with stop_at_eos=False"),
    ({"stop_in_block": True, "stop_at_eos": False}, "no meaning with stop_at_eos=False"),
    ({"eos_guard": 5}, "without eos_truncation"),
    ({"no_empty_answer": True, "logits_eos_inf": True}, "no meaning with logits_eos_inf=True"),
    ({"refresh_every": 4}, "no meaning with cache='exact'"),
    ({"refresh_every": 4, "cache": "none"}, "no meaning with cache='none'"),
    ({"suffix_window": 8}, "no meaning with suffix='full'"),
    ({"suffix_sigma": 1.0}, "no meaning with suffix='full'"),
    ({"suffix_scale": 1.0}, "no meaning with suffix='full'"),
    ({"suffix_seed": 1}, "no meaning with suffix='full'"),
    ({"threshold": 0.5}, "no meaning with policy='schedule'"),
    ({"threshold": 0.9}, "no meaning with policy='schedule'"),
    ({"factor": 1.0}, "no meaning with policy='schedule'"),
    ({"policy": "factor", "threshold": 0.5}, "no meaning with policy='factor'"),
    ({"policy": "entropy", "confidence_dtype": "float64"}, "no meaning with policy='entropy'"),
]


@pytest.mark.parametrize(("changes", "reason"), NONSENSE, ids=lambda value: str(value))
def test_nonsense_is_refused_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        GenerationConfig(**changes)
    error = caught.value
    assert reason in error.what
    assert all((error.got, error.expected, error.fix))


@pytest.mark.parametrize("cache", WINDOW_CACHES)
@pytest.mark.parametrize(
    "changes",
    [
        {"cfg_scale": 1.0},
        {"policy": "threshold", "refresh_every": 2},
        {"policy": "klass", "suffix": "dpad", "eos_truncation": 0.9, "stop_in_block": True},
        {"policy": "entropy", "temperature": 0.2, "commit_first": True},
        {"policy": "factor", "no_empty_answer": True},
        {"policy": "local_leap", "confidence_dtype": "bfloat16", "ties": "last"},
    ],
    ids=str,
)
def test_what_composes_is_accepted(cache: Any, changes: dict[str, Any]) -> None:
    assert GenerationConfig(cache=cache, **changes).has_window


def test_the_answer_may_end_with_the_canvas() -> None:
    assert GenerationConfig(policy="prophet", answer_start=123).answer_start == 123
    with pytest.raises(InvalidRequestError) as caught:
        GenerationConfig(64, 32, 64, policy="prophet", answer_start=62)
    assert caught.value.fix == "set answer_start to at most 59, or gen_length to at least 67"
