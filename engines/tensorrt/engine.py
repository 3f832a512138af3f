"""The TensorRT engine: the plans, lanes of captured graphs, one stream.

It runs without torch and without Triton; the plugins' kernels lie in the plans. Nothing of an
engine directory is executed on the host: `engine_host_code_allowed` stays off, and the plugin
library is this installation's own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lacache_trt.artifacts import Manifest
from lacache_trt.closing import ClosesOnExit
from lacache_trt.contract import caches_of
from lacache_trt.engines.base import Capabilities, StepOutputs
from lacache_trt.engines.padding import BUCKET, LISTED_IDS, Arrays, Size, no_room, row_bucket
from lacache_trt.engines.tensorrt.call import LaneShape, Resources, Step, covers_window, profile_for
from lacache_trt.engines.tensorrt.device import CudaDevice, Device
from lacache_trt.engines.tensorrt.kept import Runs, kept_bytes, window_bytes
from lacache_trt.engines.tensorrt.lane import Lane, lane_bytes
from lacache_trt.engines.tensorrt.opening import Opened, check_machine, import_flavour, open_plans
from lacache_trt.engines.tensorrt.session import TensorRTSession
from lacache_trt.engines.windows import WINDOW_FIX_OF_BUILD, window_bucket
from lacache_trt.errors import CapacityError, EngineError

MAX_LANES = 16


def load(manifest: Manifest, trt: Any = None, device: Device | None = None) -> TensorRTEngine:
    """Open an engine directory whose manifest has been checked.

    `trt` and `device` are this machine's unless tests give their own.

    Raises:
        MissingDependencyError: TensorRT, PyCUDA or a GPU is missing.
        ArtifactError: the plans are for another TensorRT, GPU or plugin library.
        CapacityError: the plans do not fit into the device's memory.
        EngineError: TensorRT refuses a plan.
    """
    trt = trt if trt is not None else import_flavour(manifest)
    with ExitStack() as undo:
        if device is None:
            device = CudaDevice()
        undo.callback(device.close)
        check_machine(manifest, trt, device)
        with device.activated():
            engine = TensorRTEngine(manifest, device, open_plans(manifest, trt, device))
        undo.pop_all()
    return engine


class TensorRTEngine(ClosesOnExit):
    """A loaded model; sessions on any thread share its plans, stream and lanes."""

    def __init__(self, manifest: Manifest, device: Device, opened: Opened) -> None:
        self.name = str(manifest.body["engine"])
        self.config = manifest.model
        self.device = device.name
        self._device = device
        self._profiles = opened.profiles
        self._resources: Resources | None = opened.resources
        self._opened: Opened | None = opened
        self._lock = threading.RLock()
        self._free: OrderedDict[int, Lane] = OrderedDict()
        self._lanes: dict[int, Lane] = {}
        self.capabilities = Capabilities(
            caches=caches_of(opened.resources.plans),
            logits=any(profile.ranges["R"].high > 0 for profile in self._profiles),
            max_batch=max(profile.ranges["B"].high for profile in self._profiles),
            window_fix=WINDOW_FIX_OF_BUILD,
        )

    def session(self) -> TensorRTSession:
        """A new session; it takes a lane at its first fill and gives it back when closed."""
        self._require_open()
        return TensorRTSession(self)

    def shape_for(self, rows: int, columns: int, block: int) -> LaneShape:
        """The lane that a batch goes into, of the first profile that covers it.

        A batch with fewer rows than a profile's least gets more, as `padding.with_rows` does it.

        Raises:
            CapacityError: no profile covers it.
        """
        for index, profile in enumerate(self._profiles):
            many = profile.clipped("B", row_bucket(rows))
            bucket = profile.clipped("N", -(-columns // BUCKET) * BUCKET)
            if rows <= many and columns <= bucket and profile.covers("Bk", block):
                suppressed, excluded = (profile.clipped(each, LISTED_IDS) for each in ("S", "E"))
                return LaneShape(many, bucket, block, suppressed, excluded, index)
        raise CapacityError(
            "no optimisation profile of this engine covers the request",
            got=f"B={rows}, N={columns}, Bk={block}",
            expected=" or ".join(profile.text("B", "N", "Bk") for profile in self._profiles),
            fix=f"build again with --profile B={rows},N={columns},Bk={block} or a range around it",
        )

    def require_covered(self, shape: LaneShape, step: Step) -> None:
        """Raise `CapacityError` unless a profile covers the lane's step."""
        profile_for(self._profiles, shape, step)

    def window_width(self, shape: LaneShape, width: int, block: int) -> int:
        """The width that a window of the lane is padded to.

        It is the block's own or the next multiple of 64, up to the canvas's columns, brought into
        the range of the first profile that covers the lane and the window.

        Raises:
            CapacityError: no profile does.
        """
        bucket, sizes = min(window_bucket(width, block), shape.columns), shape.sizes(block=block)
        for profile in self._profiles:
            wide = profile.clipped("W", bucket)
            if width <= wide and covers_window(profile, sizes):
                return wide
        raise CapacityError(
            "no optimisation profile of this engine covers the window",
            got=f"W={width}, Bk={block}",
            expected=" or ".join(profile.text("W", "Bk") for profile in self._profiles),
            fix=f"build again with --profile ...,W={width},Bk={block} or ranges around them",
        )

    def acquire(self, shape: LaneShape, asked: Size) -> Lane:
        """A free lane of the shape, or a new one, for a batch of the size that was asked for.

        Raises:
            CapacityError: a new lane does not fit into the device's memory.
        """
        with self._lock:
            resources = self._require_open()
            for key, lane in reversed(self._free.items()):
                if lane.shape == shape:
                    del self._free[key]
                    return lane
            with self._device.activated():
                while len(self._lanes) >= MAX_LANES and self._free:
                    self._evict()
                self._make_room(lane_bytes(resources.plans, shape), shape, asked)
                lane = Lane(resources, shape)
            self._lanes[id(lane)] = lane
            return lane

    def reserve(self, lane: Lane, asked: Size, width: int = 0) -> None:
        """Give a batch's lane room for K and V of all layers, and for those of windows so wide.

        Raises:
            CapacityError: they do not fit into the device's memory.
        """
        with self._lock:
            plans, kept = self._require_open().plans, lane.kept
            needed = 0 if kept is not None else kept_bytes(plans, lane.shape)
            if width and (kept is None or not kept.has_window(width)):
                needed += window_bytes(plans, lane.shape, width)
            if needed:
                with self._device.activated():
                    self._make_room(needed, lane.shape, asked)
                    lane.keep(width)

    def release(self, lane: Lane) -> None:
        """Take a lane back; it stays captured for the next session of its shape."""
        with self._lock:
            if self._resources is not None:
                self._free[id(lane)] = lane

    def run(self, lane: Lane, name: str, inputs: Arrays, *runs: Runs) -> None:
        """Enqueue a graph of the lane; one thread enqueues at a time. Only a window has runs."""
        with self._lock:
            self._require_open()
            with self._device.activated():
                getattr(lane, name)(inputs, *runs)

    def collect(self, lane: Lane, step: Step, rows: int) -> StepOutputs:
        """Wait for a lane's step and copy `rows` rows; other threads may enqueue meanwhile."""
        with self._device.activated():
            lane.wait()
        with self._lock:
            self._require_open()
            with self._device.activated():
                return lane.collect(step, rows)

    def read_caches(self, lane: Lane, keeps: bool) -> dict[str, NDArray[np.float32]]:
        """Copies of a lane's caches; `keeps` adds keys and values."""
        with self._lock:
            self._require_open()
            with self._device.activated():
                return lane.cache_arrays(keeps)

    def close(self) -> None:
        """Release plans, lanes and memory; calls in flight end with `EngineError`."""
        with self._lock:
            if self._resources is None:
                return
            with self._device.activated():
                for lane in self._lanes.values():
                    lane.release()
                self._lanes.clear()
                self._free.clear()
                self._resources = self._opened = None
            self._device.close()

    def _require_open(self) -> Resources:
        if self._resources is None:
            raise EngineError("the engine is closed", fix="load it again with Runtime.load")
        return self._resources

    def _evict(self) -> None:
        """Release the idle lane that was used longest ago."""
        key, lane = self._free.popitem(last=False)
        lane.release()
        del self._lanes[key]

    def _make_room(self, needed: int, shape: LaneShape, asked: Size) -> None:
        """Release idle lanes until so much more fits; `CapacityError` if it never will."""
        while needed > self._device.free_bytes() and self._free:
            self._evict()
        free = self._device.free_bytes()
        if needed > free:
            raise no_room(asked, (shape.rows, shape.columns), needed, free)
