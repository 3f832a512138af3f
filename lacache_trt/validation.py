"""Checks of values that a caller passed: wrong types, absurd numbers, unknown names.

Each check returns the value as a plain Python object, or raises `InvalidRequestError`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral, Real

from lacache_trt.errors import InvalidRequestError

_LONGEST_NAME = 80


@dataclass(frozen=True)
class Interval:
    """An interval of numbers; an open end is not part of it."""

    low: float
    high: float
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below

    def __str__(self) -> str:
        lower = "more than" if self.low_open else "at least"
        upper = "less than" if self.high_open else "at most"
        return f"{lower} {self.low:g} and {upper} {self.high:.10g}"


def describe(value: object) -> str:
    """A value and its type, shortened, for the `got` of an error."""
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"an int of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # an int of more than 4300 digits inside of it, or a class of the caller's
        text = "a value that cannot be shown"
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def check_integer(name: str, value: object, interval: Interval) -> int:
    """An integer inside the interval; a bool or a float is not an integer."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequestError(
            f"{name} is not an integer",
            got=describe(value),
            expected=f"an int, {interval}",
            fix=f"pass {name} as an int",
        )
    if int(value) not in interval:
        raise _outside(name, value, "an int", interval)
    return int(value)


def check_number(name: str, value: object, interval: Interval) -> float:
    """A finite number inside the interval; a bool is not a number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequestError(
            f"{name} is not a number",
            got=describe(value),
            expected=f"a float, {interval}",
            fix=f"pass {name} as a float",
        )
    try:
        number = float(value)
    except OverflowError as error:
        raise _outside(name, value, "a finite float", interval) from error
    if not math.isfinite(number) or number not in interval:
        raise _outside(name, value, "a finite float", interval)
    return number


def check_flag(name: str, value: object) -> bool:
    """True or False, nothing that is merely truthy."""
    if not isinstance(value, bool):
        raise InvalidRequestError(
            f"{name} is not a bool",
            got=describe(value),
            expected="True or False",
            fix=f"pass {name}=True or {name}=False",
        )
    return value


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """One of the names."""
    names = tuple(choices)
    if not isinstance(value, str) or value not in names:
        raise InvalidRequestError(
            f"unknown {name}",
            got=describe(value),
            expected="one of " + ", ".join(names),
            fix=_did_you_mean(value, names) or f"choose one of the names for {name}",
        )
    return value


def _outside(name: str, value: object, kind: str, interval: Interval) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} is out of range",
        got=describe(value),
        expected=f"{kind}, {interval}",
        fix=f"set {name} to {interval}",
    )


def _did_you_mean(value: object, names: tuple[str, ...]) -> str | None:
    """The name that was meant, if what was typed looks like one."""
    if not isinstance(value, str) or len(value) > _LONGEST_NAME:
        return None
    close = get_close_matches(value.lower(), names, n=1, cutoff=0.7)
    return f"did you mean {close[0]!r}?" if close else None
