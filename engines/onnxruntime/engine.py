"""Runs the graphs with ONNX Runtime; the caches stay in place between steps."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from lacache_trt.artifacts import Manifest
from lacache_trt.closing import ClosesOnExit
from lacache_trt.contract import GraphSpec, caches_of
from lacache_trt.engines.base import Canvas, Capabilities, Int, Sampling, StepOutputs
from lacache_trt.engines.onnxruntime.checks import check_contract, check_manifest
from lacache_trt.engines.onnxruntime.key_values import KeyValues
from lacache_trt.engines.padding import step_inputs
from lacache_trt.engines.windows import (
    WINDOW_FIX,
    check_window,
    no_graphs,
    not_filled,
    require_kept,
)
from lacache_trt.errors import EngineError

Array = NDArray[Any]


def load(manifest: Manifest) -> OnnxRuntimeEngine:
    """Open an engine directory whose manifest has been checked."""
    return OnnxRuntimeEngine(manifest)


class OnnxRuntimeEngine(ClosesOnExit):
    """A loaded model; sessions on any thread share it.

    A graph but `fill` and `reuse` is opened at its first use, because each would hold the weights
    once more. If the directory is another one by then, that is an error: its graphs must not mix.
    """

    name = "onnxruntime"
    device = "cpu"

    def __init__(self, manifest: Manifest) -> None:
        self.config = manifest.model
        check_manifest(manifest)
        self.capabilities = Capabilities(
            caches=caches_of(manifest.contract), logits=True, window_fix=WINDOW_FIX
        )
        self._manifest = manifest
        self._lock = threading.Lock()
        self._graphs: dict[str, ort.InferenceSession] = {}
        self._closed = False
        self.graph("fill")
        self.graph("reuse")

    def graph(self, name: str) -> ort.InferenceSession:
        """The ONNX Runtime session of a graph, opened once."""
        if name not in self._manifest.contract:
            raise no_graphs(self.name)
        with self._lock:
            if self._closed:
                raise EngineError("the engine is closed", fix="load it again with Runtime.load")
            if name not in self._graphs:
                self._graphs[name] = self._open(name)
            return self._graphs[name]

    def spec(self, name: str) -> GraphSpec:
        """Contract of a graph."""
        return self._manifest.contract[name]

    def session(self) -> OnnxRuntimeSession:
        """A new session with its own caches."""
        return OnnxRuntimeSession(self)

    def close(self) -> None:
        """Release the graphs and their weights."""
        with self._lock:
            self._graphs.clear()
            self._closed = True

    def _open(self, name: str) -> ort.InferenceSession:
        options = ort.SessionOptions()
        threads = self._manifest.body.get("threads")
        if threads is not None:
            options.intra_op_num_threads = threads
        options.log_severity_level = 3
        snapshot = self._manifest.snapshot
        path = snapshot.directory / self._manifest.path(f"{name}.onnx").name
        snapshot.require_unchanged()
        try:
            session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise EngineError(
                f"onnxruntime cannot open the graph {name!r}",
                got=str(error).strip(),
                fix=f"build the engine again with onnxruntime {ort.__version__} installed",
            ) from error
        snapshot.require_unchanged()
        check_contract(session, self.spec(name))
        return session


class OnnxRuntimeSession:
    """Caches of one batch: the outputs of `fill`, bound as inputs of `reuse` without a copy."""

    def __init__(self, engine: OnnxRuntimeEngine) -> None:
        self._engine = engine
        self._caches: dict[str, ort.OrtValue] = {}
        self._geometry: dict[str, Array] = {}
        self._kept: KeyValues | None = None
        self._keeps = False

    def fill(self, canvas: Canvas, block_columns: Int) -> None:
        """Compute the caches for these blocks."""
        self._caches.clear()
        self._keeps = False
        inputs = {**_geometry(canvas, block_columns), "tokens": canvas.tokens}
        outputs = _run(self._engine, "fill", inputs, {})
        names = [spec.name for spec in self._engine.spec("fill").outputs]
        self._caches = dict(zip(names, outputs, strict=True))
        self._geometry = _geometry(canvas, block_columns)

    def reuse(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """One step over the caches of the last `fill`."""
        self._require_filled("reuse")
        inputs = {**self._geometry, "block_tokens": block_tokens}
        return self._step("reuse", inputs, sampling, logit_columns, self._caches)[0]

    def reuse_kv(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """`reuse` that also keeps K and V of all layers and columns."""
        self._require_filled("reuse_kv")
        self._engine.graph("reuse-kv")  # before its tensors are asked for
        rows, length = self._geometry["positions"].shape
        if self._kept is None or self._kept.shape != (rows, length):
            self._kept = KeyValues(self._engine.spec("reuse-kv").outputs[-2:], rows, length)
        inputs = {**self._geometry, "block_tokens": block_tokens}
        outputs, _ = self._step(
            "reuse-kv", inputs, sampling, logit_columns, self._caches, self._kept.values
        )
        self._keeps = True
        return outputs

    def window(
        self,
        window_tokens: Int,
        window_columns: Int,
        block_columns: Int,
        sampling: Sampling,
        logit_columns: Int | None = None,
    ) -> StepOutputs:
        """One step of the window's rows over the kept K and V."""
        self._engine.graph("window")
        require_kept(self._keeps)
        kept = self._kept
        if kept is None:
            raise EngineError("the session keeps no K and V", fix="call reuse_kv before")
        start, counts = check_window(
            window_tokens, window_columns, block_columns, logit_columns, kept.shape[1]
        )
        inputs = {
            **self._geometry,
            "window_tokens": window_tokens,
            "window_columns": window_columns,
            "block_columns": block_columns,
        }
        outputs, fresh = self._step("window", inputs, sampling, logit_columns, kept.values)
        kept.write([value.numpy() for value in fresh], start, counts)
        return outputs

    def plain(
        self,
        canvas: Canvas,
        block_columns: Int,
        sampling: Sampling,
        logit_columns: Int | None = None,
    ) -> StepOutputs:
        """One step without caches."""
        inputs = {**_geometry(canvas, block_columns), "tokens": canvas.tokens}
        return self._step("plain", inputs, sampling, logit_columns, {})[0]

    def cache_bytes(self) -> int:
        """Bytes that the caches hold now."""
        kept = self._kept.nbytes() if self._kept is not None else 0
        return kept + sum(int(value.numpy().nbytes) for value in self._caches.values())

    def cache_arrays(self) -> dict[str, Array]:
        """Copies of the caches by name, for checks; keys and values where they are kept."""
        caches = {name: value.numpy().copy() for name, value in self._caches.items()}
        kept = self._kept.arrays if self._kept is not None and self._keeps else {}
        return caches | {name: array.copy() for name, array in kept.items()}

    def close(self) -> None:
        """Release the caches."""
        self._caches.clear()
        self._kept, self._keeps = None, False

    def _require_filled(self, call: str) -> None:
        if not self._caches:
            raise not_filled(call)

    def _step(
        self,
        graph: str,
        inputs: dict[str, Array],
        sampling: Sampling,
        logit_columns: Int | None,
        caches: Mapping[str, ort.OrtValue],
        into: Mapping[str, ort.OrtValue] = MappingProxyType({}),
    ) -> tuple[StepOutputs, list[ort.OrtValue]]:
        """The predictions, and what the graph returns beside them; `into` holds its buffers."""
        everything = step_inputs(inputs, sampling, logit_columns)
        outputs = _run(self._engine, graph, everything, caches, into)
        predicted = len(fields(StepOutputs))
        return StepOutputs(*(value.numpy() for value in outputs[:predicted])), outputs[predicted:]


