"""Typed access to an untrusted config.json: every refusal names key, value and way out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lacache_trt.errors import CheckpointError, UnsupportedModelError
from lacache_trt.model.config import Dtype


@dataclass(frozen=True)
class Requirement:
    """A key that must have one of the values that the model definition implements.

    Attributes:
        key: name in config.json.
        allowed: values that are implemented.
        default: what the family's own configuration class assumes when the key is absent.
        needed: what running another value would take.
    """

    key: str
    allowed: tuple[object, ...]
    default: object
    needed: str


@dataclass(frozen=True)
class ConfigValues:
    """The keys of one config.json. `family` only words the messages."""

    raw: Mapping[str, Any]
    family: str

    def integer(
        self, key: str, *, maximum: int, minimum: int = 1, default: int | None = None
    ) -> int:
        """An integer in [minimum, maximum]; `default` replaces an absent or null value."""
        value = self._value(key, default)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not minimum <= value <= maximum:
            raise self._invalid(key, value, f"an integer from {minimum} to {maximum}")
        return int(value)

    def number(self, key: str, *, default: float | None = None) -> float:
        """A positive finite number; `default` replaces an absent or null value."""
        value = self._value(key, default)
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not numeric or not 0 < value <= sys.float_info.max:
            raise self._invalid(key, value, "a positive finite number")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """A boolean; `default` replaces an absent or null value."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._invalid(key, value, "true or false")
        return value

    def token_ids(self, key: str, *, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of ids in [0, vocab_size); empty if absent or null."""
        value = self.raw.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            whole = isinstance(token, int) and not isinstance(token, bool)
            if not whole or not 0 <= token < vocab_size:
                raise self._invalid(key, value, f"token ids from 0 to {vocab_size - 1}")
        return tuple(ids)

    def dtype(self) -> Dtype | None:
        """What `dtype` (or the older `torch_dtype`) says; None if neither says anything."""
        for key in ("dtype", "torch_dtype"):
            value = self.raw.get(key)
            if value is None:
                continue
            if value == "float32":
                return "float32"
            if value == "float16":
                return "float16"
            if value == "bfloat16":
                return "bfloat16"
            raise UnsupportedModelError(
                f"{self.family} checkpoint has an unsupported dtype",
                got=f"{key}={value!r}",
                expected="float32, float16 or bfloat16",
                fix="convert the checkpoint to one of these",
            )
        return None

    def require(self, requirements: tuple[Requirement, ...]) -> None:
        """`UnsupportedModelError` that names every key whose value is not implemented."""
        refused = [
            (rule, value)
            for rule in requirements
            if not _is_any_of(value := self.raw.get(rule.key, rule.default), rule.allowed)
        ]
        if refused:
            raise UnsupportedModelError(
                f"this {self.family} checkpoint computes something that is not implemented",
                got=", ".join(f"{rule.key}={value!r}" for rule, value in refused),
                expected=", ".join(
                    f"{rule.key}={' or '.join(repr(item) for item in rule.allowed)}"
                    for rule, _ in refused
                ),
                fix="; ".join(f"{rule.key} needs {rule.needed}" for rule, _ in refused),
            )

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(
                f"config.json of this {self.family} checkpoint lacks a key",
                got=f"no {key!r}",
                expected=f"{key!r} as the original checkpoints have it",
                fix="use the config.json that was published with the weights",
            )
        return default

    def _invalid(self, key: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(
            f"config.json of this {self.family} checkpoint has an invalid value",
            got=f"{key}={str(value)[:80]!r}",
            expected=expected,
            fix="use the config.json that was published with the weights",
        )


def _is_any_of(value: object, allowed: tuple[object, ...]) -> bool:
    """Equality that does not take True for 1 or 0 for False."""
    return any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed
    )
