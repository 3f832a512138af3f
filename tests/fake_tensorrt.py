"""TensorRT and a GPU that are not there: plans name ONNX graphs, which onnxruntime executes.

Device addresses are addresses of host memory, and the context reads its inputs and writes its
outputs there, so a wrong shape or address shows as a wrong token. The stream executes at once,
except while it is captured: then it remembers, as CUDA does, and a replay repeats it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from lacache_trt.contract import GraphSpec
from lacache_trt.errors import CapacityError

SM = 90
VERSION = "11.4.0"
STREAM = 77
_ALIGNMENT = 256


class FakeDevice:
    """Host memory, a stream and graphs, with bookkeeping."""

    def __init__(self, memory: int = 1 << 30) -> None:
        self.name, self.sm, self.stream = "Fake H100", SM, STREAM
        self.memory = memory
        self.live: dict[int, tuple[NDArray[np.uint8], int]] = {}
        self.pins = 0
        self.captures = self.replays = 0
        self.closed = False
        self._recording: list[Callable[[], None]] | None = None
        self._depth = threading.local()

    @contextmanager
    def activated(self) -> Iterator[None]:
        self._depth.value = self._level() + 1
        try:
            yield
        finally:
            self._depth.value -= 1

    def _level(self) -> int:
        return int(getattr(self._depth, "value", 0))

    def _require_active(self) -> None:
        assert self._level() > 0, "the context is not current in this thread"
        assert not self.closed, "the device is closed"

    def submit(self, work: Callable[[], None]) -> None:
        """Execute now, or remember while capturing."""
        self._require_active()
        if self._recording is not None:
            self._recording.append(work)
        else:
            work()

    def free_bytes(self) -> int:
        return self.memory - sum(size for _, size in self.live.values())

    def allocate(self, nbytes: int) -> int:
        self._require_active()
        assert self._recording is None, "allocation while capturing"
        if nbytes > self.free_bytes():
            raise CapacityError("out of memory", got=nbytes)
        backing = np.full(nbytes + _ALIGNMENT, 0xCD, np.uint8)
        address = -(-backing.ctypes.data // _ALIGNMENT) * _ALIGNMENT
        self.live[address] = backing, nbytes
        return address

    def release(self, address: int) -> None:
        self._require_active()
        del self.live[address]

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        self._require_active()
        self.pins += 1
        return np.zeros(nbytes, np.uint8)

    def unpin(self, array: NDArray[np.uint8]) -> None:
        self.pins -= 1

    def upload(self, address: int, source: NDArray[np.uint8]) -> None:
        self.submit(lambda: ctypes.memmove(address, source.ctypes.data, source.nbytes) and None)

    def download(self, target: NDArray[np.uint8], address: int) -> None:
        self.submit(lambda: ctypes.memmove(target.ctypes.data, address, target.nbytes) and None)

    def load(self, address: int, source: NDArray[np.uint8]) -> None:
        self._require_active()
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def record(self, event: Any = None) -> Any:
        self._require_active()
        return event or object()

    def wait(self, event: Any) -> None:
        self._require_active()

    def synchronize(self) -> None:
        assert self._recording is None, "synchronisation while capturing"
        self._require_active()

    def capture(self, body: Callable[[], None]) -> list[Callable[[], None]]:
        self._recording = []
        self.captures += 1
        try:
            body()
            return self._recording
        finally:
            self._recording = None

    def replay(self, graph: list[Callable[[], None]]) -> None:
        self.replays += 1
        for work in graph:
            self.submit(work)

    def destroy(self, graph: list[Callable[[], None]]) -> None:
        graph.clear()

    def close(self) -> None:
        self.closed = True


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
        assert memory % _ALIGNMENT == 0
        assert size >= self._engine.device_memory_size_v2
        self.scratch = memory, size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert name in self._engine.inputs
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory % _ALIGNMENT == 0
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
            name: _view(self.addresses[name], self.shapes[name], dtype)
            for name, dtype in self._engine.inputs.items()
            if name not in self._engine.weights
        }
        names = [spec.name for spec in self._engine.spec.outputs]
        for name, value in zip(names, self._engine.session.run(names, feeds), strict=True):
            _view(self.addresses[name], value.shape, str(value.dtype))[...] = value


def _view(address: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    count = int(np.prod(shape, dtype=np.int64))
    buffer = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(buffer, dtype).reshape(shape)


class FakeEngine:
    """A plan: its name, the graph's contract, an onnxruntime session."""

    device_memory_size_v2 = 5000
    num_optimization_profiles = 1

    def __init__(self, trt: FakeTrt, spec: GraphSpec, graph: Path) -> None:
        self.trt, self.spec = trt, spec
        self.session = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
        self.weights = trt.shared.get(spec.name, {})
        self.inputs = {tensor.name: tensor.dtype for tensor in spec.inputs}
        self.inputs |= dict.fromkeys(self.weights, "float32")
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
