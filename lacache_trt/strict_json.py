"""JSON from files that may be damaged or hostile: bounded, without surprises, with typed errors."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import NoReturn

from lacache_trt.errors import ArtifactError

MAX_BYTES = 4 * 2**20


def read_object(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, object]:
    """Read one JSON object from a regular file that is not a symbolic link.

    Raises:
        ArtifactError: missing, too large, not UTF-8, not JSON, duplicate keys, NaN, not an object.
    """
    text = _read_text(path, max_bytes)
    try:
        value: object = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path.name} is not valid JSON", got=f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ArtifactError(
            f"{path.name} is not a JSON object", got=type(value).__name__, expected="object"
        )
    return value


def canonical_bytes(value: dict[str, object]) -> bytes:
    """One spelling per value: sorted keys, no spaces, ASCII, no NaN."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode("ascii")


def _read_text(path: Path, max_bytes: int) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ArtifactError(
            f"{path.name} cannot be read", got=f"{path}: {error.strerror}"
        ) from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactError(f"{path.name} is not a regular file", got=path)
        if status.st_size > max_bytes:
            raise ArtifactError(
                f"{path.name} is too large",
                got=f"{status.st_size} bytes",
                expected=f"at most {max_bytes}",
            )
        data = file.read(max_bytes + 1)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path.name} is not UTF-8 text", got=f"{path}: {error}") from error


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate keys {sorted({n for n in names if names.count(n) > 1})[:5]}")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
