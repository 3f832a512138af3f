"""A lane: buffers and captured graphs for one (rows, columns, block columns).

`fill` writes the caches, `reuse` reads them, both in place. A call is everything of a step: the
copy of the small inputs to the device, TensorRT's enqueue, the copy of the predictions to
page-locked memory. Its first run is eager, because TensorRT sets itself up in the first enqueue
after a change of shape; then it is captured, and replayed from there on. Every call has an
execution context of its own, since a captured graph is only good for the shapes that its context
had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lacache_trt.contract import LOGIT_COLUMNS, SAMPLING, TensorSpec
from lacache_trt.engines.base import StepOutputs
from lacache_trt.engines.padding import Arrays
from lacache_trt.engines.tensorrt.device import Device
from lacache_trt.engines.tensorrt.loaded import LoadedPlan, engine_error
from lacache_trt.engines.tensorrt.staging import Staging, bytes_of, shape_of
from lacache_trt.errors import EngineError

BLOCK_TOKENS = "block_tokens"
_STEP_NAMES = (BLOCK_TOKENS, *(spec.name for spec in SAMPLING), LOGIT_COLUMNS.name)


@dataclass(frozen=True)
class LaneShape:
    """Sizes of a lane and the optimisation profile that covers them.

    Attributes:
        rows: B.
        columns: N, a bucket.
        block: Bk.
        suppressed: S.
        excluded: E.
        profile: index of the profile.
    """

    rows: int
    columns: int
    block: int
    suppressed: int
    excluded: int
    profile: int

    def sizes(self, logit_columns: int = 0) -> dict[str, int]:
        """Value of each symbol of the contract."""
        return {
            "B": self.rows,
            "N": self.columns,
            "Bk": self.block,
            "S": self.suppressed,
            "E": self.excluded,
            "R": logit_columns,
        }


@dataclass(frozen=True)
class Resources:
    """What the lanes of an engine share.

    Attributes:
        trt: the Python module.
        logger: keeps TensorRT's last errors.
        device: the GPU.
        plans: `fill` and `reuse`.
        weights: addresses of the shared weights by name.
        scratch: address of the activation memory; one call runs at a time.
        scratch_bytes: its size.
    """

    trt: Any
    logger: Any
    device: Device
    plans: Mapping[str, LoadedPlan]
    weights: Mapping[str, int]
    scratch: int
    scratch_bytes: int


class _Call:
    """One graph at one shape: eager once, then captured."""

    def __init__(
        self,
        resources: Resources,
        graph: str,
        shape: LaneShape,
        addresses: Mapping[str, int],
        logit_columns: int,
        before: Staging,
        after: Staging | None,
    ) -> None:
        self._resources, self._name = resources, graph
        self._before, self._after = before, after
        self._captured: Any = None
        self._warm = False
        plan = resources.plans[graph]
        self._context = plan.context(resources.trt, resources.logger)
        self._bind(plan, shape, shape.sizes(logit_columns), addresses)

    def run(self) -> None:
        """Enqueue it."""
        device = self._resources.device
        if self._captured is not None:
            device.replay(self._captured)
            return
        self._enqueue()
        if not self._warm and self._capturable():
            device.synchronize()
            self._captured = device.capture(self._enqueue)
        self._warm = True

    def release(self) -> None:
        """Release graph and context."""
        if self._captured is not None:
            self._resources.device.destroy(self._captured)
        self._captured = self._context = None

    def _enqueue(self) -> None:
        self._before.upload()
        if not self._context.execute_async_v3(self._resources.device.stream):
            raise engine_error(
                f"TensorRT failed in the graph {self._name!r}", self._resources.logger
            )
        if self._after is not None:
            self._after.download()

    def _capturable(self) -> bool:
        """TensorRT-RTX can say; TensorRT always is."""
        ask = getattr(self._context, "is_stream_capturable", None)
        return ask is None or bool(ask(self._resources.device.stream))

    def _bind(
        self,
        plan: LoadedPlan,
        shape: LaneShape,
        sizes: Mapping[str, int],
        addresses: Mapping[str, int],
    ) -> None:
        resources, context = self._resources, self._context
        stream = resources.device.stream
        self._must(context.set_optimization_profile_async(shape.profile, stream), "profile")
        resources.device.synchronize()
        context.set_device_memory(resources.scratch, resources.scratch_bytes)
        for spec in plan.inputs:
            dims = shape_of(spec, sizes)
            self._must(context.set_input_shape(spec.name, dims), f"{spec.name} of shape {dims}")
        for spec in (*plan.inputs, *plan.outputs):
            self._must(context.set_tensor_address(spec.name, addresses[spec.name]), spec.name)
        missing = context.infer_shapes()
        self._must(not missing, f"shapes; unknown: {', '.join(missing)}")

    def _must(self, done: bool, what: str) -> None:
        if not done:
            raise engine_error(
                f"TensorRT refused for {self._name!r}: {what}", self._resources.logger
            )


class Lane:
    """Static inputs, caches, outputs and calls of one shape. One thread at a time enqueues."""

    def __init__(self, resources: Resources, shape: LaneShape) -> None:
        self.shape = shape
        self._resources, self._device = resources, resources.device
        fill = resources.plans["fill"].spec
        self._geometry_specs = [spec for spec in fill.inputs if spec.name not in resources.weights]
        self._cache_specs = fill.outputs
        self._calls: dict[tuple[str, int], _Call] = {}
        self._steps: dict[int, tuple[Staging, Staging]] = {}
        self._caches: dict[str, int] = {}
        self._idle: Any = None
        self._geometry = Staging(self._device, self._geometry_specs, shape.sizes())
        try:
            for spec in self._cache_specs:
                self._caches[spec.name] = self._device.allocate(bytes_of(spec, shape.sizes()))
        except EngineError:
            self.release()
            raise

    def fill(self, inputs: Arrays) -> None:
        """Enqueue the computation of the caches."""
        self.wait()
        self._geometry.write(inputs)
        self._run("fill", 0, self._geometry, None)

    def reuse(self, inputs: Arrays) -> None:
        """Enqueue one step; `collect` waits for it."""
        read = inputs[LOGIT_COLUMNS.name].shape[1]
        staged, outputs = self._step(read)
        self.wait()
        staged.write(inputs)
        self._run("reuse", read, staged, outputs)

    def collect(self, logit_columns: int, rows: int) -> StepOutputs:
        """Wait for the last step and copy the first `rows` rows of its outputs."""
        self.wait()
        arrays = self._steps[logit_columns][1].arrays
        return StepOutputs(**{name: array[:rows].copy() for name, array in arrays.items()})

    def wait(self) -> None:
        """Wait for the lane's last call."""
        if self._idle is not None:
            self._device.wait(self._idle)

    def cache_bytes(self) -> int:
        """Bytes of the caches."""
        return sum(bytes_of(spec, self.shape.sizes()) for spec in self._cache_specs)

    def cache_arrays(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the caches as float32, for checks."""
        self.wait()
        return {spec.name: self._read(spec) for spec in self._cache_specs}

    def release(self) -> None:
        """Release everything."""
        self._device.synchronize()
        for call in self._calls.values():
            call.release()
        for staging in (self._geometry, *(each for pair in self._steps.values() for each in pair)):
            staging.release()
        for address in self._caches.values():
            self._device.release(address)
        self._calls, self._steps, self._caches, self._idle = {}, {}, {}, None

    def _run(self, graph: str, read: int, before: Staging, after: Staging | None) -> None:
        if (graph, read) not in self._calls:
            addresses = {**self._resources.weights, **self._geometry.addresses, **self._caches}
            addresses |= before.addresses | (after.addresses if after is not None else {})
            self._calls[graph, read] = _Call(
                self._resources, graph, self.shape, addresses, read, before, after
            )
        self._calls[graph, read].run()
        self._idle = self._device.record(self._idle)

    def _step(self, read: int) -> tuple[Staging, Staging]:
        """Inputs and outputs of a step that reads `read` logit columns."""
        if read not in self._steps:
            spec, sizes = self._resources.plans["reuse"].spec, self.shape.sizes(read)
            inputs = [tensor for tensor in spec.inputs if tensor.name in _STEP_NAMES]
            staged = Staging(self._device, inputs, sizes)
            self._steps[read] = staged, Staging(self._device, spec.outputs, sizes)
        return self._steps[read]

    def _read(self, spec: TensorSpec) -> NDArray[np.float32]:
        sizes = self.shape.sizes()
        nbytes = bytes_of(spec, sizes)
        host = self._device.pinned(nbytes)
        self._device.download(host, self._caches[spec.name])
        self._device.synchronize()
        raw = host.copy()
        self._device.unpin(host)
        shape = shape_of(spec, sizes)
        if spec.dtype == "bfloat16":
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.view(spec.dtype).astype(np.float32)
        return values[: int(np.prod(shape))].reshape(shape)


def lane_bytes(plans: Mapping[str, LoadedPlan], shape: LaneShape) -> int:
    """Device bytes of a lane at its start."""
    fill, reuse = plans["fill"].spec, plans["reuse"].spec
    sizes = shape.sizes()
    step = [spec for spec in reuse.inputs if spec.name in _STEP_NAMES]
    geometry = [spec for spec in fill.inputs if any(isinstance(dim, str) for dim in spec.shape)]
    specs = (*geometry, *fill.outputs, *step, *reuse.outputs)
    return sum(bytes_of(spec, sizes) for spec in specs)
