"""Loads a part of the toolkit whose packages may not be installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lacache_trt.errors import MissingDependencyError


def load_part(module: str, extra: str) -> Any:
    """Import a module of the toolkit; a missing package becomes an error with the install line."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lacache_trt"):
            raise
        raise MissingDependencyError(
            f"this needs the {extra} packages",
            got=f"{error.name} is not installed",
            fix=f'pip install "lacache-trt[{extra}]"',
        ) from error
