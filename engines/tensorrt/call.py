"""A call: one graph at one shape, everything of a step in one captured graph.

The copy of the small inputs to the device, TensorRT's enqueue, the copy of the predictions to
page-locked memory. Its first run is eager, because TensorRT sets itself up in the first enqueue
after a change of shape; then it is captured, and replayed from there on. Every call has an
execution context of its own, since a captured graph is only good for the shapes that its context
had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lacache_trt.engines.tensorrt.device import Device
from lacache_trt.engines.tensorrt.loaded import LoadedPlan, engine_error
from lacache_trt.engines.tensorrt.profiles import Profile
from lacache_trt.engines.tensorrt.staging import Staging, shape_of
from lacache_trt.errors import CapacityError


class Step(NamedTuple):
    """Sizes in which the steps of a lane differ.

    Attributes:
        read: R.
        width: W; 0 where there is no window.
        block: Bk of a window, which may be another than that of the fill before it; else 0.
    """

    read: int
    width: int = 0
    block: int = 0


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

    def sizes(self, read: int = 0, width: int = 0, block: int = 0) -> dict[str, int]:
        """Value of each symbol of the contract, for the fields of a `Step`."""
        return {
            "B": self.rows,
            "N": self.columns,
            "Bk": block or self.block,
            "W": width,
            "S": self.suppressed,
            "E": self.excluded,
            "R": read,
        }


@dataclass(frozen=True)
class Resources:
    """What the lanes of an engine share.

    Attributes:
        trt: the Python module.
        logger: keeps TensorRT's last errors.
        device: the GPU.
        profiles: optimisation profiles of the plans, in their order.
        plans: `fill` and `reuse`; with approximate caches `reuse-kv` and `window` too.
        weights: addresses of the shared weights by name.
        scratch: address of the activation memory; one call runs at a time.
        scratch_bytes: its size.
    """

    trt: Any
    logger: Any
    device: Device
    profiles: tuple[Profile, ...]
    plans: Mapping[str, LoadedPlan]
    weights: Mapping[str, int]
    scratch: int
    scratch_bytes: int


def covers_window(profile: Profile, sizes: Mapping[str, int]) -> bool:
    """Whether a profile covers a window's step but for W and R."""
    return all(profile.covers(symbol, sizes[symbol]) for symbol in ("B", "N", "Bk", "S", "E"))


def profile_for(profiles: Sequence[Profile], shape: LaneShape, step: Step) -> int:
    """Index of a step's profile: the lane's own, for a window the first that covers it.

    Raises:
        CapacityError: it does not cover the step.
    """
    suiting, sizes = [shape.profile], shape.sizes(*step)
    if step.width:
        suiting = [
            index
            for index, profile in enumerate(profiles)
            if covers_window(profile, sizes) and profile.covers("W", step.width)
        ]
    for index in suiting:
        if profiles[index].covers("R", step.read):
            return index
    raise CapacityError(
        "the engine's profile does not cover this many logit columns",
        got=step.read,
        expected=" or ".join(profiles[index].text("R") for index in suiting),
        fix=f"build again with --profile ...,R=0:0:{step.read}",
    )


class Call:
    """One graph at one shape: eager once, then captured."""

    def __init__(
        self,
        resources: Resources,
        graph: str,
        shape: LaneShape,
        step: Step,
        addresses: Mapping[str, int],
        before: Staging,
        after: Staging | None,
    ) -> None:
        self._resources, self._name = resources, graph
        self._before, self._after = before, after
        self._captured: Any = None
        self._warm = False
        plan = resources.plans[graph]
        self._context = plan.context(resources.trt, resources.logger)
        profile = profile_for(resources.profiles, shape, step) if step.width else shape.profile
        self._bind(plan, profile, shape.sizes(*step), addresses)

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
        profile: int,
        sizes: Mapping[str, int],
        addresses: Mapping[str, int],
    ) -> None:
        resources, context = self._resources, self._context
        stream = resources.device.stream
        self._must(context.set_optimization_profile_async(profile, stream), "profile")
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
