"""TensorRT 8.5's builder from a lowered graph to a plan, and its measured tactics; simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from built import Built
from fake_tensorrt85 import FakeTrt85
from trt_engines import NAME

from lacache_trt.artifacts import load_manifest
from lacache_trt.engines.tensorrt import attach_programs, legacy_share
from lacache_trt.engines.tensorrt.legacy_build import (
    QUICK_TACTICS,
    LegacyTarget,
    build_legacy_plan,
    use_timing_cache,
)
from lacache_trt.engines.tensorrt.legacy_lowering import lower_graph
from lacache_trt.errors import VerificationError

SIZES = {"B": 1, "N": 64, "Bk": 8, "S": 8, "E": 8, "R": 0}


class Network:
    """What TensorRT's parser makes of a graph, as far as it is asked."""

    num_layers = 0

    def __init__(self, graph: onnx.GraphProto | None = None) -> None:
        self.inputs = [] if graph is None else [_tensor(value) for value in graph.input]
        self.outputs = [] if graph is None else [_tensor(value) for value in graph.output]
        self.num_inputs, self.num_outputs = len(self.inputs), len(self.outputs)

    def get_input(self, index: int) -> SimpleNamespace:
        return self.inputs[index]

    def get_output(self, index: int) -> SimpleNamespace:
        return self.outputs[index]


def _tensor(value: onnx.ValueInfoProto) -> SimpleNamespace:
    kind = value.type.tensor_type
    name = {onnx.TensorProto.FLOAT: "FLOAT", onnx.TensorProto.INT32: "INT32"}[kind.elem_type]
    return SimpleNamespace(
        name=value.name, dtype=name, shape=tuple(dim.dim_value for dim in kind.shape.dim)
    )


class Parser:
    def __init__(self, network: Network, logger: Any) -> None:
        self.network = network

    def parse(self, data: bytes, path: str) -> bool:
        Network.__init__(self.network, onnx.load_model_from_string(data).graph)
        return True


class Anything:
    """Takes every setting."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: None


class BuilderConfig(Anything):
    def create_timing_cache(self, data: bytes) -> Any:
        return SimpleNamespace(serialize=lambda: data + b"+")

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        return True


def builder_module() -> SimpleNamespace:
    creator = SimpleNamespace(name="AttentionFill", plugin_namespace="lacache")
    flags = ("TF32", "OBEY_PRECISION_CONSTRAINTS")
    builder = SimpleNamespace(
        create_network=lambda flags: Network(),
        create_builder_config=BuilderConfig,
        build_serialized_network=lambda network, config: b"plan",
    )
    return SimpleNamespace(
        ILogger=FakeTrt85.ILogger,
        DataType=FakeTrt85.DataType,
        Builder=lambda logger: builder,
        OnnxParser=Parser,
        get_plugin_registry=lambda: SimpleNamespace(plugin_creator_list=[creator]),
        NetworkDefinitionCreationFlag=SimpleNamespace(EXPLICIT_BATCH=0),
        ProfilingVerbosity=SimpleNamespace(DETAILED="DETAILED"),
        BuilderFlag=SimpleNamespace(**{name: name for name in flags}),
        TacticSource=SimpleNamespace(CUBLAS=0, CUBLAS_LT=1),
        MemoryPoolType=SimpleNamespace(WORKSPACE="WORKSPACE"),
        LayerType=SimpleNamespace(CONSTANT=0, SHAPE=1, PLUGIN_V2=2, IDENTITY=3),
    )


@pytest.mark.parametrize("name", ["fill", "reuse"])
def test_the_parsed_network_has_the_contract_and_then_the_weights(
    models: Callable[[str], Built], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setattr(attach_programs, "packed_program", lambda *_: b"no kernel")
    monkeypatch.setattr(legacy_share, "LARGE", 1)
    bundle = load_manifest(models(NAME).bundle, "bundle")
    path, cache = bundle.path(f"{name}.onnx"), tmp_path / "kept" / "timing.cache"
    graph = lower_graph(path, 90, SIZES, share_weights=True)
    library = tmp_path / "library"
    library.touch()
    target = LegacyTarget(builder_module(), library, cache, tactics=QUICK_TACTICS)
    for expected in (b"+", b"++"):
        spec = bundle.contract[name]
        assert build_legacy_plan(target, graph, path, spec, SIZES) == b"plan"
        assert cache.read_bytes() == expected
    assert [path.name for path in cache.parent.iterdir()] == ["timing.cache"]
    unknown = replace(graph, shared=graph.shared[1:])
    with pytest.raises(VerificationError, match="contract"):
        build_legacy_plan(target, unknown, path, spec, SIZES)


# --- measured tactics ---


class Timing:
    """A builder's configuration whose caches name the GPU that they are of."""

    def __init__(self, gpu: str, silent: bool = False) -> None:
        self.gpu, self.silent = gpu, silent
        self.attached: str | None = None

    def create_timing_cache(self, data: bytes) -> str | None:
        text = data.decode()
        return None if text == "damaged" else text or f"new of {self.gpu}"

    def set_timing_cache(self, cache: str, ignore_mismatch: bool) -> bool:
        of_this = cache.endswith(self.gpu) or (ignore_mismatch and "another TensorRT" not in cache)
        if of_this:
            self.attached = cache
        return of_this and not self.silent

    def get_timing_cache(self) -> str | None:
        return self.attached


@pytest.mark.parametrize(
    ("known", "alike", "expected"),
    [
        (None, False, "new of GPU-1"),
        ("tactics of GPU-1", False, "tactics of GPU-1"),
        ("tactics of GPU-2", False, "new of GPU-1"),
        ("tactics of GPU-2", True, "tactics of GPU-2"),
        ("tactics of another TensorRT", True, "new of GPU-1"),
        ("damaged", True, "new of GPU-1"),
    ],
)
@pytest.mark.parametrize("silent", [False, True], ids=["says so", "says nothing"])
def test_a_timing_cache_that_does_not_suit_is_begun_anew(
    tmp_path: Path, known: str | None, alike: bool, expected: str, silent: bool
) -> None:
    path = tmp_path / "timing.cache"
    if known is not None:
        path.write_text(known)
    config = Timing("GPU-1", silent)
    target = LegacyTarget(None, Path("library"), path, same_gpu_model=alike)
    assert use_timing_cache(target, config) == config.attached == expected
    assert use_timing_cache(replace(target, timing_cache=None), config) is None
