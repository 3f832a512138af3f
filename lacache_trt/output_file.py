"""Files that a long measurement ends in, checked before it begins."""

from __future__ import annotations

import os
from pathlib import Path

from lacache_trt.errors import InvalidRequestError, OutputError

_EXPECTED = "a file in a folder that exists"


def check_output_file(path: Path, what: str) -> None:
    """Raise if a file cannot be written to `path`; `what` names it, as `the report`.

    Raises:
        OutputError: there is no folder for it, it is something else, or writing is not allowed.
    """
    folder = path.parent
    if not folder.is_dir():
        raise OutputError(
            f"{what} has no folder to be written to",
            got=path,
            expected=_EXPECTED,
            fix=f"create {folder} first",
        )
    if path.is_dir():
        raise OutputError(
            f"{what} is to be written to a folder",
            got=path,
            expected=_EXPECTED,
            fix=f"name a file in it, as {path / 'result'}{path.suffix or '.json'}",
        )
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise OutputError(
            f"no permission to write {what}",
            got=path,
            expected=_EXPECTED,
            fix="choose a folder that you can write to",
        )


def check_picture_file(path: Path) -> None:
    """Raise if no PNG can be written to `path`.

    Raises:
        OutputError: see `check_output_file`.
        InvalidRequestError: the name has another suffix.
    """
    if path.suffix.lower() != ".png":
        raise InvalidRequestError(
            "the picture is a PNG",
            got=path.name,
            expected="a name in .png",
            fix=f"name it {path.with_suffix('.png') if path.name else 'picture.png'}",
        )
    check_output_file(path, "the picture")
