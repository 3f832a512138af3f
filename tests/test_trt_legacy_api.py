"""TensorRT 8.5 behind the runtime's names, and what its builder is told; both are simulated."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from built import Built
from fake_tensorrt import FakeDevice
from fake_tensorrt85 import FakeTrt85
from trt_engines import NAME, prompts, write_engine

from lacache_trt.contract import GraphSpec, TensorSpec
from lacache_trt.engines.onnxruntime.engine import OnnxRuntimeEngine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.tensorrt import bindings, legacy
from lacache_trt.engines.tensorrt.engine import TensorRTEngine, load
from lacache_trt.engines.tensorrt.legacy_api import (
    AllocationStrategy,
    LegacyContext,
    LegacyEngine,
    LegacyRegistry,
    LegacyTensorRT,
    is_legacy,
)
from lacache_trt.engines.tensorrt.legacy_build import (
    QUICK_TACTICS,
    WORKSPACE_BYTES,
    LegacyTarget,
    check_network,
    configure,
    constrain,
)
from lacache_trt.engines.tensorrt.legacy_directory import fixed_profile
from lacache_trt.engines.tensorrt.legacy_graph import LoweredGraph
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.errors import (
    CapacityError,
    EngineError,
    InvalidRequestError,
    MissingDependencyError,
    VerificationError,
)
from lacache_trt.generation import GenerationConfig
from lacache_trt.progress import SilentProgress
from lacache_trt.runtime import Runtime

SIZES = {"B": 1, "N": 64, "Bk": 8, "S": 8, "E": 8, "R": 0}
PROFILE = ",".join(f"{name}={size}" for name, size in SIZES.items())


# --- the runtime over 8.5 ---


def open_legacy(built: Built, directory: Path) -> tuple[TensorRTEngine, FakeTrt85, FakeDevice]:
    absent = {"reuse": ["logit_columns", "logits"]}
    changes = {"tensorrt": FakeTrt85.__version__, "absent": absent}
    manifest = write_engine(built, directory, PROFILE, **changes)
    device = FakeDevice()
    trt = FakeTrt85(device, dict(manifest.contract), built.engine)
    trt.sizes, trt.creators = SIZES, []
    return load(manifest, LegacyTensorRT(trt), device), trt, device


@pytest.mark.parametrize("block", [8])
def test_generations_equal_the_onnxruntime_engine(
    models: Callable[[str], Built],
    engines: Callable[[str], OnnxRuntimeEngine],
    tmp_path: Path,
    block: int,
) -> None:
    engine, trt, device = open_legacy(models(NAME), tmp_path / "engine")
    config = GenerationConfig(gen_length=16, block_length=block, steps=16)
    with engine:
        for prompt in prompts(engine.config.vocab_size):
            got = Runtime(engine).generate(prompt, config)
            expected = Runtime(engines(NAME)).generate(prompt, config)
            assert got.tokens == expected.tokens  # type: ignore[union-attr]
        contexts = [context for each in trt.engines.values() for context in each.contexts]
        assert len(contexts) == device.captures == 2
        caches = [spec.name for spec in engine._resources.plans["fill"].outputs]  # type: ignore
        fill, reuse = contexts
        assert {name: fill.addresses[name] for name in caches} == {
            name: reuse.addresses[name] for name in caches
        }
    assert device.closed


def test_other_sizes_are_refused_with_the_profile_to_build(
    models: Callable[[str], Built], tmp_path: Path
) -> None:
    engine, _, _ = open_legacy(models(NAME), tmp_path / "engine")
    config = GenerationConfig(gen_length=16, block_length=16, steps=16)
    with engine, pytest.raises(CapacityError, match="Bk=16"):
        Runtime(engine).generate([5, 6, 7], config)


def test_only_8_5_is_adapted(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"8.5.3.1": LegacyTensorRT, "8.6.1": SimpleNamespace, "11.4.0": SimpleNamespace}
    monkeypatch.setattr(bindings, "find_spec", lambda name: object())
    for version, kind in modules.items():
        module = SimpleNamespace(__version__=version)
        assert is_legacy(module) == (kind is LegacyTensorRT)
        monkeypatch.setattr(bindings, "import_module", lambda name, m=module: m)
        found = bindings.import_tensorrt("tensorrt")
        assert type(found) is kind
        assert found.__version__ == version


def test_what_is_not_adapted_is_the_modules_own() -> None:
    trt = LegacyTensorRT(SimpleNamespace(__version__="8.5.3.1", DataType="its own"))
    assert trt.DataType == "its own"
    with pytest.raises(AttributeError):
        _ = trt.IProgressMonitor


def test_a_context_needs_enough_memory_of_the_callers() -> None:
    wrapped = SimpleNamespace(device_memory=None)
    engine = SimpleNamespace(device_memory_size=4096)
    context = LegacyContext(wrapped, engine)
    with pytest.raises(EngineError, match="too small"):
        context.set_device_memory(512, 4095)
    context.set_device_memory(512, 4096)
    assert wrapped.device_memory == 512
    with pytest.raises(EngineError, match="caller's memory"):
        LegacyEngine(engine).create_execution_context("STATIC")  # type: ignore[arg-type]
    nothing = SimpleNamespace(create_execution_context_without_device_memory=lambda: None)
    assert LegacyEngine(nothing).create_execution_context(AllocationStrategy.USER_MANAGED) is None


@pytest.mark.parametrize("dim", [4, -1], ids=["fixed", "dynamic"])
def test_profiles_are_only_chosen_where_shapes_are_dynamic(dim: int) -> None:
    chosen: list[tuple[int, int]] = []
    engine = SimpleNamespace(
        num_io_tensors=2,
        get_tensor_name=lambda index: ("x", "y")[index],
        get_tensor_mode=lambda name: f"TensorIOMode.{'INPUT' if name == 'x' else 'OUTPUT'}",
        get_tensor_shape=lambda name: [1, dim] if name == "x" else [-1],
    )

    def choose(index: int, stream: int) -> bool:
        chosen.append((index, stream))
        return True

    context = LegacyContext(SimpleNamespace(set_optimization_profile_async=choose), engine)
    assert context.set_optimization_profile_async(0, 7)
    assert chosen == ([] if dim > 0 else [(0, 7)])
    assert context.set_optimization_profile_async(1, 7) == (dim < 0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("int lacacheRegister(void) { return 0; }", "registered nothing"),
        ("int other(void) { return 1; }", "cannot use"),
        ("int lacacheRegister(void) { return 8; }", None),
    ],
    ids=["no TensorRT", "another library", "ours"],
)
def test_the_library_registers_itself(tmp_path: Path, source: str, message: str | None) -> None:
    (tmp_path / "library.c").write_text(source)
    path = tmp_path / "library.so"
    command = ["gcc", "-shared", "-fPIC", str(tmp_path / "library.c"), "-o", str(path)]
    subprocess.run(command, check=True)
    registry = LegacyRegistry(SimpleNamespace(plugin_creator_list=["a"]))
    assert registry.all_creators == ["a"]
    if message is None:
        registry.load_library(str(path))
        assert ctypes.CDLL(str(path)).lacacheRegister() == 8
    else:
        with pytest.raises(EngineError, match=message):
            registry.load_library(str(path))


# --- the builder ---


@dataclass
class Tensor:
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass
class Layer:
    """A layer that refuses what TensorRT does not let be set."""

    type: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    precision: str | None = None
    types: dict[int, str] = field(default_factory=dict)

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    def get_input(self, index: int) -> Tensor | None:
        return self.inputs[index] if self.inputs else None

    def get_output(self, index: int) -> Tensor:
        return self.outputs[index]

    def set_output_type(self, index: int, kind: str) -> None:
        self.types[index] = kind


def network_of(layers: list[Layer]) -> SimpleNamespace:
    return SimpleNamespace(num_layers=len(layers), get_layer=lambda index: layers[index])


def builder_module() -> SimpleNamespace:
    names = ("CONSTANT", "SHAPE", "PLUGIN_V2", "IDENTITY", "ELEMENTWISE", "SHUFFLE", "GATHER")
    return SimpleNamespace(
        DataType=SimpleNamespace(FLOAT="FLOAT", HALF="HALF", INT32="INT32"),
        LayerType=SimpleNamespace(**{name: name for name in names}),
    )


def test_every_layer_gets_the_precision_of_the_graph() -> None:
    types = {"x": "float16", "wide": "float32", "norm": "float32", "less": "bool", "i": "int32"}
    x, wide, helper, norm = Tensor("x"), Tensor("wide"), Tensor("(Unnamed) 3"), Tensor("norm")
    layers = [
        Layer("IDENTITY", [x], [wide]),
        Layer("SHUFFLE", [wide], [helper]),
        Layer("ELEMENTWISE", [helper, Tensor("(Unnamed) constant")], [norm]),
        Layer("ELEMENTWISE", [norm], [Tensor("less")]),
        Layer("GATHER", [Tensor("table")], [Tensor("i")]),
        Layer("CONSTANT", [], [Tensor("(Unnamed) constant")]),
        Layer("PLUGIN_V2", [norm], [Tensor("x")]),
        Layer("SHUFFLE", [Tensor("unknown")], [Tensor("(Unnamed) 9")]),
    ]
    constrain(builder_module(), network_of(layers), types)
    assert [layer.precision for layer in layers] == [
        None, "FLOAT", "FLOAT", None, None, None, None, None
    ]  # fmt: skip
    assert layers[1].types == layers[2].types == {0: "FLOAT"}


def test_a_network_that_differs_from_the_contract_is_refused() -> None:
    trt = builder_module()
    spec = GraphSpec(
        "reuse",
        (TensorSpec("x", ("B", "N"), "int32"), TensorSpec("more", ("B", "R"), "int32")),
        (TensorSpec("y", ("B", 7), "float16"),),
    )
    graph = LoweredGraph(b"", {}, ("more",))
    inputs, outputs = [Tensor("x", "INT32", (1, 64))], [Tensor("y", "HALF", (1, 7))]

    def network() -> SimpleNamespace:
        return SimpleNamespace(
            num_inputs=len(inputs),
            get_input=lambda index: inputs[index],
            num_outputs=len(outputs),
            get_output=lambda index: outputs[index],
        )

    check_network(trt, network(), graph, spec, SIZES)
    for wrong in (Tensor("y", "FLOAT", (1, 7)), Tensor("y", "HALF", (1, 8)), Tensor("z", "HALF")):
        outputs[0] = wrong
        with pytest.raises(VerificationError, match="contract"):
            check_network(trt, network(), graph, spec, SIZES)


class Config:
    """A builder's configuration that remembers what it was told."""

    def __init__(self) -> None:
        self.flags: set[str] = {"TF32"}
        self.limits: dict[str, int] = {}
        self.sources = 0

    def set_flag(self, flag: str) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: str) -> None:
        self.flags.remove(flag)

    def set_tactic_sources(self, sources: int) -> None:
        self.sources = sources

    def set_memory_pool_limit(self, pool: str, limit: int) -> None:
        self.limits[pool] = limit


