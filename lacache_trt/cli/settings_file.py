"""Generation settings from a file: JSON, or TOML by its suffix."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from lacache_trt.errors import InvalidRequestError
from lacache_trt.generation import GenerationConfig
from lacache_trt.strict_json import read_bounded, read_object


def read_generation_settings(path: Path) -> dict[str, object]:
    """The settings by the names of `GenerationConfig`; `InvalidRequestError` for anything else."""
    values = _read_toml(path) if path.suffix == ".toml" else _read_json(path)
    known = [field.name for field in fields(GenerationConfig)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise InvalidRequestError(
            f"{path} holds unknown settings",
            got=", ".join(unknown),
            expected=", ".join(known),
            fix="correct or remove them",
        )
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def _read_json(path: Path) -> dict[str, object]:
    return read_object(path, failure=InvalidRequestError, follow_link=True)


def _read_toml(path: Path) -> dict[str, object]:
    try:
        import tomllib
    except ImportError as error:
        raise InvalidRequestError(
            "reading TOML needs Python 3.11", got=path, fix="write the settings as JSON"
        ) from error
    data = read_bounded(path, failure=InvalidRequestError, follow_link=True)
    try:
        return dict(tomllib.loads(data.decode("utf-8")))
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path.name} is not valid TOML", got=str(error)) from error
