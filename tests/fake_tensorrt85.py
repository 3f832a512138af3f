"""TensorRT 8.5's Python API over the simulated TensorRT: what 10 added is not there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from fake_tensorrt import FakeContext, FakeEngine, FakeTrt


class FakeContext85(FakeContext):
    """Fixed shapes; memory is a property; a profile cannot be chosen twice."""

    set_device_memory = None  # type: ignore[assignment]
    set_optimization_profile_async = None  # type: ignore[assignment]

    def __init__(self, engine: FakeEngine85) -> None:
        super().__init__(engine)
        self.profile = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "device_memory":
            assert value % 256 == 0
            self.scratch = value, self._engine.device_memory_size
        else:
            super().__setattr__(name, value)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert name in self._engine.bound
        return super().set_input_shape(name, shape) and tuple(shape) == self._engine.fixed[name]

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert name in self._engine.bound
        return super().set_tensor_address(name, memory)

    def infer_shapes(self) -> list[str]:
        return [
            name
            for name in self._engine.inputs
            if name in self._engine.bound and name not in self.shapes
        ]

    def _execute(self) -> None:
        engine = self._engine
        for name in (*engine.inputs, *engine.outputs):
            if name not in engine.bound:  # empty: any address will do
                self.shapes[name] = engine.fixed[name]
                self.addresses[name] = self.scratch[0] if self.scratch else 0
        super()._execute()


class FakeEngine85(FakeEngine):
    """An engine of fixed shapes, without the tensors that are empty."""

    device_memory_size_v2 = None  # type: ignore[assignment]
    device_memory_size = 5000
    create_execution_context = None  # type: ignore[assignment]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        sizes = self.trt.sizes
        self.fixed = {
            tensor.name: tuple(sizes[d] if isinstance(d, str) else d for d in tensor.shape)
            for tensor in (*self.spec.inputs, *self.spec.outputs)
        }
        self.fixed |= self.weights
        self.bound = [name for name, shape in self.fixed.items() if 0 not in shape]
        taken = {value.name for value in self.session.get_inputs()}
        # Weights that the graph executed here has itself are bound and not read.
        self.weights = {n: shape for n, shape in self.weights.items() if n not in taken}

    @property
    def num_io_tensors(self) -> int:
        return len(self.bound)

    def get_tensor_name(self, index: int) -> str:
        return self.bound[index]

    def get_tensor_shape(self, name: str) -> list[int]:
        return list(self.fixed[name])

    def create_execution_context_without_device_memory(self) -> FakeContext85:
        self.contexts.append(FakeContext85(self))
        return self.contexts[-1]  # type: ignore[return-value]


class FakeTrt85(FakeTrt):
    """The module."""

    __version__ = "8.5.3.1"
    ExecutionContextAllocationStrategy = None  # type: ignore[assignment]
    sizes: dict[str, int]
    creators: list[Any]

    def get_plugin_registry(self) -> SimpleNamespace:
        return SimpleNamespace(plugin_creator_list=self.creators)

    def deserialize_cuda_engine(self, data: Any) -> FakeEngine85 | None:
        name = bytes(data).decode("utf-8", "replace").strip("\0")
        if name not in self.graphs:
            return None
        graph = self.folder / f"{name}.onnx"
        self.engines[name] = FakeEngine85(self, replace(self.graphs[name]), graph)
        return self.engines[name]  # type: ignore[return-value]
