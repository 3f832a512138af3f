"""Weights of a TensorRT 8.5 engine as inputs of its plans: which, and who binds them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from built import Built
from fake_tensorrt import FakeDevice
from fake_tensorrt85 import FakeTrt85
from trt_engines import NAME, prompts

from lacache_trt.artifacts import Manifest, load_manifest, write_manifest
from lacache_trt.engines.onnxruntime.engine import OnnxRuntimeEngine
from lacache_trt.engines.tensorrt import attach_programs, legacy_directory, legacy_share
from lacache_trt.engines.tensorrt.engine import load
from lacache_trt.engines.tensorrt.layout import WEIGHTS_FILE
from lacache_trt.engines.tensorrt.legacy_api import LegacyTensorRT
from lacache_trt.engines.tensorrt.legacy_build import LegacyTarget
from lacache_trt.engines.tensorrt.legacy_directory import (
    LegacyModel,
    fixed_profile,
    write_plans,
)
from lacache_trt.engines.tensorrt.legacy_graph import LoweredGraph
from lacache_trt.engines.tensorrt.legacy_lowering import lower_graph
from lacache_trt.engines.tensorrt.legacy_share import LegacyShare
from lacache_trt.errors import ArtifactError
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.safetensors_file import read_safetensors_header
from lacache_trt.progress import SilentProgress
from lacache_trt.runtime import Runtime

SIZES = {"B": 1, "N": 64, "Bk": 8, "S": 8, "E": 8, "R": 0}
PROFILE = ",".join(f"{name}={size}" for name, size in SIZES.items())
GRAPHS = ("fill", "reuse")


@pytest.fixture
def bundle(models: Callable[[str], Built], monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """A float32 bundle whose plugin nodes get a stand-in for their program."""
    monkeypatch.setattr(attach_programs, "packed_program", lambda *_: b"no kernel")
    return load_manifest(models(NAME).bundle, "bundle")


def weights_of(graph: LoweredGraph) -> tuple[set[str], set[str]]:
    """Names of the weights that are inputs, and of those that are constants."""
    model = onnx.load_model_from_string(graph.data)
    constants = {each.name for each in model.graph.initializer if each.external_data}
    return {spec.name for spec in graph.shared}, constants


def test_only_a_large_table_is_an_input_unless_all_weights_are(
    bundle: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, everything = bundle.path("reuse.onnx"), weights_of(lowered(bundle, "reuse"))[1]
    assert "embed.weight" in everything
    header = read_safetensors_header(bundle.path(WEIGHTS_FILE))
    table = header["embed.weight"].nbytes
    monkeypatch.setattr(legacy_share, "LARGE_TABLE", table)
    assert weights_of(lower_graph(path, 90, SIZES)) == (
        {"embed.weight"},
        everything - {"embed.weight"},
    )
    monkeypatch.setattr(legacy_share, "LARGE_TABLE", table + 1)
    assert weights_of(lower_graph(path, 90, SIZES)) == (set(), everything)
    limit = header["layers.1.down.weight"].nbytes
    monkeypatch.setattr(legacy_share, "LARGE", limit)
    shared, constants = weights_of(lower_graph(path, 90, SIZES, share_weights=True))
    assert shared == {name for name in everything if header[name].nbytes >= limit}
    assert shared | constants == everything
    assert "layers.1.down.weight" in shared
    assert "norm.weight" in constants


def lowered(bundle: Manifest, name: str, share_weights: bool = False) -> LoweredGraph:
    return lower_graph(bundle.path(f"{name}.onnx"), 90, SIZES, share_weights)


@pytest.mark.parametrize("name", GRAPHS)
def test_shared_weights_follow_the_contract_in_the_order_of_the_file(
    bundle: Manifest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setattr(legacy_share, "LARGE", 1)
    graph = lowered(bundle, name, share_weights=True)
    model = onnx.load_model_from_string(graph.data)
    onnx.checker.check_model(model)  # nothing refers to the weights file any more
    header = read_safetensors_header(bundle.path(WEIGHTS_FILE))
    names = [spec.name for spec in graph.shared]
    assert names == sorted(names, key=lambda each: header[each].offset)
    own = [spec.name for spec in bundle.contract[name].inputs if spec.name not in graph.absent]
    assert [each.name for each in model.graph.input] == own + names
    for spec, value in zip(graph.shared, list(model.graph.input)[len(own) :], strict=True):
        kind = value.type.tensor_type
        assert spec.shape == header[spec.name].shape == tuple(d.dim_value for d in kind.shape.dim)
        assert (spec.dtype, kind.elem_type) == ("float32", onnx.TensorProto.FLOAT)
        assert graph.types[spec.name] == "float32"
    graph.write(tmp_path / "graph.onnx")
    assert LoweredGraph.read(tmp_path / "graph.onnx") == graph


def test_words_of_fp8_weights_stay_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legacy_share, "LARGE", 1)
    values, nodes = [], []
    for index, dtype in enumerate((ir.DataType.INT32, ir.DataType.FLOAT16)):
        tensor = ir.ExternalTensor(
            "w", index * 64, 64, dtype, shape=ir.Shape([64 // dtype.itemsize]), name=f"w{index}"
        )
        values.append(ir.Value(name=f"w{index}", const_value=tensor))
        values[-1].dtype, values[-1].shape = dtype, tensor.shape
        nodes.append(ir.node("Identity", [values[-1]]))
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph([], outputs, nodes=nodes, initializers=values, opset_imports={"": 17})
    sharing = LegacyShare(all_weights=True)
    sharing(ir.Model(graph, ir_version=8))
    assert [spec.name for spec in sharing.shared] == ["w1"]
    assert [value.name for value in graph.inputs] == ["w1"]
    assert list(graph.initializers) == ["w0"]


# --- an engine directory whose plans take their weights from one device copy ---


def shared_graphs(built: Built, folder: Path) -> dict[str, LoweredGraph]:
    """ONNX Runtime's graphs with every weight an input, for the simulated TensorRT to execute."""
    folder.mkdir()
    found = {}
    for name in GRAPHS:
        model, sharing = ir.load(built.engine / f"{name}.onnx"), LegacyShare(all_weights=True)
        sharing(model)
        ir.save(model, folder / f"{name}.onnx")
        absent = ("logit_columns", "logits") if name == "reuse" else ()
        found[name] = LoweredGraph(name.encode(), {}, absent, sharing.shared)
    return found


