"""A lane: static buffers and captured graphs for one (rows, columns, block columns).

Everything of a step happens inside one graph: one copy of the small inputs to the device, the
model, one copy of the predictions to pinned host memory. `fill` and `reuse` of a lane share the
caches: `fill` writes them, `reuse` reads them, both in place; `reuse_kv` and `window` share K and V
of all layers. The caches lie outside the memory pool of the graphs, because every graph of
the engine may overwrite what lies in the pool.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lacache_trt.contract import TensorSpec, cache_specs, graph_specs
from lacache_trt.engines.base import StepOutputs
from lacache_trt.engines.cuda.capture import capture, replay_milliseconds
from lacache_trt.engines.cuda.kept import Kept
from lacache_trt.engines.cuda.ops import CudaOps, FillOps
from lacache_trt.engines.cuda.staging import StagedInputs
from lacache_trt.engines.padding import LISTED_IDS as LISTED_IDS
from lacache_trt.engines.padding import Arrays as Arrays
from lacache_trt.engines.windows import not_filled
from lacache_trt.errors import EngineError
from lacache_trt.model.config import ModelConfig
from lacache_trt.model.programs import FillProgram, PlainProgram, ReuseProgram
from lacache_trt.model.transformer import Transformer

_ORDER = ("tokens", "positions", "valid_from", "valid_to", "block_columns")
_STEP_INPUTS = (
    "temperature",
    "seed",
    "step",
    "guide_row",
    "cfg_scale",
    "suppress_ids",
    "confidence_exclude_ids",
    "logit_columns",
)
Key = tuple[str, int]
"""A graph: its name, for a window with its widths, and the number of logit columns."""


@dataclass(frozen=True)
class LaneShape:
    """Rows, columns (a bucket) and block columns."""

    rows: int
    columns: int
    block: int

    def sizes(self, logit_columns: int = 0, window: int = 0) -> dict[str, int]:
        """Value of each symbol of the contract."""
        return {
            "W": window,
            "B": self.rows,
            "N": self.columns,
            "Bk": self.block,
            "S": LISTED_IDS,
            "E": LISTED_IDS,
            "R": logit_columns,
        }


class Lane:
    """Static inputs, caches and outputs of one shape, and the graphs over them.

    Its methods enqueue work; the engine lets one thread at a time do so.
    """

    def __init__(
        self, model: Transformer, shape: LaneShape, stream: torch.cuda.Stream, pool: object
    ) -> None:
        self.shape = shape
        self.caches: dict[str, Tensor] = {}
        self.kept: Kept | None = None
        self._model = model
        self._stream = stream
        self._pool = pool
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._idle = torch.cuda.Event()
        self._specs = graph_specs(model.config, "bfloat16")
        self._geometry = {
            graph: self._stage(self._specs["fill"].inputs, shape.sizes())
            for graph in ("fill", "plain")
        }
        self._steps: dict[int, StagedInputs] = {}
        self._windows: dict[Key, StagedInputs] = {}
        self._outputs: dict[Key, tuple[Tensor, Tensor]] = {}
        self._read: dict[Key, list[NDArray[Any]]] = {}

    def fill(self, inputs: Arrays) -> None:
        """Enqueue the computation of the caches for the geometry given."""
        self._idle.synchronize()
        self._geometry["fill"].write(inputs)
        if not self.caches:
            self.caches = self._allocate_caches()
        self._replay(("fill", 0), self._run_fill)

    def reuse(self, inputs: Arrays) -> None:
        """Enqueue one step over the caches; `collect` waits for it."""
        read = self._write_step(inputs)
        self._replay(("reuse", read), lambda: self._run_reuse("reuse", read))

    def reuse_kv(self, inputs: Arrays) -> None:
        """Enqueue one step over the caches that writes `kept`; `collect` waits for it."""
        read = self._write_step(inputs)
        self._replay(("reuse_kv", read), lambda: self._run_reuse("reuse_kv", read))

    def window(self, inputs: Arrays) -> None:
        """Enqueue one step of a window over `kept`; `collect` waits for it.

        Its block may be a part of the lane's: the step before may have predicted a whole answer.
        """
        width, block = (inputs[name].shape[1] for name in ("window_columns", "block_columns"))
        key = window_name(width, block), inputs["logit_columns"].shape[1]
        if key not in self._windows:
            names = ("window_tokens", "window_columns", "block_columns", *_STEP_INPUTS)
            specs = [spec for spec in self._specs["window"].inputs if spec.name in names]
            sizes = replace(self.shape, block=block).sizes(key[1], width)
            self._windows[key] = self._stage(specs, sizes)
        self._windows[key].write(inputs)
        self._replay(key, lambda: self._run_window(key))

    def keep(self) -> None:
        """Allocate `kept`."""
        if self.kept is None:
            shape, device = self.shape, self._stream.device
            self.kept = Kept(self._model, shape.rows, shape.columns, device)

    def plain(self, inputs: Arrays) -> None:
        """Enqueue one step without caches; `collect` waits for it."""
        self._idle.synchronize()
        read = int(inputs["logit_columns"].shape[1])
        geometry = {name: inputs[name] for name in _ORDER}
        self._geometry["plain"].write(geometry)
        step = {name: value for name, value in inputs.items() if name not in geometry}
        self._step_inputs(read).write(step)
        self._replay(("plain", read), lambda: self._run_plain(read))

    def collect(self, name: str, logit_columns: int, rows: int) -> StepOutputs:
        """Wait for the step and copy the first `rows` rows of its outputs from pinned memory."""
        self._idle.synchronize()
        packed, logits = self._read[name, logit_columns]
        packed, logits = packed[:, :rows].copy(), logits[:rows].copy()
        scores = packed[1:].view(np.float32)
        return StepOutputs(packed[0], scores[0], scores[1], scores[2], logits)

    def cache_bytes(self) -> int:
        """Bytes of the caches."""
        kept = self.kept.nbytes() if self.kept is not None else 0
        return kept + sum(cache.numel() * cache.element_size() for cache in self.caches.values())

    def milliseconds(self, name: str, replays: int, logit_columns: int = 0) -> list[float]:
        """Device time of each of `replays` replays of a graph that has run before."""
        return replay_milliseconds(self._graphs[name, logit_columns], self._stream, replays)

    def _step_inputs(self, logit_columns: int) -> StagedInputs:
        if logit_columns not in self._steps:
            specs = [
                spec
                for spec in self._specs["reuse"].inputs
                if spec.name == "block_tokens" or spec.name in _STEP_INPUTS
            ]
            self._steps[logit_columns] = self._stage(specs, self.shape.sizes(logit_columns))
        return self._steps[logit_columns]

    def _stage(self, specs: Iterable[TensorSpec], sizes: Mapping[str, int]) -> StagedInputs:
        layout = {spec.name: (_resolved(spec, sizes), spec.dtype) for spec in specs}
        return StagedInputs(layout, self._stream.device)

    def _allocate_caches(self) -> dict[str, Tensor]:
        dtype, device = self._model.weight("embed.weight").dtype, self._stream.device
        types = {"float32": torch.float32, "bfloat16": dtype}
        return {
            spec.name: torch.empty(
                _resolved(spec, self.shape.sizes()), dtype=types[spec.dtype], device=device
            )
            for spec in cache_specs(self._model.config, "bfloat16")
        }

    def _run_fill(self) -> None:
        self._geometry["fill"].upload()
        inputs = self._geometry["fill"].tensors
        model, ops = copy.copy(self._model), self._model.ops
        if isinstance(ops, CudaOps):
            model.ops = FillOps(ops, self.caches)
        outputs = FillProgram(model)(*(inputs[name] for name in _ORDER))
        for cache, output in zip(self.caches.values(), outputs, strict=True):
            if output.data_ptr() != cache.data_ptr():
                cache.copy_(output)

    def _write_step(self, inputs: Arrays) -> int:
        """Stage a step over the caches; returns its number of logit columns."""
        read = int(inputs["logit_columns"].shape[1])
        self._step_inputs(read).write(inputs)
        return read

    def _run_reuse(self, name: str, logit_columns: int) -> None:
        if not self.caches:
            raise not_filled("reuse")
        staged = self._step_inputs(logit_columns)
        staged.upload()
        geometry, step = self._geometry["fill"].tensors, staged.tensors
        ranges = (geometry[name] for name in ("positions", "valid_from", "valid_to"))
        program = ReuseProgram(self._model) if name == "reuse" else self._require_kept().reuse
        outputs = program(
            step["block_tokens"],
            geometry["block_columns"],
            *ranges,
            *self.caches.values(),
            *(step[name] for name in _STEP_INPUTS),
        )
        self._download((name, logit_columns), outputs)

    def _run_window(self, key: Key) -> None:
        staged = self._windows[key]
        staged.upload()
        geometry, step = self._geometry["fill"].tensors, staged.tensors
        outputs = self._require_kept().window(
            step["window_tokens"],
            step["window_columns"],
            *(geometry[name] for name in ("positions", "valid_from", "valid_to")),
            step["block_columns"],
            *(step[name] for name in _STEP_INPUTS),
        )
        self._download(key, outputs)

    def _require_kept(self) -> Kept:
        if self.kept is None:
            raise EngineError("the lane keeps no K and V", fix="call reuse_kv before window")
        return self.kept

    def _run_plain(self, logit_columns: int) -> None:
        self._geometry["plain"].upload()
        staged = self._step_inputs(logit_columns)
        staged.upload()
        geometry, step = self._geometry["plain"].tensors, staged.tensors
        outputs = PlainProgram(self._model)(
            *(geometry[name] for name in _ORDER), *(step[name] for name in _STEP_INPUTS)
        )
        self._download(("plain", logit_columns), outputs)

    def _download(self, key: Key, outputs: tuple[Tensor, ...]) -> None:
        """One packed copy of the predictions to pinned memory, and the logits if asked for."""
        token, *scores, logits = outputs
        packed = torch.stack([token, *(score.view(torch.int32) for score in scores)])
        if key not in self._outputs:
            self._outputs[key] = (_pinned_like(packed), _pinned_like(logits))
            self._read[key] = [host.numpy() for host in self._outputs[key]]
        host_packed, host_logits = self._outputs[key]
        host_packed.copy_(packed, non_blocking=True)
        if logits.numel():
            host_logits.copy_(logits, non_blocking=True)

    def _replay(self, key: Key, run: Callable[[], None]) -> None:
        if key not in self._graphs:
            self._graphs[key] = capture([run], self._stream, self._pool)
        with torch.cuda.stream(self._stream):
            self._graphs[key].replay()
            self._idle.record(self._stream)


def window_name(width: int, block: int) -> str:
    """The graph of a window of this width that predicts a block of this width."""
    return f"window-{width}-{block}"


def lane_bytes(config: ModelConfig, shape: LaneShape, element_bytes: int) -> int:
    """Device bytes of a lane: caches, and the activations of one layer and the head."""
    tokens = shape.rows * shape.columns
    caches = tokens * config.cache_bytes_per_token(element_bytes)
    per_token = (
        5 * config.hidden_size + 2 * config.qkv_size + config.query_size
    ) + 3 * config.intermediate_size
    read = 2 * shape.rows * shape.block
    logits = read * config.vocab_size * (2 * element_bytes + 4)
    return caches + tokens * per_token * element_bytes + logits


def _resolved(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)


def _pinned_like(tensor: Tensor) -> Tensor:
    """Host memory, page-locked for a CUDA tensor that is not empty."""
    pinned = tensor.is_cuda and tensor.numel() > 0
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
