"""Which values each setting of `GenerationConfig` may have."""

from __future__ import annotations

from collections.abc import Mapping

from lacache_trt.errors import InvalidRequestError
from lacache_trt.validation import Interval, check_flag, check_integer, check_number, describe

MAX_LENGTH = 131_072
"""Largest gen_length, block_length and steps: the longest context that any Dream config states."""
ANSWER_LENGTH = 5
"""Columns that Prophet reads from `answer_start` on."""

# The noise is a hash modulo the prime 2**31 - 1, so seeds beyond it would repeat smaller ones.
SEEDS = Interval(0, 2**31 - 2)

INTEGERS = {
    "gen_length": Interval(1, MAX_LENGTH),
    "block_length": Interval(1, MAX_LENGTH),
    "steps": Interval(1, MAX_LENGTH),
    "top_k": Interval(1, 2**31 - 1),
    "kl_history": Interval(1, 64),
    "neighbour_radius": Interval(0, MAX_LENGTH),
    "answer_start": Interval(0, MAX_LENGTH),
    "refresh_every": Interval(1, MAX_LENGTH),
    "suffix_window": Interval(1, MAX_LENGTH),
    "suffix_seed": SEEDS,
    "eos_guard": Interval(0, MAX_LENGTH),
}
NUMBERS = {
    "temperature": Interval(0, 100),
    "cfg_scale": Interval(0, 100),
    "top_p": Interval(0, 1, low_open=True),
    "alg_temp": Interval(0, 100),
    "eps": Interval(0, 1, low_open=True, high_open=True),
    "threshold": Interval(0, 2),
    "factor": Interval(0, 1000),
    "kl_threshold": Interval(0, 100),
    "neighbour_threshold": Interval(0, 2),
    "suffix_sigma": Interval(0, 100),
    "suffix_scale": Interval(0, 1e6),
    "eos_truncation": Interval(0, 1, low_open=True),
    "deadline_s": Interval(0, 7 * 24 * 3600, low_open=True),
}
OPTIONAL = frozenset(
    {"top_p", "top_k", "alg_temp", "answer_start", "refresh_every", "eos_truncation", "deadline_s"}
    | {"eps", "threshold", "factor", "kl_threshold", "kl_history"}
    | {"neighbour_threshold", "neighbour_radius"}
)
FLAGS = (
    "stop_at_eos",
    "stop_in_block",
    "no_empty_answer",
    "commit_first",
    "logits_eos_inf",
    "confidence_eos_eot_inf",
)


def plain_values(settings: Mapping[str, object]) -> dict[str, object]:
    """The numbers, flags and seeds of a configuration, checked, as plain Python objects."""
    checked: dict[str, object] = {}
    for name, interval in INTEGERS.items():
        if not (name in OPTIONAL and settings[name] is None):
            checked[name] = check_integer(name, settings[name], interval)
    for name, interval in NUMBERS.items():
        if not (name in OPTIONAL and settings[name] is None):
            checked[name] = check_number(name, settings[name], interval)
    for name in FLAGS:
        checked[name] = check_flag(name, settings[name])
    checked["seed"] = _checked_seed(settings["seed"])
    return checked


def _checked_seed(seed: object) -> int | tuple[int, ...]:
    if not isinstance(seed, (tuple, list)):
        return check_integer("seed", seed, SEEDS)
    if not seed:
        raise InvalidRequestError(
            "seed is empty",
            got=describe(seed),
            expected="one seed, or one per prompt",
            fix="pass seed as an int",
        )
    return tuple(check_integer(f"seed[{row}]", value, SEEDS) for row, value in enumerate(seed))
