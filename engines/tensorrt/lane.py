"""A lane: buffers and captured graphs for one (rows, columns, block columns).

`fill` writes the caches, `reuse` reads them, both in place. `reuse_kv` writes K and V of all layers
too, `window` reads them (`KeptCaches`). Each graph has a call per number of logit columns and, for
a window, per width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lacache_trt.contract import LOGIT_COLUMNS, SAMPLING, WINDOW, TensorSpec
from lacache_trt.engines.base import StepOutputs
from lacache_trt.engines.padding import Arrays
from lacache_trt.engines.tensorrt.call import Call, LaneShape, Resources, Step
from lacache_trt.engines.tensorrt.kept import KeptCaches, Runs
from lacache_trt.engines.tensorrt.loaded import LoadedPlan
from lacache_trt.engines.tensorrt.staging import Staging, bytes_of, shape_of
from lacache_trt.errors import EngineError

BLOCK_TOKENS = "block_tokens"
BLOCK_COLUMNS = "block_columns"
WINDOW_TOKENS, WINDOW_COLUMNS = (spec.name for spec in WINDOW)
_SAMPLING_NAMES = (*(spec.name for spec in SAMPLING), LOGIT_COLUMNS.name)
_STEP_NAMES = (BLOCK_TOKENS, *_SAMPLING_NAMES)
_WINDOW_NAMES = (WINDOW_TOKENS, WINDOW_COLUMNS, BLOCK_COLUMNS, *_SAMPLING_NAMES)


class Lane:
    """Static inputs, caches, outputs and calls of one shape. One thread at a time enqueues."""

    def __init__(self, resources: Resources, shape: LaneShape) -> None:
        self.shape = shape
        self._resources, self._device = resources, resources.device
        fill = resources.plans["fill"].spec
        self._geometry_specs = [spec for spec in fill.inputs if spec.name not in resources.weights]
        self._cache_specs = fill.outputs
        self._calls: dict[tuple[str, Step], Call] = {}
        self._steps: dict[int, tuple[Staging, Staging]] = {}
        self._windows: dict[Step, tuple[Staging, Staging]] = {}
        self._caches: dict[str, int] = {}
        self.kept: KeptCaches | None = None
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
        self._run("fill", Step(0), self._geometry, None)

    def reuse(self, inputs: Arrays) -> None:
        """Enqueue one step; `collect` waits for it."""
        self._write_and_run("reuse", Step(_read(inputs)), inputs)

    def reuse_kv(self, inputs: Arrays) -> None:
        """`reuse` that also writes `kept`."""
        self._require_kept()
        self._write_and_run("reuse-kv", Step(_read(inputs)), inputs)

    def window(self, inputs: Arrays, runs: Runs) -> None:
        """Enqueue one step of a window over `kept`, which it updates; `collect` waits for it.

        `runs` are those of the rows that are not repeated ones.
        """
        kept, step = self._require_kept(), window_step(inputs)
        self._write_and_run("window", step, inputs)
        kept.put(step.width, runs)
        self._idle = self._device.record(self._idle)

    def keep(self, width: int = 0) -> None:
        """Allocate `kept`, and its buffers for windows of this width."""
        if self.kept is None:
            self.kept = KeptCaches(self._resources, self.shape)
        if width:
            self.kept.window(width)

    def collect(self, step: Step, rows: int) -> StepOutputs:
        """Wait for the last step and copy the first `rows` rows of its outputs."""
        self.wait()
        arrays = self._step(step)[1].arrays
        return StepOutputs(**{name: array[:rows].copy() for name, array in arrays.items()})

    def wait(self) -> None:
        """Wait for the lane's last call."""
        if self._idle is not None:
            self._device.wait(self._idle)

    def cache_bytes(self) -> int:
        """Bytes of the caches."""
        kept = self.kept.nbytes() if self.kept is not None else 0
        return kept + sum(bytes_of(spec, self.shape.sizes()) for spec in self._cache_specs)

    def cache_arrays(self, keeps: bool) -> dict[str, NDArray[np.float32]]:
        """Copies of the caches as float32, for checks; `keeps` adds keys and values."""
        self.wait()
        caches = {spec.name: self._copy(spec, self._caches) for spec in self._cache_specs}
        if keeps:
            kept = self._require_kept()
            caches |= {spec.name: self._copy(spec, kept.addresses) for spec in kept.specs}
        return caches

    def release(self) -> None:
        """Release everything."""
        self._device.synchronize()
        for call in self._calls.values():
            call.release()
        pairs = (*self._steps.values(), *self._windows.values())
        for staging in (self._geometry, *(each for pair in pairs for each in pair)):
            staging.release()
        for address in self._caches.values():
            self._device.release(address)
        if self.kept is not None:
            self.kept.release()
        self._calls, self._steps, self._windows, self._caches = {}, {}, {}, {}
        self.kept, self._idle = None, None

    def _require_kept(self) -> KeptCaches:
        if self.kept is None:
            raise EngineError("the lane keeps no K and V", fix="call reuse_kv before window")
        return self.kept

    def _write_and_run(self, graph: str, step: Step, inputs: Arrays) -> None:
        staged, outputs = self._step(step)
        self.wait()
        staged.write(inputs)
        self._run(graph, step, staged, outputs)

    def _run(self, graph: str, step: Step, before: Staging, after: Staging | None) -> None:
        if (graph, step) not in self._calls:
            addresses = {**self._resources.weights, **self._geometry.addresses, **self._caches}
            if self.kept is not None:
                windows = self.kept.window(step.width) if step.width else {}
                addresses |= self.kept.addresses | windows
            addresses |= before.addresses | (after.addresses if after is not None else {})
            self._calls[graph, step] = Call(
                self._resources, graph, self.shape, step, addresses, before, after
            )
        self._calls[graph, step].run()
        self._idle = self._device.record(self._idle)

    def _step(self, step: Step) -> tuple[Staging, Staging]:
        """Inputs and outputs of a step of these sizes."""
        if not step.width and step.read not in self._steps:
            self._steps[step.read] = self._stage("reuse", _STEP_NAMES, step)
        if step.width and step not in self._windows:
            self._windows[step] = self._stage("window", _WINDOW_NAMES, step)
        return self._windows[step] if step.width else self._steps[step.read]

    def _stage(self, graph: str, names: tuple[str, ...], step: Step) -> tuple[Staging, Staging]:
        """Inputs of those names; the outputs are the predictions, which are those of `reuse`."""
        plans, sizes = self._resources.plans, self.shape.sizes(*step)
        inputs = [tensor for tensor in plans[graph].spec.inputs if tensor.name in names]
        staged = Staging(self._device, inputs, sizes)
        return staged, Staging(self._device, plans["reuse"].spec.outputs, sizes)

    def _copy(self, spec: TensorSpec, addresses: Mapping[str, int]) -> NDArray[np.float32]:
        sizes = self.shape.sizes()
        nbytes = bytes_of(spec, sizes)
        host = self._device.pinned(nbytes)
        self._device.download(host, addresses[spec.name])
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


def window_step(inputs: Arrays) -> Step:
    """Sizes of a window's step."""
    width, block = (inputs[name].shape[1] for name in (WINDOW_COLUMNS, BLOCK_COLUMNS))
    return Step(_read(inputs), width, block)


def _read(inputs: Arrays) -> int:
    """R of a step."""
    return int(inputs[LOGIT_COLUMNS.name].shape[1])
