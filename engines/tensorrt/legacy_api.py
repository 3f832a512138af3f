"""TensorRT 8.5's Python API behind the names that the runtime uses, which are 10's.

8.5 has tensor names, `execute_async_v3` and the engine inspector already. What differs: plugin
libraries are opened by the program and register themselves, a context without memory of its own is
made by another method and takes its memory as a property, and an engine of fixed shapes has no
profile to choose (two contexts may not share one before 8.6).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from enum import Enum
from typing import Any

from lacache_trt.engines.tensorrt.options import LEGACY_VERSION
from lacache_trt.errors import EngineError

LEGACY = LEGACY_VERSION
_REGISTER = "lacacheRegister"


def is_legacy(trt: Any) -> bool:
    """Whether a TensorRT module is the version that `LegacyTensorRT` adapts."""
    return str(trt.__version__).startswith(f"{LEGACY}.")


class AllocationStrategy(Enum):
    """Stands for `ExecutionContextAllocationStrategy`; only the caller's memory is offered."""

    USER_MANAGED = "user managed"


class _Wrapper:
    """Passes on everything that a subclass does not define."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class LegacyTensorRT(_Wrapper):
    """The module `tensorrt` 8.5 with the names of 10."""

    ExecutionContextAllocationStrategy = AllocationStrategy

    def Runtime(self, logger: Any) -> LegacyRuntime:
        """A runtime that opens plans and knows the plugin registry."""
        return LegacyRuntime(self._wrapped.Runtime(logger), self._wrapped)


class LegacyRuntime(_Wrapper):
    """`IRuntime`."""

    def __init__(self, wrapped: Any, trt: Any) -> None:
        super().__init__(wrapped)
        self._trt = trt

    def get_plugin_registry(self) -> LegacyRegistry:
        """The process has one registry, which the module hands out."""
        return LegacyRegistry(self._trt.get_plugin_registry())

    def deserialize_cuda_engine(self, plan: Any) -> LegacyEngine | None:
        """The engine of a plan, or None if TensorRT refuses it."""
        engine = self._wrapped.deserialize_cuda_engine(plan)
        return None if engine is None else LegacyEngine(engine)


class LegacyRegistry(_Wrapper):
    """`IPluginRegistry`."""

    @property
    def all_creators(self) -> list[Any]:
        """The creators that are registered."""
        return list(self._wrapped.plugin_creator_list)

    def load_library(self, path: str) -> None:
        """Open a plugin library, which registers its ops, and keep it open.

        Raises:
            EngineError: it is not ours, or was compiled with the headers of another TensorRT.
        """
        try:
            register = getattr(ctypes.CDLL(path), _REGISTER)
        except (OSError, AttributeError) as error:
            raise EngineError(
                "TensorRT 8.5 cannot use the plugin library",
                got=error,
                fix="compile it with the headers of 8.5: lacache-trt plugins build --include DIR",
            ) from error
        register.restype = ctypes.c_int32
        if register() <= 0:
            raise EngineError(
                "the plugin library registered nothing",
                got="no TensorRT 8 in this process",
                fix="import tensorrt before the library is opened",
            )


class LegacyEngine(_Wrapper):
    """`ICudaEngine`."""

    @property
    def device_memory_size_v2(self) -> int:
        """Bytes of activations that a context needs."""
        return int(self._wrapped.device_memory_size)

    def create_execution_context(self, strategy: AllocationStrategy) -> LegacyContext | None:
        """A context that the caller gives its memory."""
        if strategy is not AllocationStrategy.USER_MANAGED:
            raise EngineError("TensorRT 8.5 is driven with the caller's memory", got=strategy)
        context = self._wrapped.create_execution_context_without_device_memory()
        return None if context is None else LegacyContext(context, self._wrapped)


class LegacyContext(_Wrapper):
    """`IExecutionContext`."""

    def __init__(self, wrapped: Any, engine: Any) -> None:
        super().__init__(wrapped)
        self._engine = engine

    def set_device_memory(self, address: int, nbytes: int) -> None:
        """Give the context its activation memory."""
        if nbytes < self._engine.device_memory_size:
            raise EngineError(
                "the activation memory is too small",
                got=nbytes,
                expected=self._engine.device_memory_size,
            )
        self._wrapped.device_memory = address

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        """Choose a profile; an engine of fixed shapes has one, which every context has already."""
        if all(dim >= 0 for shape in self._input_shapes() for dim in shape):
            return index == 0
        return bool(self._wrapped.set_optimization_profile_async(index, stream))

    def _input_shapes(self) -> Iterator[tuple[int, ...]]:
        for index in range(self._engine.num_io_tensors):
            name = self._engine.get_tensor_name(index)
            if str(self._engine.get_tensor_mode(name)).endswith("INPUT"):
                yield tuple(self._engine.get_tensor_shape(name))