@pytest.mark.parametrize("constraints", ["obey", "prefer"])
@pytest.mark.parametrize("kind", ["float16", "float32"])
def test_the_builder_obeys_types_without_tf32(constraints: Any, kind: str) -> None:
    flags = ("TF32", "FP16", "ENABLE_TACTIC_HEURISTIC")
    flags += ("OBEY_PRECISION_CONSTRAINTS", "PREFER_PRECISION_CONSTRAINTS")
    trt = SimpleNamespace(
        ProfilingVerbosity=SimpleNamespace(DETAILED="DETAILED"),
        BuilderFlag=SimpleNamespace(**{name: name for name in flags}),
        TacticSource=SimpleNamespace(CUBLAS=0, CUBLAS_LT=1, CUDNN=2, JIT_CONVOLUTIONS=4),
        MemoryPoolType=SimpleNamespace(WORKSPACE="WORKSPACE"),
    )
    target = LegacyTarget(trt, Path("library"), None, constraints, QUICK_TACTICS, kind == "float16")
    builder = SimpleNamespace(create_builder_config=Config)
    config = configure(target, builder, LoweredGraph(b"", {"x": kind, "i": "int32"}, ()))
    half = {"FP16", "ENABLE_TACTIC_HEURISTIC"} if kind == "float16" else set()
    assert config.flags == {f"{constraints.upper()}_PRECISION_CONSTRAINTS"} | half
    assert config.sources == 0b11
    assert config.limits == {"WORKSPACE": WORKSPACE_BYTES}


