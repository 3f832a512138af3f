"""The files of an artefact: names that stay inside it, sizes, SHA-256."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lacache_trt.errors import ArtifactError
from lacache_trt.progress import Progress, SilentProgress
from lacache_trt.publish import MANIFEST_NAME

CHUNK_BYTES = 8 * 2**20
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 (lower-case hexadecimal) of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Snapshot:
    """Which files of a directory were checked, for who opens one of them later.

    Attributes:
        directory: absolute, so that a change of the working directory does not matter.
        identities: device, inode, size and time of the last change of each file.
    """

    directory: Path
    identities: Mapping[str, tuple[int, ...]]

    @classmethod
    def take(cls, directory: Path, names: Iterable[str]) -> Snapshot:
        """Take it before the files are read, so that a change meanwhile counts too."""
        absolute = directory.absolute()
        return cls(absolute, {name: _identity(absolute / name) for name in names})

    def require_unchanged(self) -> None:
        """Raise `ArtifactError` if a file is gone or another one by now."""
        for name, identity in self.identities.items():
            if _identity(self.directory / name) != identity:
                raise ArtifactError(
                    "the directory was changed or replaced since it was loaded",
                    got=f"another {name}, or none, in {self.directory}",
                    expected="the files that were checked",
                    fix="load it again",
                )


def _identity(path: Path) -> tuple[int, ...]:
    try:
        found = os.lstat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def record_files(directory: Path) -> dict[str, object]:
    """The manifest's `files` section: every file below `directory` except the manifest."""
    return {
        name: {"size": path.stat().st_size, "sha256": file_sha256(path)}
        for name, path in sorted(_walk(directory))
        if name != MANIFEST_NAME
    }


def read_file_records(data: object) -> dict[str, FileRecord]:
    """Read the manifest's `files` section; refuses unsafe names and malformed records."""
    if not isinstance(data, dict) or not data:
        raise ArtifactError("manifest.json lists no files", got=type(data).__name__)
    return {_checked_name(name): _file_record(name, item) for name, item in data.items()}


def _file_record(name: str, data: object) -> FileRecord:
    size = data.get("size") if isinstance(data, dict) and len(data) == 2 else None
    digest = data.get("sha256") if isinstance(data, dict) else None
    if type(size) is not int or size < 0 or not isinstance(digest, str):
        raise ArtifactError(f"manifest.json has an invalid record of {name!r}", got=data)
    if _HEX_DIGEST.fullmatch(digest) is None:
        raise ArtifactError(f"manifest.json has an invalid digest of {name!r}", got=digest)
    return FileRecord(size, digest)


def _checked_name(name: str) -> str:
    """A plain relative name: no way out of the directory on any system."""
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") for part in parts)
    if not plain or not name.isprintable() or any(char in name for char in '\\:*?"<>|'):
        raise ArtifactError(
            "manifest.json lists a file outside the directory or with an unsafe name",
            got=repr(name),
            expected="a relative name without '..', backslash or colon",
        )
    if name == MANIFEST_NAME:
        raise ArtifactError("manifest.json lists itself", got=repr(name))
    return name


def _walk(directory: Path, prefix: str = "") -> Iterator[tuple[str, Path]]:
    """Every file below `directory` by relative name; refuses whatever is not a plain file."""
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        name = prefix + entry.name
        if entry.is_symlink():
            raise ArtifactError(f"{name} is a symbolic link", got=os.readlink(entry.path))
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), name + "/")
        elif entry.is_file(follow_symlinks=False):
            yield name, Path(entry.path)
        else:
            raise ArtifactError(f"{name} is not a regular file", got=entry.path)


def check_tree(directory: Path, files: Mapping[str, FileRecord]) -> None:
    """Refuse missing, unknown, linked and wrongly sized files, without reading any."""
    try:
        present = dict(_walk(directory))
    except OSError as error:
        raise ArtifactError("the directory cannot be read", got=str(error)) from error
    present.pop(MANIFEST_NAME, None)
    missing, unknown = sorted(set(files) - set(present)), sorted(set(present) - set(files))
    if missing or unknown:
        raise ArtifactError(
            "the directory does not hold the files of its manifest",
            got="; ".join(
                f"{what} {', '.join(names)}"
                for what, names in (("missing", missing), ("unknown", unknown))
                if names
            ),
        )
    for name, record in files.items():
        size = os.lstat(directory / name).st_size
        if size != record.size:
            raise ArtifactError(
                f"{name} has the wrong size", got=f"{size} bytes", expected=f"{record.size} bytes"
            )


def check_hashes(directory: Path, files: Mapping[str, FileRecord], progress: Progress) -> None:
    """Read every file and compare its digest."""
    progress.start("checking files", sum(record.size for record in files.values()))
    for name, record in files.items():
        digest = file_sha256(directory / name, progress)
        if digest != record.sha256:
            raise ArtifactError(
                f"{name} was changed after it was written",
                got=f"SHA-256 {digest}",
                expected=f"SHA-256 {record.sha256}",
            )


def file_sha256(path: Path, progress: Progress | None = None) -> str:
    """Streaming SHA-256 of a regular file; `progress` is told the bytes read."""
    progress = progress or SilentProgress()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ArtifactError(f"{path.name} is not a regular file", got=path)
            digest = hashlib.sha256()
            buffer = memoryview(bytearray(CHUNK_BYTES))
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                progress.advance(count)
            return digest.hexdigest()
    except OSError as error:
        raise ArtifactError(f"{path.name} cannot be read", got=str(error)) from error
