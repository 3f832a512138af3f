"""From what a user types to a checkpoint directory: a local path, or a model of the hub.

Nothing of a repository is ever executed: only JSON, safetensors and tokenizer text files are
downloaded, and `trust_remote_code` has no counterpart here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lacache_trt.errors import CheckpointError, InvalidRequestError, MissingDependencyError
from lacache_trt.model.families import family_of
from lacache_trt.model.json_file import read_json_object

DOWNLOAD_PATTERNS = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_REVISION = re.compile(r"[\w./-]{1,200}")


def resolve_model(model: str, revision: str | None = None) -> Path:
    """The local directory of a checkpoint, downloaded first if `model` is a hub id.

    Args:
        model: a directory, or `owner/name` on the hub if no such directory exists.
        revision: branch, tag or commit of a hub id.

    Returns:
        A directory. For a hub id it is the cache's snapshot, whose name is the commit that
        `Checkpoint.revision` reports: all files come from that one commit.

    Errors: `CheckpointError` (no such directory or repository), `UnsupportedModelError` (before
    the weights are downloaded), `InvalidRequestError`, `MissingDependencyError`.
    """
    local = Path(model).expanduser()
    if model and local.is_dir():
        if revision is not None:
            raise InvalidRequestError(
                "a revision is given for a local directory",
                got=f"{model} with revision {revision}",
                expected="a revision only with a hub id",
                fix="leave the revision out",
            )
        return local.resolve()
    if local.exists() or not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            "no such checkpoint",
            got=f"{model} ({'a file' if local.exists() else 'does not exist'})",
            expected="a checkpoint directory, or a hub id such as owner/name",
            fix="check the path",
        )
    if revision is not None and not _REVISION.fullmatch(revision):
        raise InvalidRequestError(
            "invalid revision", got=repr(revision[:80]), expected="a branch, tag or commit"
        )
    return _download(model, revision)


def _download(model: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise MissingDependencyError(
            "downloading from the hub needs huggingface-hub",
            got=str(error),
            expected="the package",
            fix="pip install 'lacache-trt[hub]', or download the checkpoint yourself",
        ) from error

    def snapshot(at: str | None, patterns: list[str]) -> Path:
        try:
            path: Any = snapshot_download(model, revision=at, allow_patterns=patterns)
        except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
            raise CheckpointError(
                f"cannot download {model}",
                got=f"{type(error).__name__}: {str(error)[:300]}",
                expected=f"a repository of the hub with revision {at or 'main'}",
                fix="check the name, the revision, the connection and (for gated models) the login",
            ) from error
        return Path(path)

    first = snapshot(revision, ["config.json"])
    family_of(read_json_object(first / "config.json", 2**20))
    return snapshot(first.name, DOWNLOAD_PATTERNS)
