"""Which settings go together; every refusal says why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from lacache_trt.decoding.registry import POLICIES, POLICY_SETTINGS
from lacache_trt.errors import InvalidRequestError
from lacache_trt.setting_ranges import ANSWER_LENGTH, MAX_LENGTH

if TYPE_CHECKING:
    from lacache_trt.generation import GenerationConfig

WINDOW_CACHES = ("prefix", "dual")
WITHOUT_STEPS = ("threshold", "factor", "local_leap")

# A setting that only has a meaning where another one has one of these values.
_ONLY_WITH: dict[str, tuple[str, tuple[object, ...]]] = {
    "refresh_every": ("cache", WINDOW_CACHES),
    "suffix_window": ("suffix", ("dpad",)),
    "suffix_sigma": ("suffix", ("dpad",)),
    "suffix_scale": ("suffix", ("dpad",)),
    "suffix_seed": ("suffix", ("dpad",)),
    "stop_in_block": ("stop_at_eos", (True,)),
    "eos_truncation": ("stop_at_eos", (True,)),
    "no_empty_answer": ("logits_eos_inf", (False,)),
}


def check_combinations(config: GenerationConfig) -> None:
    """Raise `InvalidRequestError` for settings that exclude or ignore each other."""
    _check_blocks(config)
    _check_policy_settings(config)
    _check_conditions(config)
    for name, other, reason in _conflicts(config):
        raise InvalidRequestError(
            f"{name} does not go with {other}: {reason}",
            got=f"{name} and {other}",
            expected="one of the two",
            fix=f"leave out {name}, or {other}",
        )
    _check_answer_start(config)


def _conflicts(config: GenerationConfig) -> Iterator[tuple[str, str, str]]:
    """Pairs that make no sense together, and why."""
    cache, policy = f"cache={config.cache!r}", f"policy={config.policy!r}"
    if config.cache in WINDOW_CACHES:
        blind = "positions are committed whatever their confidence, so nothing holds back a "
        blind += "prediction that stale caches have made unsure"
        if config.policy == "origin":
            yield policy, cache, blind
        if config.remasking == "random":
            yield "remasking='random'", cache, blind
        if config.policy == "prophet":
            yield policy, cache, "a window step does not run the answer's columns"
    if config.policy == "prophet" and config.no_empty_answer:
        yield policy, "no_empty_answer", "an early end fills in whatever is predicted"
    if config.policy == "prophet" and config.suffix == "dpad":
        yield policy, "suffix='dpad'", "the answer's columns may be left out of the canvas"
    if config.eos_truncation is not None:
        if config.policy == "prophet":
            yield policy, "eos_truncation", "the answer's columns may be cut off"
        for name in ("logits_eos_inf", "confidence_eos_eot_inf"):
            if getattr(config, name):
                yield "eos_truncation", name, "no end token is ever confident then"


def _check_answer_start(config: GenerationConfig) -> None:
    if config.policy != "prophet":
        return
    start, last = config.answer_start, config.gen_length - ANSWER_LENGTH
    if start is None:
        raise InvalidRequestError(
            "policy='prophet' needs to know where the answer stands, or it never ends early",
            got="answer_start=None",
            expected=f"the answer's first column, whose {ANSWER_LENGTH} fit into gen_length",
            fix="set answer_start, or use policy='schedule'",
        )
    if start > last:
        longer = f"gen_length to at least {start + ANSWER_LENGTH}"
        raise InvalidRequestError(
            f"the {ANSWER_LENGTH} columns that prophet reads reach beyond the generated part",
            got=f"answer_start={start}, gen_length={config.gen_length}",
            expected=f"answer_start + {ANSWER_LENGTH} <= gen_length",
            fix=f"set answer_start to at most {last}, or {longer}"
            if last >= 0
            else f"set {longer}",
        )


def _check_conditions(config: GenerationConfig) -> None:
    defaults = {field.name: field.default for field in fields(config)}
    for name, (other, values) in _ONLY_WITH.items():
        changed = getattr(config, name) != defaults[name]
        if changed and getattr(config, other) not in values:
            meant = " or ".join(f"{other}={value!r}" for value in values)
            raise InvalidRequestError(
                f"{name} has no meaning with {other}={getattr(config, other)!r}",
                got=f"{name}={getattr(config, name)!r}",
                expected=f"{name} only with {meant}",
                fix=f"leave {name} out, or set {meant}",
            )
    if config.eos_guard and config.eos_truncation is None:
        raise InvalidRequestError(
            "eos_guard has no meaning without eos_truncation",
            got=f"eos_guard={config.eos_guard}",
            expected="eos_guard only with eos_truncation",
            fix="leave eos_guard out, or set eos_truncation",
        )


def _check_blocks(config: GenerationConfig) -> None:
    if config.gen_length % config.block_length:
        lengths = _near_multiples(config.gen_length, config.block_length)
        blocks = _near_divisors(config.gen_length, config.block_length)
        raise InvalidRequestError(
            "gen_length is not a multiple of block_length",
            got=f"gen_length={config.gen_length}, block_length={config.block_length}",
            expected="gen_length = block_length x number of blocks",
            fix=f"gen_length={lengths}, or block_length={blocks}",
        )
    if config.policy not in WITHOUT_STEPS and config.steps % config.num_blocks:
        raise InvalidRequestError(
            "steps is not a multiple of the number of blocks",
            got=f"steps={config.steps}, {config.num_blocks} blocks "
            f"(gen_length={config.gen_length} / block_length={config.block_length})",
            expected="the same number of steps in each block, at least one",
            fix=f"steps={_near_multiples(config.steps, config.num_blocks)}",
        )


def _check_policy_settings(config: GenerationConfig) -> None:
    foreign = POLICY_SETTINGS - POLICIES[config.policy].settings
    for field in fields(config):
        if field.name in foreign and getattr(config, field.name) != field.default:
            readers = [name for name, spec in POLICIES.items() if field.name in spec.settings]
            raise InvalidRequestError(
                f"{field.name} has no meaning with policy={config.policy!r}",
                got=f"{field.name}={getattr(config, field.name)!r}",
                expected=f"{field.name} only with policy " + ", ".join(readers),
                fix=f"leave {field.name} out, or choose one of these policies",
            )


def _near_multiples(value: int, base: int) -> str:
    below = value // base * base
    return " or ".join(str(near) for near in (below, below + base) if 0 < near <= MAX_LENGTH)


def _near_divisors(value: int, near: int) -> str:
    below = next(size for size in range(min(near, value), 0, -1) if value % size == 0)
    above = next((size for size in range(near, value + 1) if value % size == 0), None)
    return f"{below} or {above}" if above else str(below)
