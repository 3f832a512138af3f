"""From a path or a hub id to a directory; the hub is simulated, nothing is downloaded."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path

import pytest
from synthetic import make_llada

from lacache_trt.errors import (
    CheckpointError,
    InvalidRequestError,
    MissingDependencyError,
    UnsupportedModelError,
)
from lacache_trt.model.checkpoint import Checkpoint, resolve_model

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def llada(tmp_path: Path) -> Path:
    return make_llada(tmp_path / "llada", layers=2)


def test_resolve_local(llada: Path, tmp_path: Path) -> None:
    assert resolve_model(str(llada)) == llada.resolve()
    with pytest.raises(InvalidRequestError, match="revision"):
        resolve_model(str(llada), "main")
    for wrong in (str(tmp_path / "absent"), "./absent", "a/b/c", "justname", "../x/y", ""):
        with pytest.raises(CheckpointError, match="no such checkpoint"):
            resolve_model(wrong)
    with pytest.raises(CheckpointError, match="a file"):
        resolve_model(str(llada / "config.json"))


class FakeHub:
    """Stands for huggingface_hub: copies a directory into a cache, as far as patterns allow."""

    def __init__(self, source: Path, cache: Path) -> None:
        self.source, self.cache = source, cache
        self.calls: list[tuple[str | None, list[str]]] = []

    def snapshot_download(
        self, repo: str, *, revision: str | None, allow_patterns: list[str]
    ) -> str:
        self.calls.append((revision, allow_patterns))
        if repo == "owner/broken":
            raise OSError("no connection")
        snapshot = self.cache / "snapshots" / SHA
        snapshot.mkdir(parents=True, exist_ok=True)
        for path in self.source.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copy(path, snapshot / path.name)
        return str(snapshot)


@pytest.fixture
def hub(llada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(llada, tmp_path / "cache")
    module = types.ModuleType("huggingface_hub")
    errors = types.ModuleType("huggingface_hub.errors")
    vars(module)["snapshot_download"] = fake.snapshot_download
    vars(errors)["HfHubHTTPError"] = type("HfHubHTTPError", (OSError,), {})
    vars(errors)["HFValidationError"] = type("HFValidationError", (ValueError,), {})
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    return fake


def test_hub_download_is_pinned_and_takes_no_code(hub: FakeHub) -> None:
    (hub.source / "modeling_llada.py").write_text("raise SystemExit")
    (hub.source / "pytorch_model.bin").write_bytes(b"")
    checkpoint = Checkpoint.open(resolve_model("owner/name", "main"))
    assert checkpoint.revision == SHA
    assert [revision for revision, _ in hub.calls] == ["main", SHA]
    names = {path.name for path in checkpoint.directory.iterdir()}
    assert names == {"config.json", "model.safetensors"}


def test_hub_refuses_the_family_before_downloading_weights(hub: FakeHub) -> None:
    (hub.source / "config.json").write_text('{"model_type": "llada2_moe"}')
    with pytest.raises(UnsupportedModelError, match=r"LLaDA2\.x"):
        resolve_model("owner/name")
    assert len(hub.calls) == 1


@pytest.mark.usefixtures("hub")
def test_hub_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="cannot download owner/broken"):
        resolve_model("owner/broken")
    with pytest.raises(InvalidRequestError, match="revision"):
        resolve_model("owner/name", "x; rm")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError, match=r"lacache-trt\[hub\]"):
        resolve_model("owner/name")
