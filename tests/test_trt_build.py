"""Real engines: TensorRT-RTX builds fill and reuse for SM89 on a machine without a GPU."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from synthetic import make_llada

from lacache_trt.artifacts import Manifest, load_manifest
from lacache_trt.engines.tensorrt import bindings
from lacache_trt.engines.tensorrt.attach_programs import AttachPrograms
from lacache_trt.engines.tensorrt.building import build_plans, resolve_build
from lacache_trt.engines.tensorrt.graphs import prepare_graph
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.engines.tensorrt.plan import Target, build_plan, check_network
from lacache_trt.engines.tensorrt.profiles import parse_profiles
from lacache_trt.errors import (
    EngineError,
    InvalidRequestError,
    MissingDependencyError,
    VerificationError,
)
from lacache_trt.export.exporter import export_bundle
from lacache_trt.export.options import ExportOptions
from lacache_trt.plugins.library import build_library
from lacache_trt.plugins.programs import packed_program
from lacache_trt.progress import SilentProgress

TENSORRT_RTX = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="TensorRT-RTX is not installed"
)
PROFILE = "B=1:2:3,N=16:96:256,Bk=4:8:32,S=1:1:2,E=1:1:2,R=0:0:4"
DTYPES = ("float16", "bfloat16")
HEAD_DIM, VOCABULARY = 64, 197


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    folder = tmp_path_factory.mktemp("trt")
    checkpoint = make_llada(
        folder / "model", hidden=256, heads=4, kv_heads=2, ffn=384, layers=3, vocab=VOCABULARY
    )
    found = {}
    for dtype in DTYPES:
        options = ExportOptions(dtype=dtype, validate="off", cache="exact")  # type: ignore[arg-type]
        export_bundle(str(checkpoint), folder / dtype, options)
        found[dtype] = load_manifest(folder / dtype)
    return found


class Stages:
    """Remembers what a build reports."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.units = 0

    def start(self, stage: str, total: int | None = None) -> None:
        self.stages.append(stage)

    def advance(self, amount: int = 1) -> None:
        self.units += amount


def build_for_l40s(
    bundle: Manifest, directory: Path, progress: Any = None, **settings: Any
) -> dict[str, Any]:
    options = TensorRTOptions(sm=89, profiles=(PROFILE,), **settings)
    directory.mkdir()
    return build_plans(bundle, directory, "tensorrt-rtx", options, progress or SilentProgress())


def programs(dtype: str) -> dict[str, tuple[bytes, ...]]:
    """The program of every plugin node, by graph."""
    kind = getattr(torch, dtype)
    attention = ("AttentionReuse", "Attention")
    return {
        "fill": (packed_program("AttentionFill", kind, HEAD_DIM, 89),),
        "reuse": (
            *(packed_program(op, kind, HEAD_DIM, 89) for op in attention),
            packed_program("SampleBlock", kind, VOCABULARY, 89),
        ),
    }


@TENSORRT_RTX
@pytest.mark.parametrize("dtype", DTYPES)
def test_builds_with_plugins_and_the_plans_hold_the_cubins(
    bundles: dict[str, Manifest], tmp_path: Path, dtype: str
) -> None:
    progress = Stages()
    body = build_for_l40s(bundles[dtype], tmp_path / "out", progress)
    assert (body["engine"], body["sm"], body["dtype"]) == ("tensorrt-rtx", 89, dtype)
    assert len(body["plugin_abi"]) == 16
    assert {stage.split(":")[0] for stage in progress.stages} == {"fill", "reuse"}
    assert progress.units > 0
    for graph, blobs in programs(dtype).items():
        plan = (tmp_path / "out" / f"{graph}.plan").read_bytes()
        for blob in blobs:
            assert b"\x7fELF" in blob
            assert blob in plan


@TENSORRT_RTX
@pytest.mark.parametrize("dtype", DTYPES)
def test_builds_without_plugins(bundles: dict[str, Manifest], tmp_path: Path, dtype: str) -> None:
    body = build_for_l40s(bundles[dtype], tmp_path / "out", plugins=False)
    assert body["plugin_abi"] is None
    for graph in ("fill", "reuse"):
        plan = (tmp_path / "out" / f"{graph}.plan").read_bytes()
        assert len(plan) > 100_000
        assert b"AttentionFill" not in plan
        assert not any(blob in plan for blob in programs(dtype)[graph])


@TENSORRT_RTX
def test_a_network_that_differs_from_the_contract_is_refused(bundles: dict[str, Manifest]) -> None:
    bundle = bundles["float16"]
    trt = bindings.import_tensorrt("tensorrt-rtx")
    target = Target(trt, "tensorrt-rtx", 89, None)
    spec = bundle.contract["fill"]
    wrong = {
        "dtype": replace(spec.inputs[0], dtype="float32"),
        "shape": replace(spec.inputs[0], shape=("B", 7)),
        "name": replace(spec.inputs[0], name="ids"),
    }
    profiles = parse_profiles((PROFILE,), bundle.model.max_length)
    for tensor in wrong.values():
        changed = replace(spec, inputs=(tensor, *spec.inputs[1:]))
        with pytest.raises(VerificationError, match="contract"):
            build_plan(target, bundle.path("fill.onnx"), changed, profiles, SilentProgress())


