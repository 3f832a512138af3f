"""Runs the graphs with ONNX Runtime; the caches stay in its buffers between steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from lacache_trt.artifacts import Manifest
from lacache_trt.closing import ClosesOnExit
from lacache_trt.contract import GraphSpec, graph_specs
from lacache_trt.engines.base import Canvas, Capabilities, Int, Sampling, StepOutputs
from lacache_trt.errors import ArtifactError, EngineError
from lacache_trt.validation import describe

Array = NDArray[Any]
MAX_THREADS = 1024
_ORT_TYPES = {"int32": "tensor(int32)", "float32": "tensor(float)"}
_CAPABILITIES = Capabilities(caches=frozenset({"none", "exact"}), logits=True)


def load(manifest: Manifest) -> OnnxRuntimeEngine:
    """Open an engine directory whose manifest has been checked."""
    return OnnxRuntimeEngine(manifest)


class OnnxRuntimeEngine(ClosesOnExit):
    """A loaded model; sessions on any thread share it.

    `plain` is opened at its first use, because it would hold the weights a second time.
    """

    name = "onnxruntime"
    device = "cpu"
    capabilities = _CAPABILITIES

    def __init__(self, manifest: Manifest) -> None:
        self.config = manifest.model
        _check_manifest(manifest)
        self._manifest = manifest
        self._lock = threading.Lock()
        self._graphs: dict[str, ort.InferenceSession] = {}
        self._closed = False
        self.graph("fill")
        self.graph("reuse")

    def graph(self, name: str) -> ort.InferenceSession:
        """The ONNX Runtime session of a graph, opened once."""
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
        path = self._manifest.path(f"{name}.onnx")
        try:
            session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise EngineError(
                f"onnxruntime cannot open the graph {name!r}",
                got=str(error).strip(),
                fix=f"build the engine again with onnxruntime {ort.__version__} installed",
            ) from error
        _check_contract(session, self.spec(name))
        return session


class OnnxRuntimeSession:
    """Caches of one batch: the outputs of `fill`, bound as inputs of `reuse` without a copy."""

    def __init__(self, engine: OnnxRuntimeEngine) -> None:
        self._engine = engine
        self._caches: dict[str, ort.OrtValue] = {}
        self._geometry: dict[str, Array] = {}

    def fill(self, canvas: Canvas, block_columns: Int) -> None:
        """Compute the caches for these blocks."""
        self._caches.clear()
        inputs = {**_geometry(canvas, block_columns), "tokens": canvas.tokens}
        outputs = _run(self._engine, "fill", inputs, {})
        names = [spec.name for spec in self._engine.spec("fill").outputs]
        self._caches = dict(zip(names, outputs, strict=True))
        self._geometry = _geometry(canvas, block_columns)

    def reuse(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """One step over the caches of the last `fill`."""
        if not self._caches:
            raise EngineError("reuse was called before fill", fix="call fill at each block's start")
        inputs = {**self._geometry, "block_tokens": block_tokens}
        return self._step("reuse", inputs, sampling, logit_columns, self._caches)

    def plain(
        self,
        canvas: Canvas,
        block_columns: Int,
        sampling: Sampling,
        logit_columns: Int | None = None,
    ) -> StepOutputs:
        """One step without caches."""
        inputs = {**_geometry(canvas, block_columns), "tokens": canvas.tokens}
        return self._step("plain", inputs, sampling, logit_columns, {})

    def cache_bytes(self) -> int:
        """Bytes that the caches hold now."""
        return sum(int(value.numpy().nbytes) for value in self._caches.values())

    def cache_arrays(self) -> dict[str, Array]:
        """Copies of the caches by name, for checks."""
        return {name: value.numpy().copy() for name, value in self._caches.items()}

    def close(self) -> None:
        """Release the caches."""
        self._caches.clear()

    def _step(
        self,
        graph: str,
        inputs: dict[str, Array],
        sampling: Sampling,
        logit_columns: Int | None,
        caches: dict[str, ort.OrtValue],
    ) -> StepOutputs:
        rows = len(sampling.seed)
        columns = np.zeros((rows, 0), np.int32) if logit_columns is None else logit_columns
        inputs = {**inputs, **vars(sampling), "logit_columns": columns}
        outputs = _run(self._engine, graph, inputs, caches)
        return StepOutputs(*(value.numpy() for value in outputs))


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
    caches: dict[str, ort.OrtValue],
) -> list[ort.OrtValue]:
    """Run a graph; the outputs stay in onnxruntime's own buffers."""
    graph = engine.graph(name)
    binding = graph.io_binding()
    # The binding refers to these arrays, so they must live until the run is over.
    arrays = {key: np.ascontiguousarray(array) for key, array in inputs.items()}
    for key, array in arrays.items():
        binding.bind_cpu_input(key, array)
    for key, value in caches.items():
        binding.bind_ortvalue_input(key, value)
    for spec in engine.spec(name).outputs:
        binding.bind_output(spec.name, "cpu")
    try:
        graph.run_with_iobinding(binding)
    except Exception as error:
        raise EngineError(f"onnxruntime failed in the graph {name!r}", got=str(error)) from error
    values: list[ort.OrtValue] = binding.get_outputs()
    return values


def _check_manifest(manifest: Manifest) -> None:
    """What the manifest says of the graphs must follow from its model section."""
    expected = graph_specs(manifest.model, "float32")
    differing = sorted(
        name
        for name in expected.keys() | manifest.contract.keys()
        if manifest.contract.get(name) != expected.get(name)
    )
    if differing:
        raise ArtifactError(
            "the contract of the manifest contradicts its model section",
            got=f"other tensors in {', '.join(map(repr, differing))}",
            expected="the tensors that follow from the model's sizes",
            fix="build the engine again",
        )
    threads = manifest.body.get("threads")
    if threads is not None and (type(threads) is not int or not 0 <= threads <= MAX_THREADS):
        raise ArtifactError(
            "the manifest has an invalid number of threads",
            got=describe(threads),
            expected=f"null, or an integer from 0 to {MAX_THREADS}",
            fix="build the engine again",
        )


def _check_contract(session: ort.InferenceSession, spec: GraphSpec) -> None:
    """Names, dtypes, ranks and fixed sizes of the file must be those of the manifest."""
    for side, nodes, tensors in (
        ("inputs", session.get_inputs(), spec.inputs),
        ("outputs", session.get_outputs(), spec.outputs),
    ):
        got = {node.name: (node.type, _fixed_sizes(node.shape)) for node in nodes}
        expected = {
            tensor.name: (_ORT_TYPES[tensor.dtype], _fixed_sizes(tensor.shape))
            for tensor in tensors
        }
        if got != expected:
            differing = sorted({name for name, _ in got.items() ^ expected.items()})
            raise ArtifactError(
                f"the {side} of graph {spec.name!r} differ from the manifest",
                got={name: got.get(name) for name in differing},
                expected={name: expected.get(name) for name in differing},
                fix="build the engine again",
            )


def _fixed_sizes(shape: Sequence[Any]) -> tuple[int | None, ...]:
    """The sizes that are numbers; None for symbolic ones."""
    return tuple(size if isinstance(size, int) else None for size in shape)