def write_shared(
    built: Built, base: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[Manifest, FakeTrt85, FakeDevice]:
    """`write_plans` with a builder that is not there, and what is to execute its plans."""
    monkeypatch.setattr(legacy_share, "LARGE", 1)
    source = load_manifest(built.engine, "engine")
    graphs = shared_graphs(built, base / "graphs")
    monkeypatch.setattr(
        legacy_directory,
        "build_legacy_plan",
        lambda target, graph, path, spec, sizes: graph.data.ljust(64, b"\0"),
    )
    monkeypatch.setattr(legacy_directory, "layers_json", lambda trt, plan: None)
    device = FakeDevice()
    trt = FakeTrt85(device, dict(source.contract), base / "graphs")
    trt.sizes, trt.creators = SIZES, []
    trt.shared = {
        name: {spec.name: spec.shape for spec in graph.shared}  # type: ignore[misc]
        for name, graph in graphs.items()
    }
    model = LegacyModel(
        graphs=graphs,
        contract={name: source.contract[name] for name in GRAPHS},
        dtype="float32",
        profile=fixed_profile((PROFILE,), source.model.max_length),
        weights=built.engine,
    )
    out = base / "engine"
    out.mkdir()
    body = write_plans(LegacyTarget(trt, Path("library")), model, out, SilentProgress())
    body |= {"model": source.model.to_json(), "sm": device.sm, "plugin_abi": None, **changes}
    write_manifest(out, "engine", body)
    return load_manifest(out, "engine"), trt, device


def test_generations_with_weights_from_one_device_copy(
    models: Callable[[str], Built],
    engines: Callable[[str], OnnxRuntimeEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graphs have no weights of their own here: a wrong address would be a wrong token."""
    manifest, trt, device = write_shared(models(NAME), tmp_path, monkeypatch)
    assert manifest.body["weights"] == "shared"
    config = GenerationConfig(gen_length=16, block_length=8, steps=16)
    with load(manifest, LegacyTensorRT(trt), device) as engine:
        for prompt in prompts(engine.config.vocab_size):
            got = Runtime(engine).generate(prompt, config)
            expected = Runtime(engines(NAME)).generate(prompt, config)
            assert got.tokens == expected.tokens  # type: ignore[union-attr]
        fill, reuse = (trt.engines[name].contexts[0] for name in GRAPHS)
        common = trt.shared["fill"].keys() & trt.shared["reuse"].keys()
        assert "embed.weight" in common
        for name in common:
            assert fill.addresses[name] == reuse.addresses[name]
        assert "head.weight" in reuse.addresses.keys() - fill.addresses.keys()
    assert device.closed


def test_a_manifest_that_forgets_a_weight_is_refused(
    models: Callable[[str], Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"fill": ["embed.weight"], "reuse": []}
    manifest, trt, device = write_shared(models(NAME), tmp_path, monkeypatch, shared_weights=named)
    with pytest.raises(ArtifactError, match="tensors of fill"):
        load(manifest, LegacyTensorRT(trt), device)


def test_embedded_weights_are_not_copied(
    models: Callable[[str], Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = models(NAME)
    monkeypatch.setattr(legacy_directory, "build_legacy_plan", lambda *_: b"plan")
    monkeypatch.setattr(legacy_directory, "layers_json", lambda trt, plan: None)
    source = load_manifest(built.engine, "engine")
    model = LegacyModel(
        graphs={name: LoweredGraph(b"", {}, ()) for name in GRAPHS},
        contract={name: source.contract[name] for name in GRAPHS},
        dtype="float32",
        profile=fixed_profile((PROFILE,), source.model.max_length),
        weights=built.engine,
    )
    trt = SimpleNamespace(__version__="8.5.3.1")
    body = write_plans(LegacyTarget(trt, Path("library")), model, tmp_path, SilentProgress())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fill.plan", "reuse.plan"]
    assert body["weights"] == "embedded"
    assert body["shared_weights"] == {"fill": [], "reuse": []}
    assert json.dumps(body)
    assert set(body["build_seconds"]) == set(GRAPHS)
