"""TensorRT and a GPU that are not there: plans name ONNX graphs, which onnxruntime executes.

The context reads its inputs and writes its outputs in the memory of `FakeDevice`, so a wrong shape
or address shows as a wrong token.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
from fake_device import ALIGNMENT, STREAM, view
from fake_device import FakeDevice as FakeDevice

from lacache_trt.contract import GraphSpec

VERSION = "11.4.0"


class FakeContext:
    """Executes a graph over device memory."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.profile: int | None = None
        self.scratch: tuple[int, int] | None = None
        self.enqueued = 0

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        self.profile = profile_index
        return 0 <= profile_index < self._engine.num_optimization_profiles

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % ALIGNMENT == 0
        assert size >= self._engine.device_memory_size_v2
        self.scratch = memory, size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert name in self._engine.inputs
        self.shapes[name] = tuple(shape)
        assert self.profile is not None
        ranges = self._engine.trt.profiles[self.profile]
        dims = self._engine.symbols.get(name, shape)
        return all(
            ranges[dim][0] <= size <= ranges[dim][2]
            for dim, size in zip(dims, shape, strict=True)
            if dim in ranges
        )

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory % ALIGNMENT == 0
        self.addresses[name] = memory
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self._engine.inputs if name not in self.shapes]

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        assert self.profile is not None
        assert self.scratch is not None
        trt = self._engine.trt
        if trt.failures.pop(self._engine.spec.name, None):
            trt.logger.log(trt.ILogger.ERROR, "launch failed: the words of TensorRT")
            return False
        self.enqueued += 1
        trt.device.submit(self._execute)
        return True

    def _execute(self) -> None:
        feeds = {
            name: view(self.addresses[name], self.shapes[name], dtype)
            for name, dtype in self._engine.inputs.items()
            if name not in self._engine.weights
        }
        names = [spec.name for spec in self._engine.spec.outputs]
        for name, value in zip(names, self._engine.session.run(names, feeds), strict=True):
            self._engine.trt.device.require_inside(self.addresses[name], value.nbytes)
            view(self.addresses[name], value.shape, str(value.dtype))[...] = value


class FakeEngine:
    """A plan: its name, the graph's contract, an onnxruntime session."""

    device_memory_size_v2 = 5000

    def __init__(self, trt: FakeTrt, spec: GraphSpec, graph: Path) -> None:
        self.trt, self.spec = trt, spec
        self.num_optimization_profiles = len(trt.profiles)
        self.session = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
        self.weights = trt.shared.get(spec.name, {})
        self.inputs = {tensor.name: tensor.dtype for tensor in spec.inputs}
        self.inputs |= dict.fromkeys(self.weights, "float32")
        self.symbols = {tensor.name: tensor.shape for tensor in spec.inputs}
        self.outputs = {tensor.name: tensor.dtype for tensor in spec.outputs}
        self.ranks = {tensor.name: len(tensor.shape) for tensor in (*spec.inputs, *spec.outputs)}
        self.ranks |= {name: len(shape) for name, shape in self.weights.items()}
        self.contexts: list[FakeContext] = []

    @property
    def num_io_tensors(self) -> int:
        return len(self.inputs) + len(self.outputs)

    def get_tensor_name(self, index: int) -> str:
        return [*self.inputs, *self.outputs][index]

    def get_tensor_mode(self, name: str) -> str:
        return "INPUT" if name in self.inputs else "OUTPUT"

    def get_tensor_dtype(self, name: str) -> str:
        names = {"int32": "INT32", "float32": "FLOAT"}
        return names[self.inputs.get(name) or self.outputs[name]]

    def get_tensor_shape(self, name: str) -> list[int]:
        return [-1] * self.ranks[name]

    def create_execution_context(self, strategy: str) -> FakeContext:
        assert strategy == "USER_MANAGED"
        self.contexts.append(FakeContext(self))
        return self.contexts[-1]


class _Logger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class FakeTrt:
    """The module: what `engines/tensorrt` uses of it."""

    __version__ = VERSION
    ILogger = _Logger
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="USER_MANAGED")
    DataType = SimpleNamespace(FLOAT="FLOAT", INT32="INT32", HALF="HALF", BF16="BF16")
    TensorIOMode = SimpleNamespace(INPUT="INPUT", OUTPUT="OUTPUT")

    def __init__(self, device: FakeDevice, graphs: dict[str, GraphSpec], folder: Path) -> None:
        self.device, self.graphs, self.folder = device, graphs, folder
        self.failures: dict[str, bool] = {}
        self.shared: dict[str, dict[str, tuple[int, ...]]] = {}
        self.engines: dict[str, FakeEngine] = {}
        self.logger: Any = None
        self.capturable: bool | None = None
        self.profiles: list[dict[str, list[int]]] = [{}]  # without ranges nothing is refused

    def Runtime(self, logger: Any) -> FakeTrt:
        self.logger = logger
        return self

    def deserialize_cuda_engine(self, data: Any) -> FakeEngine | None:
        name = bytes(data).decode("utf-8", "replace").strip("\0")
        if name not in self.graphs:
            self.logger.log(self.ILogger.ERROR, "magic tag does not match")
            return None
        self.engines[name] = FakeEngine(self, self.graphs[name], self.folder / f"{name}.onnx")
        return self.engines[name]
