"""The CUDA engine: weights once on the device, lanes of captured graphs, one stream."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor

from lacache_trt.artifacts import Manifest
from lacache_trt.closing import ClosesOnExit
from lacache_trt.engines.base import Capabilities
from lacache_trt.engines.cuda.fp8 import Fp8Table, require_fp8, require_per_group
from lacache_trt.engines.cuda.fused_window import fused_window
from lacache_trt.engines.cuda.gemm import GemmTable
from lacache_trt.engines.cuda.kept import kept_bytes
from lacache_trt.engines.cuda.lane import Arrays, Lane, LaneShape, lane_bytes
from lacache_trt.engines.cuda.ops import CudaOps
from lacache_trt.engines.cuda.session import BUCKET, CudaSession
from lacache_trt.engines.padding import Size, no_room
from lacache_trt.errors import ArtifactError, CapacityError, EngineError, MissingDependencyError
from lacache_trt.model.config import ModelConfig, parameter_shapes
from lacache_trt.model.fp8 import fp8_linears
from lacache_trt.model.transformer import Transformer

MAX_LANES = 32
_HEADROOM_BYTES = 256 * 2**20
_CAPABILITIES = Capabilities(caches=frozenset({"none", "exact", "prefix", "dual"}), logits=True)


def require_cuda() -> None:
    """Raise `MissingDependencyError` unless torch sees a CUDA device."""
    if not torch.cuda.is_available():
        raise MissingDependencyError(
            "the cuda engine needs an NVIDIA GPU that torch can use",
            got=f"torch {torch.__version__} sees no CUDA device",
            fix="install a CUDA build of torch on a machine with a GPU, "
            "or build with --engine onnxruntime",
        )


def load(manifest: Manifest) -> CudaEngine:
    """Open an engine directory whose manifest has been checked."""
    require_cuda()
    from safetensors import safe_open

    capability = list(torch.cuda.get_device_capability())
    if manifest.body.get("compute_capability") != capability:
        raise ArtifactError(
            "the engine was built for another GPU",
            got=f"built for {manifest.body.get('compute_capability')}",
            expected=f"compute capability {capability}",
            fix="build it again on this machine: lacache-trt build BUNDLE OUT --engine cuda",
        )
    linears = fp8_linears(manifest.body, manifest.model)
    require_per_group(manifest.body)
    require_fp8(linears)
    path = manifest.path("weights.safetensors")
    _check_fits(path.stat().st_size)
    with safe_open(path, framework="pt", device="cuda") as file:
        names = parameter_shapes(manifest.model, linears)
        weights = {name: file.get_tensor(name) for name in names}
    gemms = GemmTable.from_json(manifest.body.get("gemms"))
    fp8_gemms = Fp8Table.from_json(manifest.body.get("fp8_gemms", []))
    return CudaEngine(manifest.model, weights, gemms, fp8_gemms)


def device_model(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    gemms: GemmTable,
    fp8_gemms: Fp8Table | None = None,
) -> Transformer:
    """The model over weights on the device, which it does not copy.

    Linears that come with scales are FP8.
    """
    fp8 = [name.removesuffix(".scale") for name in weights if name.endswith(".scale")]
    with torch.device("meta"):
        ops = CudaOps(gemms, fp8_gemms)
        model = Transformer(config, ops, weights["embed.weight"].dtype, fp8)
    for name in parameter_shapes(config, fp8):
        parameter = torch.nn.Parameter(weights[name], requires_grad=False)
        model.weights[name.replace(".", "/")] = parameter
    return model.eval()


class CudaEngine(ClosesOnExit):
    """A loaded model; sessions on any thread share its weights, stream and lanes."""

    name = "cuda"
    capabilities = _CAPABILITIES

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        gemms: GemmTable,
        fp8_gemms: Fp8Table | None = None,
    ) -> None:
        require_cuda()
        self.config = config
        self.device = torch.cuda.get_device_name()
        model = device_model(config, weights, gemms, fp8_gemms)
        if isinstance(model.ops, CudaOps):
            model.ops.fused_window = fused_window(model)
        self._model: Transformer | None = model
        self._gemms = gemms
        self._fp8_gemms = fp8_gemms or Fp8Table({})
        self._element_bytes = weights["embed.weight"].element_size()
        self._stream = torch.cuda.Stream()
        # The weights may still be on their way on the stream that loaded them.
        self._stream.wait_stream(torch.cuda.current_stream())
        self._pool = torch.cuda.graph_pool_handle()
        self._lock = threading.RLock()
        self._free: OrderedDict[int, Lane] = OrderedDict()
        self._lanes = 0

    def session(self) -> CudaSession:
        """A new session; it takes a lane at its first fill and gives it back when closed."""
        self._require_open()
        return CudaSession(self)

    def acquire(self, shape: LaneShape, asked: Size) -> Lane:
        """A free lane of the shape, or a new one, for a batch of the size that was asked for.

        Raises:
            CapacityError: a new lane does not fit into the device's memory.
        """
        with self._lock:
            model = self._require_open()
            for key, lane in reversed(self._free.items()):
                if lane.shape == shape:
                    del self._free[key]
                    return lane
            while self._lanes >= MAX_LANES and self._free:
                self._evict()
            needed = lane_bytes(self.config, shape, self._element_bytes)
            self._make_room(needed, shape, asked)
            lane = Lane(model, shape, self._stream, self._pool)
            self._lanes += 1
            return lane

    def keep(self, lane: Lane, asked: Size) -> None:
        """Give the lane of a batch room for K and V of all layers.

        Raises:
            CapacityError: they do not fit into the device's memory.
        """
        with self._lock:
            self._require_open()
            if lane.kept is None:
                rows, columns = lane.shape.rows, lane.shape.columns
                needed = kept_bytes(self.config, rows, columns, self._element_bytes)
                self._make_room(needed, lane.shape, asked)
                lane.keep()

    def release(self, lane: Lane) -> None:
        """Take a lane back; it stays captured for the next session of its shape."""
        with self._lock:
            if self._model is not None:
                self._free[id(lane)] = lane

    def run(self, lane: Lane, name: str, inputs: Arrays) -> None:
        """Enqueue a graph of the lane; one thread enqueues at a time."""
        with self._lock:
            self._require_open()
            try:
                getattr(lane, name)(inputs)
            except torch.OutOfMemoryError as error:
                raise CapacityError(
                    "the device ran out of memory",
                    got=str(error).splitlines()[0],
                    fix="use a smaller batch or a shorter canvas",
                ) from error
            except RuntimeError as error:
                raise EngineError(
                    f"the device failed in the graph {name!r}", got=str(error).strip()
                ) from error

    def floor_milliseconds(self, rows: int, columns: int, block: int, repeats: int) -> float:
        """Device time of a step's GEMMs and attention alone; see `floor`."""
        from lacache_trt.engines.cuda.floor import floor_milliseconds

        model = self._require_open()
        names = parameter_shapes(self.config, model.fp8)
        weights = {name: model.weight(name) for name in names}
        sizes = (rows, -(-columns // BUCKET) * BUCKET, block)
        return floor_milliseconds(
            self.config, weights, self._gemms, sizes, repeats, fp8_gemms=self._fp8_gemms
        )

    def close(self) -> None:
        """Release weights, lanes and graphs; calls in flight end with `EngineError`."""
        with self._lock:
            self._stream.synchronize()
            self._free.clear()
            self._model = None
            torch.cuda.empty_cache()

    def _require_open(self) -> Transformer:
        if self._model is None:
            raise EngineError("the engine is closed", fix="load it again with Runtime.load")
        return self._model

    def _evict(self) -> None:
        """Drop the idle lane that was used longest ago."""
        self._free.popitem(last=False)
        self._lanes -= 1

    def _make_room(self, needed: int, shape: LaneShape, asked: Size) -> None:
        """Drop idle lanes until so much more fits; `CapacityError` if it never will."""
        needed += _HEADROOM_BYTES
        free = _free_bytes()
        while needed > free and self._free:
            self._evict()
            free = _free_bytes()
        if needed > free:
            raise no_room(asked, (shape.rows, shape.columns), needed, free)


def _free_bytes() -> int:
    """Memory that the device has free, and what this process holds but does not use."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _check_fits(needed: int) -> None:
    free = _free_bytes()
    if needed > free:
        raise CapacityError(
            "the weights do not fit into the device's memory",
            got=f"{free:,} bytes free",
            expected=f"{needed:,} bytes",
            fix="free memory on the device, or use a larger one",
        )
