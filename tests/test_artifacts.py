"""The manifest: whatever was changed in a directory after it was written is refused."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_bundle import FILES, MODEL, write_bundle

from lacache_trt.artifacts import load_manifest, publish_directory, write_manifest
from lacache_trt.contract import graph_specs
from lacache_trt.contract_json import contract_from_json, contract_to_json
from lacache_trt.errors import ArtifactError
from lacache_trt.strict_json import parse_object


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifacts") / "bundle"
    write_bundle(out)
    return out


@pytest.fixture
def bundle(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "bundle")


def edit_manifest(directory: Path, change: Callable[[dict[str, Any]], None], sign: bool) -> None:
    """Change the manifest; with `sign` its own digest is made right again."""
    from lacache_trt.artifacts import _self_digest

    path = directory / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    if sign:
        content["manifest_sha256"] = _self_digest(content)
    path.write_text(json.dumps(content))


def refused(directory: Path, *words: str, kind: Any = "bundle") -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        load_manifest(directory, kind)
    message = str(caught.value)
    for word in words:
        assert word in message
    assert caught.value.exit_code == 3
    return caught.value


# What a good bundle says


def test_round_trip(pristine: Path) -> None:
    manifest = load_manifest(pristine, "bundle")
    assert manifest.model == MODEL
    assert manifest.contract == graph_specs(MODEL, "float32")
    assert set(manifest.files) == {*FILES, "text/tokenizer.json"}
    assert manifest.path("fill.onnx").read_bytes() == FILES["fill.onnx"]
    assert manifest.total_bytes() == 12002
    assert manifest.body["versions"] == {"onnx": "1.23.2"}
    assert load_manifest(pristine).kind == "bundle"
    with pytest.raises(ArtifactError, match="no file 'other'"):
        manifest.path("other")


def test_progress_counts_every_byte(pristine: Path) -> None:
    class Counter:
        total = done = 0

        def start(self, stage: str, total: int | None = None) -> None:
            self.total = total or 0

        def advance(self, amount: int = 1) -> None:
            self.done += amount

    counter = Counter()
    load_manifest(pristine, "bundle", progress=counter)
    assert counter.done == counter.total == 12002


def test_tuples_and_number_keys_in_the_body_survive(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", extra={10: (1, 2), 9: 0.1})
    body = load_manifest(tmp_path / "b").body
    assert body["extra"] == {"10": [1, 2], "9": 0.1}


def test_reserved_and_missing_body_keys(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model"):
        write_manifest(tmp_path, "bundle", {})
    with pytest.raises(ValueError, match="files"):
        write_manifest(tmp_path, "bundle", {"model": MODEL.to_json(), "files": {}})


# Corruption


@pytest.mark.parametrize("name", [*FILES, "text/tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("seed", range(3))
def test_flipped_bit(bundle: Path, name: str, seed: int) -> None:
    data = bytearray((bundle / name).read_bytes())
    data[random.Random(seed).randrange(len(data))] ^= 1 << random.Random(seed + 7).randrange(7)
    (bundle / name).write_bytes(data)
    refused(bundle, "lacache-trt ")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(1, 255))
def test_any_changed_byte_of_the_manifest(bundle: Path, place: float, value: int) -> None:
    path = bundle / "manifest.json"
    original = path.read_bytes()
    data = bytearray(original)
    data[int(place * len(data))] ^= value
    path.write_bytes(data)
    try:
        if _parses_to_the_same(data, original):
            load_manifest(bundle)
        else:
            refused(bundle, kind=None)
    finally:
        path.write_bytes(original)


def _parses_to_the_same(data: bytes, original: bytes) -> bool:
    try:
        return bool(json.loads(data) == json.loads(original))
    except ValueError:
        return False


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("kept", [0, 1, 1000])
def test_truncated(bundle: Path, name: str, kept: int) -> None:
    os.truncate(bundle / name, min(kept, (bundle / name).stat().st_size - 1))
    refused(bundle, name)


def test_swapped_files(bundle: Path) -> None:
    (bundle / "fill.onnx").rename(bundle / "x")
    (bundle / "reuse.onnx").rename(bundle / "fill.onnx")
    (bundle / "x").rename(bundle / "reuse.onnx")
    refused(bundle, "fill.onnx has the wrong size", "4000 bytes", "3000 bytes")


def test_swapped_files_of_one_size(tmp_path: Path) -> None:
    with publish_directory(tmp_path / "b") as directory:
        (directory / "a").write_bytes(b"1" * 10)
        (directory / "b").write_bytes(b"2" * 10)
        write_manifest(directory, "bundle", {"model": MODEL.to_json()})
    (tmp_path / "b" / "a").write_bytes(b"2" * 10)
    refused(tmp_path / "b", "a was changed", "SHA-256")
    load_manifest(tmp_path / "b", hashes="sizes")


def test_extra_file(bundle: Path) -> None:
    (bundle / "plugin.so").write_bytes(b"")
    refused(bundle, "unknown plugin.so", "export MODEL", "--force")


def test_missing_file(bundle: Path) -> None:
    (bundle / "reuse.onnx").unlink()
    refused(bundle, "missing reuse.onnx")


@pytest.mark.parametrize("target", ["outside", "inside", "folder", "manifest"])
def test_symbolic_links(bundle: Path, tmp_path: Path, target: str) -> None:
    if target == "folder":
        shutil.move(bundle / "text", tmp_path / "text")
        (bundle / "text").symlink_to(tmp_path / "text")
        refused(bundle, "text is a symbolic link")
        return
    name = "manifest.json" if target == "manifest" else "fill.onnx"
    copy = (bundle if target == "inside" else tmp_path) / "copy"
    (bundle / name).rename(copy)
    (bundle / name).symlink_to(copy)
    refused(bundle, name)


def test_special_files(bundle: Path) -> None:
    (bundle / "fill.onnx").unlink()
    os.mkfifo(bundle / "fill.onnx")
    refused(bundle, "fill.onnx is not a regular file")
    (bundle / "manifest.json").unlink()
    os.mkfifo(bundle / "manifest.json")
    refused(bundle, "manifest.json is not a regular file")


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", "a/../../secret", "a\\b", "C:x", "./a", "a//b", "", "a\n", "a\0"],
)
def test_names_that_leave_the_directory(bundle: Path, name: str) -> None:
    (bundle.parent / "secret").write_bytes(FILES["fill.onnx"])

    def change(content: dict[str, Any]) -> None:
        content["files"][name] = content["files"].pop("fill.onnx")

    edit_manifest(bundle, change, sign=True)
    refused(bundle, "outside the directory or with an unsafe name", repr(name))


# Tampering with the manifest, with and without making its digest right again


def _set(section: str, key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content[section][key] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("model", "mask_id", 98),
        _set("model", "num_layers", 3),
        _set("contract", "fill", {"inputs": [], "outputs": []}),
        _set("versions", "onnx", "1.23.3"),
        _set("files", "fill.onnx", {"size": 1, "sha256": "0" * 64}),
        lambda content: content.update(kind="engine"),
        lambda content: content.update(toolkit_version="9"),
        lambda content: content.update(new=1),
        lambda content: content.pop("versions"),
        lambda content: content.update(manifest_sha256="0" * 64),
        lambda content: content.update(manifest_sha256=None),
    ],
)
def test_edited_manifest(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    edit_manifest(bundle, change, sign=False)
    refused(bundle, "manifest.json was changed", kind=None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("model", "mask_id", 100), "mask_id = 100"),
        (_set("model", "mask_id", True), "mask_id = True"),
        (_set("model", "num_layers", 0), "num_layers = 0"),
        (_set("model", "num_layers", 2.0), "num_layers = 2.0"),
        (_set("model", "hidden_size", 10**30), "hidden_size"),
        (_set("model", "num_heads", 3), "contradicts itself"),
        (_set("model", "rope_theta", -1), "rope_theta"),
        (_set("model", "qkv_bias", "yes"), "qkv_bias"),
        (_set("model", "eos_ids", [1, -1]), "eos_ids"),
        (_set("model", "dtype", "float8"), "dtype"),
        (_set("model", "family", None), "family"),
        (_set("model", "unknown", 1), "unknown"),
        (lambda content: content["model"].pop("mask_id"), "mask_id"),
        (lambda content: content.update(model=[]), "not an object"),
        (lambda content: content.update(files=[]), "lists no files"),
        (lambda content: content.update(files={}), "lists no files"),
        (_set("files", "fill.onnx", {"size": -1, "sha256": "0" * 64}), "fill.onnx"),
        (_set("files", "fill.onnx", {"size": 3000, "sha256": "0" * 63}), "fill.onnx"),
        (_set("files", "manifest.json", {"size": 1, "sha256": "0" * 64}), "lists itself"),
        (lambda content: content.update(kind="other"), "unknown kind"),
        (lambda content: content.pop("model"), "lacks required fields"),
        (_set("contract", "fill", {}), "wrong fields"),
        (lambda content: content.update(contract=[]), "not an object"),
    ],
)
def test_implausible_manifest_with_a_right_digest(
    bundle: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    edit_manifest(bundle, change, sign=True)
    refused(bundle, words)


@pytest.mark.parametrize("version", [2, 0, "1", None, True, 1.0])
def test_other_schema_versions(bundle: Path, version: object) -> None:
    edit_manifest(bundle, lambda content: content.update(schema_version=version), sign=True)
    error = refused(bundle, "another schema version", "lacache-trt export MODEL")
    assert ("newer" in str(error)) == (version == 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"a": 1, "a": 2}', "appears twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"schema_version": 1, "a": [-1e999]}', "too large for a number"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"schema_version": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b" " * (4 * 2**20 + 1), "too large"),
    ],
)
def test_hostile_json(bundle: Path, text: bytes, words: str) -> None:
    (bundle / "manifest.json").write_bytes(text)
    refused(bundle, words)


def test_wrong_kind_says_what_to_do(bundle: Path, tmp_path: Path) -> None:
    refused(bundle, "got:      bundle", "expected: engine", "lacache-trt build", kind="engine")
    refused(tmp_path / "nothing", "nothing there")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "a file")
    (tmp_path / "checkpoint").mkdir()
    refused(tmp_path / "checkpoint", "holds no manifest.json")
    (tmp_path / "checkpoint" / "config.json").touch()
    refused(tmp_path / "checkpoint", "is a checkpoint", "lacache-trt export")


def test_contract_shapes_are_strict() -> None:
    good = contract_to_json(graph_specs(MODEL, "bfloat16"))
    assert contract_from_json(json.loads(json.dumps(good))) == graph_specs(MODEL, "bfloat16")
    for shape in (["B", 0], ["B", -1], ["B", True], ["", 1], "B", [None]):
        tensor = {"name": "x", "shape": shape, "dtype": "int32"}
        with pytest.raises(ArtifactError, match="invalid shape"):
            contract_from_json({"fill": {"inputs": [tensor], "outputs": []}})


def test_an_unknown_kind_says_how_to_write_it_again(bundle: Path) -> None:
    edit_manifest(bundle, lambda manifest: manifest.update(kind="plan"), sign=True)
    assert "lacache-trt export" in str(refused(bundle, "unknown kind").fix)


def test_many_repeated_keys_are_refused_at_once() -> None:
    text = "{" + ",".join(f'"{number % 100_000}":0' for number in range(200_000)) + "}"
    with pytest.raises(ArtifactError, match="'0' appears twice"):
        parse_object(text.encode(), "header")


def test_the_mask_is_no_end_token(bundle: Path) -> None:
    edit_manifest(bundle, lambda manifest: manifest["model"].update(eos_ids=[1, 99]), sign=True)
    refused(bundle, "id 99 both as the mask and as an end token")
