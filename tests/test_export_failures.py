"""Exports that fail, are refused, or produce another dtype; what validation finds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from built import Built
from numpy.typing import NDArray
from test_export import load_graph

from lacache_trt.artifacts import load_manifest
from lacache_trt.contract import BASE_GRAPHS
from lacache_trt.engines.builder import build_engine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.errors import (
    CapacityError,
    CheckpointError,
    InvalidRequestError,
    OutputError,
    VerificationError,
)
from lacache_trt.export import exporter, validate
from lacache_trt.export.exporter import export_bundle
from lacache_trt.export.options import ExportOptions
from lacache_trt.export.validate import validate_bundle
from lacache_trt.generation import GenerationConfig
from lacache_trt.progress import SilentProgress
from lacache_trt.runtime import Runtime


@pytest.fixture
def instant(models: Any, monkeypatch: pytest.MonkeyPatch) -> Built:
    """Exports of this model take their graphs from the finished bundle instead of tracing."""
    built: Built = models("llada")

    def recalled(_config: Any, name: str, *_: Any) -> ir.Model:
        return ir.load(built.bundle / f"{name}.onnx")

    monkeypatch.setattr(exporter, "capture_graph", recalled)
    return built


def test_nothing_is_overwritten_unless_asked(instant: Built, scratch: Path) -> None:
    out = scratch / "bundle"
    off = ExportOptions(validate="off")
    assert export_bundle(str(instant.checkpoint), out, off).out == out
    before = (out / "manifest.json").read_bytes()
    with pytest.raises(OutputError, match="not empty"):
        export_bundle(str(instant.checkpoint), out, off)
    assert (out / "manifest.json").read_bytes() == before
    replaced = ExportOptions(validate="off", overwrite=True, max_length=64)
    export_bundle(str(instant.checkpoint), out, replaced)
    manifest = load_manifest(out, "bundle")
    assert manifest.model.max_length == 64
    assert manifest.body["validation"] == {"mode": "off"}
    assert [path.name for path in scratch.iterdir()] == ["bundle"]


def test_a_length_beyond_the_models_is_refused(instant: Built, scratch: Path) -> None:
    with pytest.raises(CapacityError, match="longer than what the model was made for"):
        export_bundle(str(instant.checkpoint), scratch / "out", ExportOptions(max_length=5000))
    assert not any(scratch.iterdir())
    with pytest.raises(InvalidRequestError, match="--max-seq-len"):
        ExportOptions(max_length=0)


def test_a_broken_checkpoint_leaves_nothing(instant: Built, scratch: Path) -> None:
    checkpoint = scratch / "checkpoint"
    shutil.copytree(instant.checkpoint, checkpoint)
    weights = checkpoint / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match="not finite"):
        export_bundle(str(checkpoint), scratch / "out")
    assert [path.name for path in scratch.iterdir()] == ["checkpoint"]


def misplace(model: onnx.ModelProto, name: str) -> None:
    """Let an initializer read the bytes before its own."""
    tensor = next(t for t in model.graph.initializer if t.name == name)
    for entry in tensor.external_data:
        if entry.key == "offset":
            entry.value = str(int(entry.value) - 128)


@pytest.mark.parametrize(
    ("graph", "weight"),
    [
        ("fill", "layers.0.attn_norm.weight"),
        ("reuse", "layers.1.attn_out.weight"),
        ("plain", "norm.weight"),
    ],
)
def test_validation_finds_a_wrong_graph(
    models: Any, scratch: Path, graph: str, weight: str
) -> None:
    """Graphs that read the wrong bytes are found, output by output."""
    bundle = scratch / "bundle"
    shutil.copytree(models("llada").bundle, bundle)
    model = load_graph(bundle, graph)
    misplace(model, weight)
    onnx.save(model, bundle / f"{graph}.onnx")
    config = load_manifest(models("llada").bundle).model
    with pytest.raises(VerificationError) as caught:
        validate_bundle(bundle, config, "float32", "full", SilentProgress(), BASE_GRAPHS)
    assert isinstance(caught.value.got, dict)
    assert {name.split(".")[0] for name in caught.value.got} == {graph}


def test_validation_finds_nan(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever among the outputs it stands."""
    run, bundle = validate._run_graph, models("llada-one").bundle

    def with_nan(path: Path, *others: Any) -> dict[str, NDArray[Any]]:
        outputs = run(path, *others)
        if path.stem == "reuse":
            outputs["confidence"] = np.full_like(outputs["confidence"], np.nan)
        return outputs

    monkeypatch.setattr(validate, "_run_graph", with_nan)
    config = load_manifest(bundle).model
    with pytest.raises(VerificationError) as caught:
        validate_bundle(bundle, config, "float32", "full", SilentProgress(), BASE_GRAPHS)
    assert caught.value.got == {"reuse.confidence": "nan"}


def test_a_failed_validation_publishes_nothing(
    models: Any, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: Built = models("llada")

    def misread(_config: Any, name: str, *_: Any) -> ir.Model:
        model = load_graph(built.bundle, name)
        if name == "reuse":
            misplace(model, "layers.0.attn_out.weight")
        return ir.from_proto(model)

    monkeypatch.setattr(exporter, "capture_graph", misread)
    with pytest.raises(VerificationError, match="do not compute what the model computes"):
        export_bundle(str(built.checkpoint), scratch / "out")
    assert not any(scratch.iterdir())


def test_validation_by_slice(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model does not fit into memory, its first and last layer are validated."""
    monkeypatch.setattr(validate, "_available_bytes", lambda: 0)
    bundle = models("llada").bundle
    config = load_manifest(bundle).model
    report = validate_bundle(bundle, config, "float32", "auto", SilentProgress(), BASE_GRAPHS)
    assert report["mode"] == "slice"
    assert 0 < report["worst"] <= report["bound"]


def test_float16_through_to_generation(models: Any, scratch: Path) -> None:
    """Another dtype than the checkpoint's; the engine's weights are the rounded ones."""
    bundle, engine = scratch / "bundle", scratch / "engine"
    export_bundle(str(models("llada-one").checkpoint), bundle, ExportOptions(dtype="float16"))
    manifest = load_manifest(bundle, "bundle")
    assert (manifest.body["dtype"], manifest.body["source"]["dtype"]) == ("float16", "float32")
    build_engine(bundle, engine, BuildOptions(engine="onnxruntime", threads=1))
    config = GenerationConfig(gen_length=8, block_length=4, steps=8)
    with Runtime.load(engine) as runtime, Runtime.load(models("llada-one").engine) as other:
        rounded, full = runtime.generate([[1, 2, 3]] * 2, config), other.generate([1, 2, 3], config)
    agreeing = sum(a == b for a, b in zip(rounded[0].tokens, full.tokens, strict=True))
    assert agreeing >= 6
