"""Files that a long measurement ends in: checked before it begins, replaced only when complete."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lacache_trt.errors import InvalidRequestError, OutputError
from lacache_trt.publish import MANIFEST_NAME

_EXPECTED = "a file in a folder that exists"
_OWN_FIELD = b'"manifest_sha256"'
_MANIFEST_BYTES = 4 * 2**20


def check_output_file(path: Path, what: str) -> None:
    """Raise if a file cannot be written to `path`; `what` names it, as `the report`.

    Raises:
        OutputError: there is no folder for it, it is something else, it would make a bundle or an
            engine invalid, or writing is not allowed.
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
    artefact = _artefact_around(path)
    if artefact is not None:
        raise OutputError(
            f"{what} would be a foreign file in a bundle or an engine, which is then refused",
            got=f"{path} in {artefact}, which holds a {MANIFEST_NAME}",
            expected="a folder outside of bundles and engines",
            fix=f"write it beside, as {artefact.parent / path.name}",
        )
    if not _may_write(path):
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


@contextmanager
def replaced_file(path: Path, what: str) -> Iterator[Path]:
    """A file beside `path`, with its suffix, that takes its place when the block is through.

    Until then what stands at `path` stays. A pipe or a device, as /dev/stdout, is written directly.

    Raises:
        OutputError: it cannot be written, as the disk is full.
    """
    target = path.resolve()
    direct = target.exists() and not target.is_file()
    name = f".lacache-trt-{secrets.token_hex(4)}{path.suffix}"
    fresh = target if direct else target.with_name(name)
    try:
        yield fresh
        if not direct:
            _take_place(fresh, target)
    except OSError as error:
        raise _not_written(path, what, error) from error
    finally:
        if not direct:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)


def _take_place(fresh: Path, target: Path) -> None:
    """Rename, once the content is on the disk, so that a crash leaves one of the two files."""
    if target.exists():
        shutil.copymode(target, fresh)
    descriptor = os.open(fresh, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(fresh, target)


def _not_written(path: Path, what: str, error: OSError) -> OutputError:
    folder = path.resolve().parent
    room = ""
    with suppress(OSError):
        room = f"; {shutil.disk_usage(folder).free / 2**20:.0f} MiB free in {folder}"
    return OutputError(
        f"{what} could not be written",
        got=f"{path}: {error.strerror or error}{room}",
        expected="a folder that can be written to and has room",
        fix="free some space, or choose another folder",
    )


def _may_write(path: Path) -> bool:
    """A file is replaced, for which its folder counts too; a device is written to."""
    target = path.resolve()
    places = [target] if target.exists() else []
    if not places or target.is_file():
        places.append(target.parent)
    return all(os.access(place, os.W_OK) for place in places)


def _artefact_around(path: Path) -> Path | None:
    """The bundle or engine directory that `path` lies in, at any depth."""
    for folder in path.resolve().parents:
        with suppress(OSError), open(folder / MANIFEST_NAME, "rb") as manifest:
            # Other programs have files of this name; ours carries a digest of itself.
            if _OWN_FIELD in manifest.read(_MANIFEST_BYTES):
                return folder
    return None
