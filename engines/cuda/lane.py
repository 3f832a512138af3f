"""One set of static buffers and captured graphs for a (rows, columns, block) shape.

A lane belongs to one session at a time. Its graphs are captured at first use and replayed on the
engine's stream: `fill` writes the caches, `reuse` reads them, both in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lacache_trt.contract import TensorSpec, cache_specs, graph_specs
from lacache_trt.engines.base import StepOutputs
from lacache_trt.engines.cuda.staging import StagedInputs
from lacache_trt.errors import EngineError
from lacache_trt.model.config import ModelConfig
from lacache_trt.model.programs import FillProgram, PlainProgram, ReuseProgram
from lacache_trt.model.transformer import Transformer

LISTED_IDS = 8
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


@dataclass(frozen=True)
class LaneShape:
    """Rows, columns (a bucket) and block columns."""

    rows: int
    columns: int
    block: int

    def sizes(self, logit_columns: int = 0) -> dict[str, int]:
        """Value of each symbol of the contract."""
        return {
            "B": self.rows,
            "N": self.columns,
            "Bk": self.block,
            "S": LISTED_IDS,
            "E": LISTED_IDS,
            "R": logit_columns,
        }


class Lane:
    """Static inputs, caches and outputs of one shape, and the graphs over them."""

    def __init__(
        self, model: Transformer, shape: LaneShape, stream: torch.cuda.Stream, pool: object
    ) -> None:
        self.shape = shape
        self._model = model
        self._stream = stream
        self._pool = pool
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self._idle = torch.cuda.Event()
        self._specs = graph_specs(model.config, "bfloat16")
        self._geometry = self._stage(self._specs["fill"].inputs, shape.sizes())
        self._steps: dict[int, StagedInputs] = {}
        self.caches: dict[str, Tensor] = {}
        self._outputs: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def fill(self, inputs: Mapping[str, NDArray[np.generic]]) -> None:
        """Enqueue the computation of the caches for the geometry given."""
        self._idle.synchronize()
        self._geometry.write(inputs)
        self._replay("fill", 0, self._run_fill)

    def reuse(self, inputs: Mapping[str, NDArray[np.generic]]) -> None:
        """Enqueue one step over the caches; `collect` waits for it."""
        read = inputs["logit_columns"].shape[1]
        self._step_inputs(read).write(inputs)
        self._replay("reuse", read, lambda: self._run_reuse(read))

    def plain(self, inputs: Mapping[str, NDArray[np.generic]]) -> None:
        """Enqueue one step without caches; `collect` waits for it."""
        read = inputs["logit_columns"].shape[1]
        geometry = {name: inputs[name] for name in self._geometry.tensors}
        self._idle.synchronize()
        self._geometry.write(geometry)
        step = {name: value for name, value in inputs.items() if name not in geometry}
        self._step_inputs(read).write(step)
        self._replay("plain", read, lambda: self._run_plain(read))

    def collect(self, name: str, logit_columns: int) -> StepOutputs:
        """Wait for the step and copy its outputs out of the pinned buffers."""
        self._idle.synchronize()
        packed, logits = (tensor.numpy().copy() for tensor in self._outputs[name, logit_columns])
        scores = packed[1:].view(np.float32)
        return StepOutputs(packed[0], scores[0], scores[1], scores[2], logits)

    def cache_bytes(self) -> int:
        """Bytes of the caches."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.caches.values())

    def _step_inputs(self, logit_columns: int) -> StagedInputs:
        if logit_columns not in self._steps:
            specs = [
                spec
                for spec in self._specs["reuse"].inputs
                if spec.name == "block_tokens" or spec.name in _STEP_INPUTS
            ]
            self._steps[logit_columns] = self._stage(specs, self.shape.sizes(logit_columns))
        return self._steps[logit_columns]

    def _stage(self, specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> StagedInputs:
        layout = {
            spec.name: (
                tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape),
                spec.dtype,
            )
            for spec in specs
        }
        return StagedInputs(layout, torch.device("cuda"))

    def _run_fill(self) -> None:
        self._geometry.upload()
        inputs = self._geometry.tensors
        order = ("tokens", "positions", "valid_from", "valid_to", "block_columns")
        outputs = FillProgram(self._model)(*(inputs[name] for name in order))
        names = [spec.name for spec in cache_specs(self._model.config, "bfloat16")]
        self.caches = dict(zip(names, outputs, strict=True))

    def _run_reuse(self, logit_columns: int) -> None:
        if not self.caches:
            raise EngineError("reuse was called before fill", fix="call fill at each block's start")
        staged = self._step_inputs(logit_columns)
        staged.upload()
        geometry, step = self._geometry.tensors, staged.tensors
        ranges = (geometry[name] for name in ("positions", "valid_from", "valid_to"))
        outputs = ReuseProgram(self._model)(
            step["block_tokens"],
            geometry["block_columns"],
            *ranges,
            *self.caches.values(),
            *(step[name] for name in _STEP_INPUTS),
        )
        self._download(("reuse", logit_columns), outputs)

    def _run_plain(self, logit_columns: int) -> None:
        self._geometry.upload()
        staged = self._step_inputs(logit_columns)
        staged.upload()
        geometry, step = self._geometry.tensors, staged.tensors
        order = ("tokens", "positions", "valid_from", "valid_to", "block_columns")
        outputs = PlainProgram(self._model)(
            *(geometry[name] for name in order), *(step[name] for name in _STEP_INPUTS)
        )
        self._download(("plain", logit_columns), outputs)

    def _download(self, key: tuple[str, int], outputs: tuple[Tensor, ...]) -> None:
        """One packed copy of the predictions to pinned memory, and the logits if asked for."""
        token, *scores, logits = outputs
        packed = torch.stack([token, *(score.view(torch.int32) for score in scores)])
        if key not in self._outputs:
            self._outputs[key] = (
                torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True),
                torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True),
            )
        host_packed, host_logits = self._outputs[key]
        host_packed.copy_(packed, non_blocking=True)
        if logits.numel():
            host_logits.copy_(logits, non_blocking=True)

    def _replay(self, name: str, logit_columns: int, run: Callable[[], None]) -> None:
        key = (name, logit_columns)
        if key not in self._graphs:
            self._graphs[key] = self._capture(run)
        with torch.cuda.stream(self._stream):
            self._graphs[key].replay()
            self._idle.record(self._stream)

    def _capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run once eagerly (kernels compile, the library sets itself up), then capture."""
        with torch.inference_mode():
            with torch.cuda.stream(self._stream):
                run()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                run()
        return graph


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
