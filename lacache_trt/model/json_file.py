"""Reading the small JSON files of a checkpoint without trusting them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from lacache_trt.errors import CheckpointError

MAX_JSON_BYTES = 64 * 2**20


def read_bounded(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Bytes of a regular file of at most `max_bytes`; `CheckpointError` otherwise."""
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            raise CheckpointError(f"{path.name} is not a regular file", got=str(path))
        if info.st_size > max_bytes:
            raise CheckpointError(
                f"{path.name} is too large",
                got=f"{info.st_size} bytes",
                expected=f"at most {max_bytes} bytes",
                fix="check that the file is what its name says",
            )
        with open(path, "rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path.name}",
            got=f"{type(error).__name__}: {error.strerror or error}",
            expected=f"a readable file at {path}",
            fix="check the path and its permissions, or download the checkpoint again",
        ) from error


def parse_json_object(data: bytes, name: str) -> dict[str, Any]:
    """A JSON object without repeated keys; `CheckpointError` for anything else."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{name} is not valid JSON",
            got=str(error)[:200],
            expected="one UTF-8 JSON object with unique keys",
            fix="download the file again",
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{name} does not hold a JSON object", got=type(value).__name__, expected="an object"
        )
    return value


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """`parse_json_object` of a file of at most `max_bytes`."""
    return parse_json_object(read_bounded(path, max_bytes), path.name)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} appears twice")
            seen.add(key)
    return result