def test_an_input_that_became_a_shape_is_refused(bundles: dict[str, Manifest]) -> None:
    spec = bundles["float16"].contract["fill"]

    class DataType:
        INT32, HALF, FLOAT = "INT32", "HALF", "FLOAT"

    class Trt:
        pass

    class Tensor:
        def __init__(self, tensor: Any) -> None:
            names = {"int32": "INT32", "float16": "HALF", "float32": "FLOAT"}
            self.name, self.dtype = tensor.name, names[tensor.dtype]
            self.shape = tuple(-1 if isinstance(dim, str) else dim for dim in tensor.shape)
            self.is_shape_tensor = tensor.name == "block_columns"

    class Network:
        num_inputs, num_outputs = len(spec.inputs), len(spec.outputs)

        def get_input(self, index: int) -> Tensor:
            return Tensor(spec.inputs[index])

        def get_output(self, index: int) -> Tensor:
            return Tensor(spec.outputs[index])

    Trt.DataType = DataType  # type: ignore[attr-defined]
    with pytest.raises(VerificationError, match="block_columns"):
        check_network(Trt, Network(), spec)


@TENSORRT_RTX
def test_a_node_without_a_program_says_how_to_build(bundles: dict[str, Manifest]) -> None:
    """The bundle's own graph, parsed with the library loaded: no crash, TensorRT's words kept."""
    trt = bindings.import_tensorrt("tensorrt-rtx")
    path = bundles["float16"].path("fill.onnx")
    data = AttachPrograms(89)(ir.load(path)).model
    for node in data.graph:
        node.attributes.pop("program", None)
    target = Target(trt, "tensorrt-rtx", 89, build_library())
    spec = bundles["float16"].contract["fill"]
    profiles = parse_profiles((PROFILE,), 4096)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lacache_trt.engines.tensorrt.plan.prepare_graph",
            lambda path, sm, share: ir.to_proto(data).SerializeToString(),
        )
        with pytest.raises(EngineError, match="AttentionFill"):
            build_plan(target, path, spec, profiles, SilentProgress())


@TENSORRT_RTX
def test_rtx_has_no_hopper_target(bundles: dict[str, Manifest], tmp_path: Path) -> None:
    options = TensorRTOptions(sm=90, profiles=(PROFILE,))
    with pytest.raises(MissingDependencyError, match="sm_90"):
        build_plans(bundles["float16"], tmp_path, "tensorrt-rtx", options, SilentProgress())


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU")
@TENSORRT_RTX
def test_without_a_gpu_the_target_must_be_named(
    bundles: dict[str, Manifest], tmp_path: Path
) -> None:
    with pytest.raises(MissingDependencyError, match="--sm 89"):
        build_plans(
            bundles["float16"], tmp_path, "tensorrt-rtx", TensorRTOptions(), SilentProgress()
        )


def test_tensorrt_that_is_not_installed_names_the_install_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bindings, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install tensorrt"):
        bindings.import_tensorrt("tensorrt")


def test_graphs_with_programs_are_valid_onnx(bundles: dict[str, Manifest], tmp_path: Path) -> None:
    bundle = bundles["float16"]
    shutil.copyfile(bundle.path("weights.safetensors"), tmp_path / "weights.safetensors")
    for graph in ("fill", "reuse"):
        for sm in (89, 90, None):
            path = tmp_path / "graph.onnx"
            path.write_bytes(prepare_graph(bundle.path(f"{graph}.onnx"), sm))
            onnx.checker.check_model(path)
    model = onnx.load_from_string(prepare_graph(bundle.path("fill.onnx"), 89))
    node = next(node for node in model.graph.node if node.domain == "lacache")
    attribute = next(each for each in node.attribute if each.name == "program")
    assert attribute.t.data_type == onnx.TensorProto.INT8
    assert onnx.numpy_helper.to_array(attribute.t).tobytes() == programs("float16")["fill"][0]
    assert any("program" in function.attribute for function in model.functions)


def test_a_profile_has_each_size_once() -> None:
    with pytest.raises(InvalidRequestError, match="a profile has B twice"):
        parse_profiles(("B=1,N=64,B=2",), 64)


@pytest.mark.parametrize(
    "settings", [{"trt_version": "8.5"}, {"timing_cache": Path("tactics.bin")}], ids=str
)
def test_what_only_tensorrt_has_is_refused_before_anything_is_resolved(
    bundles: dict[str, Manifest], settings: dict[str, Any]
) -> None:
    flag = "--" + next(iter(settings)).replace("_", "-")
    with pytest.raises(InvalidRequestError, match=f"{flag} is for TensorRT"):
        resolve_build(bundles["float16"], "tensorrt-rtx", TensorRTOptions(**settings))
