"""Optimisation profiles: the range of every symbolic size, and where TensorRT tunes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lacache_trt.contract import GraphSpec
from lacache_trt.errors import ArtifactError, CapacityError, InvalidRequestError

SYMBOLS = ("B", "N", "Bk", "W", "S", "E", "R")
_SYNTAX = "B=1:1:4,N=64:512:2048,Bk=8:32:64 (each SIZE or MIN:OPT:MAX)"


@dataclass(frozen=True)
class Range:
    """Smallest, tuned and largest value of a size."""

    low: int
    tuned: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.tuned <= self.high < 2**31:
            raise InvalidRequestError(
                "a profile's sizes are not in order", got=str(self), expected="MIN <= OPT <= MAX"
            )

    def __str__(self) -> str:
        return f"{self.low}:{self.tuned}:{self.high}"


@dataclass(frozen=True)
class Profile:
    """The ranges of one optimisation profile, by symbol of the tensor contract."""

    ranges: Mapping[str, Range]

    def shapes(self, graph: GraphSpec) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Smallest, tuned and largest shape of every input of a graph."""
        return {
            tensor.name: tuple(
                tuple(getattr(self._range(dim), end) for dim in tensor.shape)
                for end in ("low", "tuned", "high")
            )
            for tensor in graph.inputs
        }

    def to_json(self) -> dict[str, list[int]]:
        """For the manifest."""
        return {name: [size.low, size.tuned, size.high] for name, size in self.ranges.items()}

    def covers(self, symbol: str, value: int) -> bool:
        """Whether the size lies in the range."""
        return self.ranges[symbol].low <= value <= self.ranges[symbol].high

    def clipped(self, symbol: str, value: int) -> int:
        """The nearest size in the range."""
        return min(max(value, self.ranges[symbol].low), self.ranges[symbol].high)

    def text(self, *symbols: str) -> str:
        """Ranges for an error."""
        return ", ".join(
            f"{symbol}={self.ranges[symbol].low} to {self.ranges[symbol].high}"
            for symbol in symbols
        )

    def _range(self, dim: int | str) -> Range:
        return self.ranges[dim] if isinstance(dim, str) else Range(dim, dim, dim)


def default_ranges(max_length: int) -> dict[str, Range]:
    """What a profile covers unless it says otherwise.

    Up to 4 rows, all lengths that the model was made for, blocks of up to 128, windows of any
    width (only the plan of `window` has one); the id lists and
    the extra logit columns may be short, since the runtime pads them.
    """
    return {
        "B": Range(1, 1, 4),
        "N": Range(1, min(1024, max_length), max_length),
        "Bk": Range(1, min(32, max_length), min(128, max_length)),
        "W": Range(1, min(32, max_length), max_length),
        "S": Range(1, 1, 16),
        "E": Range(1, 1, 16),
        "R": Range(0, 0, min(128, max_length)),
    }


def parse_profiles(texts: Sequence[str], max_length: int) -> tuple[Profile, ...]:
    """Profiles from `--profile` texts; one default profile if there are none.

    Raises:
        InvalidRequestError: a text is malformed.
        CapacityError: a length is beyond what the model was made for.
    """
    profiles = tuple(_parse(text, max_length) for text in texts) or (
        Profile(default_ranges(max_length)),
    )
    for profile in profiles:
        if profile.ranges["N"].high > max_length:
            raise CapacityError(
                "a profile is longer than what the model was made for",
                got=f"N={profile.ranges['N']}",
                expected=f"at most {max_length}",
                fix=f"end the range of N at {max_length} or below",
            )
    return profiles


def profiles_from_json(data: object) -> tuple[Profile, ...]:
    """The profiles of a manifest.

    Raises:
        ArtifactError: they are malformed.
    """
    profiles = []
    for entry in data if isinstance(data, list) else []:
        if not isinstance(entry, dict) or set(entry) != set(SYMBOLS):
            raise ArtifactError("a profile of the manifest is malformed", got=entry)
        if not all(_is_range(sizes) for sizes in entry.values()):
            raise ArtifactError("a profile of the manifest is malformed", got=entry)
        profiles.append(Profile({name: Range(*sizes) for name, sizes in entry.items()}))
    if not profiles:
        raise ArtifactError("the manifest has no optimisation profiles", got=data)
    return tuple(profiles)


def _is_range(sizes: object) -> bool:
    return (
        isinstance(sizes, list)
        and len(sizes) == 3
        and all(type(size) is int for size in sizes)
        and 0 <= sizes[0] <= sizes[1] <= sizes[2] < 2**31
    )


def _parse(text: str, max_length: int) -> Profile:
    ranges, seen = default_ranges(max_length), set[str]()
    for item in text.split(","):
        found = re.fullmatch(r"\s*(\w+)\s*=\s*(\d{1,9})(?::(\d{1,9}):(\d{1,9}))?\s*", item)
        if found is None or found[1] not in SYMBOLS:
            raise InvalidRequestError(
                "the profile is not readable", got=repr(item), expected=_SYNTAX
            )
        low = int(found[2])
        if low < 1 and found[1] != "R":
            raise InvalidRequestError(
                "a profile's size is too small",
                got=item.strip(),
                expected="sizes of at least 1; R, the logit columns, may be 0",
                fix=f"write {found[1]}=1:OPT:MAX or one size",
            )
        if found[1] in seen:
            raise InvalidRequestError(
                f"a profile has {found[1]} twice",
                got=repr(text),
                expected=_SYNTAX,
                fix="repeat --profile for another profile",
            )
        seen.add(found[1])
        ranges[found[1]] = Range(low, int(found[3] or low), int(found[4] or low))
    return Profile(ranges)
