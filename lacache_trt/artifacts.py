"""The trust layer of bundle and engine directories: `manifest.json`, written last, checked first.

The manifest names every file with its size and SHA-256, and carries a digest of itself (over its
canonical JSON without that field). `load_manifest` checks all of it before any other file of the
directory is parsed or executed: an engine plan is code. The digests find damage, mix-ups and
careless edits; they are no signature, so load directories only from sources that you trust.

Files are listed by relative names with `/`; a directory holds exactly the listed files and the
manifest, no symbolic links, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import lacache_trt
from lacache_trt.contract import GraphSpec
from lacache_trt.contract_json import contract_from_json
from lacache_trt.errors import ArtifactError
from lacache_trt.file_records import FileRecord as FileRecord
from lacache_trt.file_records import (
    Snapshot,
    check_hashes,
    check_tree,
    read_file_records,
    record_files,
)
from lacache_trt.model.config import ModelConfig
from lacache_trt.model_section import read_model_section
from lacache_trt.progress import Progress, SilentProgress
from lacache_trt.publish import MANIFEST_NAME as MANIFEST_NAME
from lacache_trt.publish import publish_directory as publish_directory
from lacache_trt.strict_json import canonical_bytes, read_object

Kind = Literal["bundle", "engine"]
Hashes = Literal["full", "sizes"]
SCHEMA_VERSION = 1
MAX_MANIFEST_BYTES = 4 * 2**20
_HEADER = ("schema_version", "kind", "toolkit_version", "files", "manifest_sha256")
_REBUILD = {
    "bundle": "lacache-trt export MODEL {directory} --force",
    "engine": "lacache-trt build BUNDLE {directory} --force",
}


@dataclass(frozen=True)
class Manifest:
    """A checked manifest.

    Attributes:
        directory: where the artefact lies.
        kind: `bundle` or `engine`.
        toolkit_version: version of lacache-trt that wrote it.
        files: record of every file, by name relative to `directory`.
        model: the architecture.
        contract: the tensor contract by graph name; empty if the artefact records none.
        body: everything that the writer of the artefact recorded, `model` and `contract` included.
        snapshot: the files as they were checked.
    """

    directory: Path
    kind: Kind
    toolkit_version: str
    files: Mapping[str, FileRecord]
    model: ModelConfig
    contract: Mapping[str, GraphSpec]
    body: Mapping[str, object]
    snapshot: Snapshot

    def path(self, name: str) -> Path:
        """Path of a listed file."""
        if name not in self.files:
            raise ArtifactError(
                f"the {self.kind} has no file {name!r}",
                got=sorted(self.files),
                fix=rebuild_command(self.kind, self.directory),
            )
        return self.directory / name

    def total_bytes(self) -> int:
        """Bytes of all listed files."""
        return sum(record.size for record in self.files.values())


def rebuild_command(kind: Kind, directory: Path) -> str:
    """The command that writes the artefact again."""
    return _REBUILD[kind].format(directory=directory)


def write_manifest(directory: Path, kind: Kind, body: Mapping[str, object]) -> None:
    """Record every file of `directory` and `body` (JSON types; `model` is required).

    Call it last, inside `publish_directory`.
    """
    reserved = set(_HEADER) & set(body)
    if reserved or "model" not in body:
        raise ValueError(f"body needs 'model' and must not hold {sorted(reserved)}")
    content: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "toolkit_version": lacache_trt.__version__,
        **body,
        "files": record_files(directory),
    }
    # Digest what a reader will see: tuples are lists there, and all keys are text.
    content = json.loads(json.dumps(content, allow_nan=False))
    content["manifest_sha256"] = _self_digest(content)
    text = json.dumps(content, indent=1, allow_nan=False)
    (directory / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


def load_manifest(
    directory: Path,
    kind: Kind | None = None,
    *,
    hashes: Hashes = "full",
    progress: Progress | None = None,
) -> Manifest:
    """Check an artefact and return its manifest; nothing else of it is opened before.

    Args:
        directory: a bundle or an engine directory.
        kind: what it has to be; None accepts both.
        hashes: `full` reads every file (seconds per 10 GB); `sizes` compares sizes only and finds
            truncation and mix-ups but not a flipped bit, for restarts on files checked before.
        progress: told the bytes hashed.

    Raises:
        ArtifactError: says what differs and the command that writes the artefact again.
    """
    directory = Path(directory)
    found, content = _read_checked(directory, kind)
    try:
        files = read_file_records(content["files"])
        snapshot = Snapshot.take(directory, (MANIFEST_NAME, *files))
        check_tree(directory, files)
        if hashes == "full":
            check_hashes(directory, files, progress or SilentProgress())
        body = {key: value for key, value in content.items() if key not in _HEADER}
        contract = contract_from_json(body.get("contract", {}))
        model = read_model_section(body["model"])
    except ArtifactError as error:
        raise _with_fix(error, found, directory) from error
    writer = str(content["toolkit_version"])
    return Manifest(directory, found, writer, files, model, contract, body, snapshot)


def _read_checked(directory: Path, kind: Kind | None) -> tuple[Kind, dict[str, object]]:
    """Everything that can be said from the manifest alone, least specific first."""
    path = directory / MANIFEST_NAME
    if not os.path.lexists(path):
        raise _not_an_artifact(directory, kind)
    likely: Kind = kind or "engine"
    try:
        content = read_object(path, MAX_MANIFEST_BYTES)
        likely = "bundle" if content.get("kind") == "bundle" else likely
        version = content.get("schema_version")
        if type(version) is not int or version != SCHEMA_VERSION:
            raise _wrong_schema(version, content.get("toolkit_version"))
        missing = sorted({*_HEADER, "model"} - set(content))
        if missing:
            raise ArtifactError("manifest.json lacks required fields", got=f"missing {missing}")
        digest = content.pop("manifest_sha256")
        if digest != _self_digest(content):
            raise ArtifactError(
                "manifest.json was changed after it was written",
                got="its own digest does not match its content",
            )
    except ArtifactError as error:
        raise _with_fix(error, likely, directory) from error
    found = content["kind"]
    if found not in ("bundle", "engine"):
        unknown = ArtifactError(
            "manifest.json is of an unknown kind", got=repr(found), expected="bundle or engine"
        )
        raise _with_fix(unknown, likely, directory)
    if kind is not None and found != kind:
        raise _wrong_kind(directory, found, kind)
    return found, content


def _self_digest(content: Mapping[str, object]) -> str:
    unsigned = {key: value for key, value in content.items() if key != "manifest_sha256"}
    return hashlib.sha256(canonical_bytes(unsigned)).hexdigest()


def _with_fix(error: ArtifactError, kind: Kind, directory: Path) -> ArtifactError:
    """The same error, completed by what was expected and the command that writes it again."""
    command = f"write it again: {rebuild_command(kind, directory)}"
    what = f"{kind} {directory}: {error.what}"
    verb = {"bundle": "export", "engine": "build"}[kind]
    return ArtifactError(
        what,
        got="damaged or edited" if error.got is None else error.got,
        expected=error.expected or f"the {kind} exactly as lacache-trt {verb} wrote it",
        fix=command,
    )


def _wrong_schema(found: object, writer: object) -> ArtifactError:
    relation = "newer" if type(found) is int and found > SCHEMA_VERSION else "older or unknown"
    got = f"schema {found!r} ({relation}), written by lacache-trt {writer}"
    return ArtifactError(
        "manifest.json has another schema version than this toolkit reads",
        got=got,
        expected=f"schema {SCHEMA_VERSION}, lacache-trt {lacache_trt.__version__}",
    )


def _wrong_kind(directory: Path, found: Kind, wanted: Kind) -> ArtifactError:
    fix = (
        f"build an engine from it: lacache-trt build {directory} ENGINE"
        if wanted == "engine"
        else "name the bundle that the engine was built from"
    )
    return ArtifactError(f"{directory} is of the wrong kind", got=found, expected=wanted, fix=fix)


def _not_an_artifact(directory: Path, kind: Kind | None) -> ArtifactError:
    wanted = {"bundle": "a bundle", "engine": "an engine"}.get(str(kind), "a bundle or engine")
    if not os.path.isdir(directory):
        got = "a file" if os.path.exists(directory) else "nothing there"
        return ArtifactError(
            f"{directory} is not a directory",
            got=got,
            expected=f"{wanted} directory",
            fix="check the path; lacache-trt export and lacache-trt build write such directories",
        )
    if os.path.isfile(directory / "config.json"):
        return ArtifactError(
            f"{directory} is a checkpoint",
            expected=f"{wanted} directory",
            fix=f"export it first: lacache-trt export {directory} BUNDLE",
        )
    return ArtifactError(
        f"{directory} holds no {MANIFEST_NAME}",
        got="a folder that lacache-trt did not write, or a part of one",
        expected=f"{wanted} directory",
        fix="write it with `lacache-trt export` or `lacache-trt build`",
    )
