"""Generation settings from a file: JSON, or TOML by its suffix."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from lacache_trt.errors import ArtifactError, InvalidRequestError
from lacache_trt.generation import GenerationConfig
from lacache_trt.strict_json import MAX_BYTES, read_object


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
    try:
        return read_object(path.resolve())
    except ArtifactError as error:
        raise InvalidRequestError(error.what, got=error.got, expected="a JSON object") from error


def _read_toml(path: Path) -> dict[str, object]:
    try:
        import tomllib
    except ImportError as error:
        raise InvalidRequestError(
            "reading TOML needs Python 3.11", got=path, fix="write the settings as JSON"
        ) from error
    try:
        with path.open("rb") as file:
            return dict(tomllib.loads(file.read(MAX_BYTES).decode("utf-8")))
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{path.name} is not valid TOML", got=str(error)) from error
