"""Generation settings: defaults, what is refused and what the refusal says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lacache_trt import GenerationConfig, LaCacheError, setting_ranges
from lacache_trt.decoding.registry import POLICIES, POLICY_SETTINGS
from lacache_trt.errors import InvalidRequestError
from lacache_trt.generation import MAX_LENGTH

HUGE = 10**5000
INTEGERS = (*setting_ranges.INTEGERS, "seed")
NUMBERS = tuple(setting_ranges.NUMBERS)
FLAGS = setting_ranges.FLAGS
NAMES = ("remasking", "policy", "cache", "suffix", "confidence_dtype", "ties")
NOT_INTEGERS: list[Any] = [True, 1.0, 32.5, "32", b"1", float("nan"), [1.0], {}, np.float32(1), 1j]
NOT_NUMBERS: list[Any] = [True, "0.5", [0.5], (1,), {}, 1j, object(), np.array([0.5])]
ABSURD: dict[str, list[Any]] = {
    "gen_length": [0, -1, -HUGE, MAX_LENGTH + 1, 2**63, HUGE],
    "block_length": [0, -32, MAX_LENGTH + 1, HUGE],
    "steps": [0, -1, MAX_LENGTH + 1, HUGE],
    "top_k": [0, -1, 2**31, HUGE],
    "seed": [-1, 2**31 - 1, HUGE, (), (0, -1), (1, True), [2**31]],
    "temperature": [-1e-9, 100.5, float("nan"), float("inf"), -float("inf"), HUGE],
    "cfg_scale": [-1, 101, float("nan"), float("inf")],
    "top_p": [0, -0.1, 1.0001, float("nan")],
    "alg_temp": [-0.1, 1e9, float("nan")],
    "eps": [0, 1, -1, 2.0, float("nan")],
    "deadline_s": [0, -1, 1e9, float("inf"), float("nan")],
    "threshold": [-0.1, 2.5, float("nan")],
    "factor": [-1, 1e9],
    "kl_history": [0, -1, 65, HUGE],
    "answer_start": [-1, HUGE],
    "refresh_every": [0, -1, HUGE],
    "suffix_window": [0, HUGE],
    "suffix_sigma": [-1, float("inf")],
    "eos_truncation": [0, 1.5, float("nan")],
}


def kind(value: object) -> str:
    """A short test id; the values themselves may have thousands of digits."""
    return value if isinstance(value, str) and value in ABSURD else type(value).__name__


def refusal(**changes: Any) -> InvalidRequestError:
    """The error that a setting is refused with; it must name everything a user needs."""
    with pytest.raises(InvalidRequestError) as caught:
        GenerationConfig(**changes)
    error = caught.value
    assert all((error.what, error.got is not None, error.expected, error.fix))
    assert len(str(error)) < 600
    return error


def test_defaults_are_the_documented_ones() -> None:
    config = GenerationConfig()
    assert (config.gen_length, config.block_length, config.steps) == (128, 32, 128)
    assert (config.num_blocks, config.steps_per_block) == (4, 32)
    assert (config.policy, config.cache, config.remasking) == (
        "schedule",
        "exact",
        "low_confidence",
    )
    assert config.temperature == config.cfg_scale == config.seed == 0
    for field in fields(config):
        assert f"{field.name}:" in (GenerationConfig.__doc__ or ""), field.name


def test_it_is_frozen_and_checked_again_when_replaced() -> None:
    config = GenerationConfig()
    with pytest.raises(FrozenInstanceError):
        config.steps = 3  # type: ignore[misc]
    assert replace(config, steps=64).steps_per_block == 16
    with pytest.raises(InvalidRequestError):
        replace(config, steps=63)
    assert isinstance(refusal(steps=0), (ValueError, LaCacheError))


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", NOT_INTEGERS, ids=kind)
def test_wrong_types_for_integers(name: str, value: Any) -> None:
    assert name in refusal(**{name: value}).what


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", NOT_NUMBERS, ids=kind)
def test_wrong_types_for_numbers(name: str, value: Any) -> None:
    assert name in refusal(**{name: value}).what


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", None, 1.0], ids=repr)
def test_wrong_types_for_flags(name: str, value: Any) -> None:
    assert name in refusal(**{name: value}).what


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "value", ["", "nonsense", "Exact", None, 3, ["exact"], "x" * 10**6], ids=kind
)
def test_unknown_names_list_the_choices(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert name in error.what
    default = next(field.default for field in fields(GenerationConfig) if field.name == name)
    assert str(default) in str(error.expected)


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("policy", "treshold", "threshold"),
        ("policy", "local-leap", "local_leap"),
        ("cache", "Exact", "exact"),
        ("cache", "nonsense", None),
    ],
)
def test_a_name_that_looks_like_one_is_suggested(name: str, value: str, meant: str | None) -> None:
    fix = str(refusal(**{name: value}).fix)
    assert fix == f"did you mean {meant!r}?" if meant else "did you mean" not in fix


def test_the_fix_of_a_number_is_its_range() -> None:
    fix = str(refusal(temperature=-1.0).fix)
    assert fix.startswith("set temperature to at least 0 and ")


def test_the_policies_choices_are_the_registry() -> None:
    assert all(name in str(refusal(policy="topk").expected) for name in POLICIES)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ABSURD for value in ABSURD[name]],
    ids=kind,
)
def test_absurd_numbers(name: str, value: Any) -> None:
    refusal(**{"policy": "entropy", name: value})


@pytest.mark.parametrize("name", ["gen_length", "block_length", "steps", "temperature", "seed"])
def test_none_is_not_a_default(name: str) -> None:
    refusal(**{name: None})


def test_integers_and_numbers_become_plain() -> None:
    config = GenerationConfig(
        gen_length=np.int64(64),  # type: ignore[arg-type]
        temperature=1,
        cfg_scale=np.float32(0.5),  # type: ignore[arg-type]
        seed=[np.int32(3), 4],  # type: ignore[arg-type]
    )
    assert type(config.gen_length) is int
    assert type(config.temperature) is type(config.cfg_scale) is float
    assert config.seed == (3, 4)
    assert hash(config) == hash(replace(config))


@given(st.integers(1, 400), st.integers(1, 400))
def test_lengths_that_do_not_divide_name_lengths_that_do(length: int, block: int) -> None:
    if length % block == 0:
        assert GenerationConfig(length, block, length // block).num_blocks == length // block
        return
    fix = str(refusal(gen_length=length, block_length=block).fix)
    lengths, blocks = fix.split(", or ")
    for near in lengths.removeprefix("gen_length=").split(" or "):
        assert int(near) % block == 0
        assert abs(int(near) - length) < block
    for near in blocks.removeprefix("block_length=").split(" or "):
        assert length % int(near) == 0


@given(st.integers(1, 60), st.integers(1, 600))
def test_steps_that_do_not_divide_name_steps_that_do(blocks: int, steps: int) -> None:
    if steps % blocks == 0:
        config = GenerationConfig(blocks * 2, 2, steps)
        assert config.steps_per_block * blocks == steps
        return
    error = refusal(gen_length=blocks * 2, block_length=2, steps=steps)
    assert f"{blocks} blocks" in str(error.got)
    for near in str(error.fix).removeprefix("steps=").split(" or "):
        assert GenerationConfig(blocks * 2, 2, int(near)).steps_per_block >= 1


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("name", sorted(POLICY_SETTINGS))
def test_settings_that_a_policy_ignores_are_refused(policy: str, name: str) -> None:
    changed: dict[str, Any] = {
        "remasking": "random",
        "confidence_eos_eot_inf": True,
        "top_p": 0.9,
        "top_k": 4,
        "alg_temp": 0.1,
        "eps": 0.01,
        "threshold": 0.5,
        "factor": 2.0,
        "kl_threshold": 0.1,
        "kl_history": 3,
        "neighbour_threshold": 0.5,
        "neighbour_radius": 2,
        "answer_start": 8,
        "confidence_dtype": "float64",
        "ties": "last",
    }
    if name in POLICIES[policy].settings:
        needed = {"answer_start": 0} if policy == "prophet" else {}
        GenerationConfig(policy=policy, **{**needed, name: changed[name]})
    else:
        error = refusal(policy=policy, **{name: changed[name]})
        assert name in error.what
        assert policy in error.what


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_default_that_is_given_is_refused_where_it_is_ignored(policy: str) -> None:
    """`threshold=0.9` without a policy that reads it must not pass silently."""
    needed = {"answer_start": 0} if policy == "prophet" else {}
    unset = {
        item.name: item.metadata["default"] for item in fields(GenerationConfig) if item.metadata
    }
    assert {"threshold": 0.9, "factor": 1.0, "kl_history": 2, "eps": 1e-3}.items() <= unset.items()
    for name, value in unset.items():
        assert getattr(GenerationConfig(policy=policy, **needed), name) is None
        if name in POLICIES[policy].settings:
            given = GenerationConfig(policy=policy, **{**needed, name: value})
            assert given.setting(name) == GenerationConfig(policy=policy, **needed).setting(name)
        else:
            assert f"{name} has no meaning" in refusal(policy=policy, **{name: value}).what


def test_a_policy_can_be_replaced_when_its_settings_were_not_given() -> None:
    config = replace(GenerationConfig(policy="threshold"), policy="factor")
    assert (config.setting("threshold"), config.setting("factor")) == (0.9, 1.0)
    assert GenerationConfig(**json.loads(json.dumps(asdict(config)))) == config


def test_seeds_per_row() -> None:
    assert GenerationConfig(seed=5).row_seeds(3) == (5, 5, 5)
    assert GenerationConfig(seed=(5, 6)).row_seeds(2) == (5, 6)
    with pytest.raises(InvalidRequestError, match="seeds"):
        GenerationConfig(seed=(5, 6)).row_seeds(3)


def test_importing_the_settings_is_light() -> None:
    code = (
        "import sys; from lacache_trt import GenerationConfig; GenerationConfig();"
        "heavy = {'numpy', 'torch', 'onnx', 'onnxruntime'} & set(sys.modules); print(*heavy)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


@pytest.mark.parametrize("name", ["temperature", "top_p", "deadline_s"])
def test_fractions_that_float64_cannot_hold(name: str) -> None:
    refusal(**{"policy": "entropy", name: Fraction(10**400, 3)})


@pytest.mark.parametrize("policy", ["threshold", "factor", "local_leap"])
def test_policies_that_ignore_steps_take_any(policy: Any) -> None:
    assert GenerationConfig(gen_length=96, policy=policy).num_blocks == 3
    with pytest.raises(InvalidRequestError, match="steps is not a multiple"):
        GenerationConfig(gen_length=96)


@pytest.mark.parametrize("name", ["gen_length", "threshold", "policy", "stop_at_eos"])
def test_values_that_python_cannot_print(name: str) -> None:
    refusal(**{name: [HUGE]})
