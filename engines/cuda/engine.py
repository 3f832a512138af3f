"""The CUDA engine: weights once on the device, lanes of captured graphs, one stream."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lacache_trt.artifacts import Manifest
from lacache_trt.engines.base import Canvas, Capabilities, Int, Sampling, StepOutputs
from lacache_trt.engines.cuda.gemm import GemmTable
from lacache_trt.engines.cuda.lane import Lane, LaneShape, lane_bytes
from lacache_trt.engines.cuda.ops import CudaOps
from lacache_trt.errors import ArtifactError, CapacityError, EngineError, MissingDependencyError
from lacache_trt.model.config import ModelConfig, parameter_shapes
from lacache_trt.model.transformer import Transformer

BUCKET = 64
MAX_LANES = 16
_HEADROOM_BYTES = 256 * 2**20
_CAPABILITIES = Capabilities(caches=frozenset({"none", "exact"}), logits=True)
Arrays = Mapping[str, NDArray[np.generic]]


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
    weights: dict[str, Tensor] = {}
    _check_fits(manifest.model, manifest.path("weights.safetensors").stat().st_size)
    with safe_open(manifest.path("weights.safetensors"), framework="pt", device="cuda") as file:
        for name in parameter_shapes(manifest.model):
            weights[name] = file.get_tensor(name)
    return CudaEngine(manifest.model, weights, GemmTable.from_json(manifest.body.get("gemms")))


class CudaEngine:
    """A loaded model; sessions on any thread share its weights, stream and lanes."""

    name = "cuda"
    capabilities = _CAPABILITIES

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], gemms: GemmTable
    ) -> None:
        require_cuda()
        self.config = config
        self.device = torch.cuda.get_device_name()
        dtype = weights["embed.weight"].dtype
        with torch.device("meta"):
            model = Transformer(config, CudaOps(gemms), dtype)
        for name, value in weights.items():
            model.weights[name.replace(".", "/")] = torch.nn.Parameter(value, requires_grad=False)
        self._model: Transformer | None = model.eval()
        self._element_bytes = dtype.itemsize
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._lock = threading.RLock()
        self._free: OrderedDict[int, Lane] = OrderedDict()
        self._lanes = 0

    def session(self) -> CudaSession:
        """A new session; it takes a lane at its first fill and gives it back when closed."""
        self._require_open()
        return CudaSession(self)

    def acquire(self, shape: LaneShape) -> Lane:
        """A free lane of the shape, or a new one.

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
                self._free.popitem(last=False)
                self._lanes -= 1
            self._check_memory(shape)
            self._lanes += 1
            return Lane(model, shape, self._stream, self._pool)

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

    def close(self) -> None:
        """Release weights, lanes and graphs; calls in flight end with `EngineError`."""
        with self._lock:
            self._stream.synchronize()
            self._free.clear()
            self._model = None
            torch.cuda.empty_cache()

    def __enter__(self) -> CudaEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _require_open(self) -> Transformer:
        if self._model is None:
            raise EngineError("the engine is closed", fix="load it again with Runtime.load")
        return self._model

    def _check_memory(self, shape: LaneShape) -> None:
        needed = lane_bytes(self.config, shape, self._element_bytes) + _HEADROOM_BYTES
        free, _ = torch.cuda.mem_get_info()
        idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if needed > free + idle:
            raise CapacityError(
                f"a batch of {shape.rows} rows and {shape.columns} columns does not fit "
                "into the device's memory",
                got=f"{free + idle:,} bytes free",
                expected=f"{needed:,} bytes",
                fix="use a smaller batch or a shorter canvas",
            )


class CudaSession:
    """Caches of one batch, in a lane of the engine."""

    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine
        self._lane: Lane | None = None
        self._pads = 0
        self._filled = False

    def fill(self, canvas: Canvas, block_columns: Int) -> None:
        """Compute the caches for these blocks."""
        lane = self._lane_for(canvas, block_columns)
        self._engine.run(lane, "fill", self._geometry(canvas, block_columns))
        self._filled = True

    def reuse(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """One step over the caches of the last `fill`."""
        if self._lane is None or not self._filled:
            raise EngineError("reuse was called before fill", fix="call fill at each block's start")
        return self._step(
            self._lane, "reuse", {"block_tokens": block_tokens}, sampling, logit_columns
        )

    def plain(
        self,
        canvas: Canvas,
        block_columns: Int,
        sampling: Sampling,
        logit_columns: Int | None = None,
    ) -> StepOutputs:
        """One step without caches."""
        lane = self._lane_for(canvas, block_columns)
        geometry = self._geometry(canvas, block_columns)
        return self._step(lane, "plain", geometry, sampling, logit_columns)

    def cache_bytes(self) -> int:
        """Bytes that the caches hold now."""
        return self._lane.cache_bytes() if self._lane is not None else 0

    def close(self) -> None:
        """Give the lane back."""
        if self._lane is not None:
            self._engine.release(self._lane)
        self._lane, self._filled = None, False

    def _lane_for(self, canvas: Canvas, block_columns: Int) -> Lane:
        rows, columns = canvas.tokens.shape
        bucket = -(-columns // BUCKET) * BUCKET
        shape = LaneShape(rows, bucket, block_columns.shape[1])
        if self._lane is None or self._lane.shape != shape:
            self.close()
            self._lane = self._engine.acquire(shape)
        self._pads = bucket - columns
        return self._lane

    def _geometry(self, canvas: Canvas, block_columns: Int) -> dict[str, NDArray[np.generic]]:
        """The canvas, moved right by the pads that reach its bucket."""
        left = ((0, 0), (self._pads, 0))
        return {
            "tokens": np.pad(canvas.tokens, left),
            "positions": np.pad(canvas.positions, left),
            "valid_from": canvas.valid_from + np.int32(self._pads),
            "valid_to": canvas.valid_to + np.int32(self._pads),
            "block_columns": block_columns + np.int32(self._pads),
        }

    def _step(
        self,
        lane: Lane,
        graph: str,
        inputs: Arrays,
        sampling: Sampling,
        logit_columns: Int | None,
    ) -> StepOutputs:
        rows = len(sampling.seed)
        columns = np.zeros((rows, 0), np.int32) if logit_columns is None else logit_columns
        moved = {"logit_columns": columns + np.int32(self._pads)}
        self._engine.run(lane, graph, {**inputs, **vars(sampling), **moved})
        return lane.collect(graph, columns.shape[1])


def _check_fits(config: ModelConfig, needed: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if needed > free:
        raise CapacityError(
            "the weights do not fit into the device's memory",
            got=f"{free:,} bytes free",
            expected=f"{needed:,} bytes",
            fix="free memory on the device, or use a larger one",
        )
