"""JSON from files that may be damaged or hostile: bounded, without surprises, with typed errors."""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from lacache_trt.errors import ArtifactError, LaCacheError

MAX_BYTES = 64 * 2**20
Failure = type[LaCacheError]


def read_object(
    path: Path,
    max_bytes: int = MAX_BYTES,
    *,
    failure: Failure = ArtifactError,
    follow_link: bool = False,
) -> dict[str, Any]:
    """One JSON object of a regular file; `failure` is raised for everything that is wrong.

    That is: missing, a symbolic link unless `follow_link`, too large, not UTF-8, not JSON,
    repeated keys, NaN, Infinity or numbers beyond float64, not an object.
    """
    data = read_bounded(path, max_bytes, failure=failure, follow_link=follow_link)
    return parse_object(data, path.name, failure=failure)


def read_bounded(
    path: Path,
    max_bytes: int = MAX_BYTES,
    *,
    failure: Failure = ArtifactError,
    follow_link: bool = False,
    expected: str = "a JSON file",
    fix: str = "put the file back that belongs there",
) -> bytes:
    """Bytes of a regular file of at most `max_bytes`; the texts are for what is no such file."""
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_link else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise failure(
            f"cannot read {path.name}",
            got=f"{type(error).__name__}: {error.strerror or error}",
            expected=f"a readable file at {path}",
            fix="check the path and its permissions",
        ) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise failure(
            f"{path.name or path} is not a regular file",
            got=_kind(path, status.st_mode),
            expected=expected,
            fix=fix,
        )
    with os.fdopen(descriptor, "rb") as file:
        if status.st_size > max_bytes:
            raise failure(
                f"{path.name} is too large",
                got=f"{status.st_size} bytes",
                expected=f"at most {max_bytes} bytes",
                fix="check that the file is what its name says",
            )
        return file.read(max_bytes + 1)


def _kind(path: Path, mode: int) -> str:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe"}
    return f"{path}, {kinds.get(stat.S_IFMT(mode), 'a device or a socket')}"


def parse_object(data: bytes, name: str, *, failure: Failure = ArtifactError) -> dict[str, Any]:
    """The JSON object in `data`, which came from the file `name`."""
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise failure(
            f"{name} is not valid JSON",
            got=str(error)[:200],
            expected="one UTF-8 JSON object with unique keys",
            fix=f"write or download {name} again",
        ) from error
    if not isinstance(value, dict):
        raise failure(
            f"{name} is not a JSON object",
            got=type(value).__name__,
            expected="an object",
            fix=f"write or download {name} again",
        )
    return value


def canonical_bytes(value: dict[str, object]) -> bytes:
    """One spelling per value: sorted keys, no spaces, ASCII, no NaN."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode("ascii")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        repeated = min(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)
        raise ValueError(f"key {repeated[:80]!r} appears twice")
    return result


def _finite(text: str) -> float:
    """A number that float64 holds: 1e999 would silently become Infinity."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