def _geometry(canvas: Canvas, block_columns: Int) -> dict[str, Array]:
    return {
        "positions": canvas.positions,
        "valid_from": canvas.valid_from,
        "valid_to": canvas.valid_to,
        "block_columns": block_columns,
    }


def _run(
    engine: OnnxRuntimeEngine,
    name: str,
    inputs: dict[str, Array],
    caches: Mapping[str, ort.OrtValue],
    into: Mapping[str, ort.OrtValue] = MappingProxyType({}),
) -> list[ort.OrtValue]:
    """Run a graph; outputs go into the buffers given, else they stay in onnxruntime's own."""
    graph = engine.graph(name)
    binding = graph.io_binding()
    # The binding refers to these arrays, so they must live until the run is over.
    arrays = {key: np.ascontiguousarray(array) for key, array in inputs.items()}
    for key, array in arrays.items():
        binding.bind_cpu_input(key, array)
    for key, value in caches.items():
        binding.bind_ortvalue_input(key, value)
    for spec in engine.spec(name).outputs:
        if spec.name in into:
            binding.bind_ortvalue_output(spec.name, into[spec.name])
        else:
            binding.bind_output(spec.name, "cpu")
    try:
        graph.run_with_iobinding(binding)
    except Exception as error:
        raise EngineError(f"onnxruntime failed in the graph {name!r}", got=str(error)) from error
    values: list[ort.OrtValue] = binding.get_outputs()
    return values