# --- options ---


def test_sizes_are_fixed() -> None:
    profile = fixed_profile(("B=2,N=384,Bk=16",), 4096)
    assert {name: size.low for name, size in profile.ranges.items()} == {
        "B": 2, "N": 384, "Bk": 16, "W": 32, "S": 8, "E": 8, "R": 0
    }  # fmt: skip
    assert all(size.low == size.tuned == size.high for size in profile.ranges.values())
    assert fixed_profile((), 4096).ranges["N"].low == 1024
    with pytest.raises(InvalidRequestError, match="fixed sizes"):
        fixed_profile(("N=64:384:1152",), 4096)
    with pytest.raises(InvalidRequestError, match="one profile"):
        fixed_profile(("N=64", "N=128"), 4096)


@pytest.mark.parametrize(
    ("dtype", "settings", "message"),
    [
        ("bfloat16", {}, "no bfloat16"),
        ("float32", {}, "no float32 kernels"),
        ("float16", {"plugins": False}, "--no-plugins"),
        ("float16", {"cache": "exact,kv"}, "--cache exact,kv"),
    ],
)
def test_what_8_5_does_not_have_is_refused(
    tmp_path: Path, dtype: str, settings: dict[str, Any], message: str
) -> None:
    bundle = SimpleNamespace(body={"dtype": dtype})
    options = TensorRTOptions(trt_version="8.5", **settings)
    with pytest.raises(InvalidRequestError, match=message):
        legacy.build_legacy(bundle, tmp_path, options, SilentProgress())  # type: ignore[arg-type]


def test_another_tensorrt_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = SimpleNamespace(body={"dtype": "float16"}, model=SimpleNamespace(max_length=256))
    installed = SimpleNamespace(__version__="11.4.0")
    monkeypatch.setattr(legacy, "import_tensorrt", lambda flavour: installed)
    options = TensorRTOptions(trt_version="8.5")
    with pytest.raises(MissingDependencyError, match=r"tensorrt==8\.5\.3\.1"):
        legacy.build_legacy(bundle, tmp_path, options, SilentProgress())  # type: ignore[arg-type]


def test_the_version_is_an_option_of_one_value() -> None:
    assert BuildOptions(tensorrt=TensorRTOptions(trt_version="8.5")).tensorrt.trt_version == "8.5"
    with pytest.raises(InvalidRequestError, match="legacy"):
        TensorRTOptions(trt_version="9.0")
