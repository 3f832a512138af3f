"""A plan that TensorRT has opened, checked against the manifest."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lacache_trt.contract import GraphSpec, TensorSpec
from lacache_trt.engines.tensorrt.interrupts import interrupts_kept
from lacache_trt.engines.tensorrt.layout import TYPES
from lacache_trt.errors import ArtifactError, EngineError

_REBUILD = "build the engine again on this machine: lacache-trt build BUNDLE OUT --force"


@dataclass(frozen=True)
class LoadedPlan:
    """One graph in TensorRT.

    Attributes:
        spec: its contract, shared weights included.
        engine: TensorRT's engine.
        scratch_bytes: memory for activations that every execution context needs.
        absent: tensors of the contract that the plan lacks, because they are always empty.
    """

    spec: GraphSpec
    engine: Any
    scratch_bytes: int
    absent: frozenset[str] = frozenset()

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs that are to be bound."""
        return tuple(spec for spec in self.spec.inputs if spec.name not in self.absent)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs that are to be bound."""
        return tuple(spec for spec in self.spec.outputs if spec.name not in self.absent)

    def context(self, trt: Any, logger: Any) -> Any:
        """A new execution context; the caller gives it memory."""
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        with interrupts_kept():
            context = self.engine.create_execution_context(strategy)
        if context is None:
            raise engine_error(f"TensorRT gives no context for {self.spec.name!r}", logger)
        return context


def open_plan(
    trt: Any,
    runtime: Any,
    logger: Any,
    path: Path,
    spec: GraphSpec,
    profiles: int,
    absent: frozenset[str] = frozenset(),
) -> LoadedPlan:
    """Deserialise a plan whose hash has been checked.

    Raises:
        EngineError: TensorRT refuses it; the error holds TensorRT's last messages.
        ArtifactError: its tensors or profiles are not those of the manifest.
    """
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        interrupts_kept(),
    ):
        engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise engine_error(f"TensorRT cannot open {path.name}", logger, fix=_REBUILD)
    _check_tensors(trt, engine, path.name, spec, absent)
    if engine.num_optimization_profiles != profiles:
        raise ArtifactError(
            f"{path.name} has other profiles than the manifest",
            got=engine.num_optimization_profiles,
            expected=profiles,
            fix=_REBUILD,
        )
    return LoadedPlan(spec, engine, int(engine.device_memory_size_v2), absent)


def _check_tensors(
    trt: Any, engine: Any, file: str, spec: GraphSpec, absent: frozenset[str]
) -> None:
    """Raise `ArtifactError` if the plan's tensors are not those of the manifest."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    got = {name: _found(trt, engine, name) for name in names}
    expected = {
        **{tensor.name: _promised(trt, tensor, "INPUT") for tensor in spec.inputs},
        **{tensor.name: _promised(trt, tensor, "OUTPUT") for tensor in spec.outputs},
    }
    expected = {name: each for name, each in expected.items() if name not in absent}
    if got != expected:
        differing = sorted(
            name for name in got.keys() | expected.keys() if got.get(name) != expected.get(name)
        )
        raise ArtifactError(
            f"the tensors of {file} differ from the manifest",
            got={name: got.get(name) for name in differing},
            expected={name: expected.get(name) for name in differing},
            fix=_REBUILD,
        )


def engine_error(what: str, logger: Any, fix: str | None = None) -> EngineError:
    """An error with what TensorRT said last."""
    return EngineError(what, got=logger.last_errors() or "no message from TensorRT", fix=fix)


def _found(trt: Any, engine: Any, name: str) -> tuple[str, str, int]:
    mode, dtype = engine.get_tensor_mode(name), engine.get_tensor_dtype(name)
    return str(mode), str(dtype), len(engine.get_tensor_shape(name))


def _promised(trt: Any, tensor: TensorSpec, mode: str) -> tuple[str, str, int]:
    dtype = getattr(trt.DataType, TYPES[tensor.dtype])
    return str(getattr(trt.TensorIOMode, mode)), str(dtype), len(tensor.shape)


def largest_scratch(plans: Sequence[LoadedPlan]) -> int:
    """Activation memory for contexts of any of the plans, of which one runs at a time."""
    return max(plan.scratch_bytes for plan in plans)
