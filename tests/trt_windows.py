"""Steps of approximate caches on a simulated TensorRT and on ONNX Runtime, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from canvases import Shape, greedy, relative_error
from window_cases import WindowShape

from lacache_trt.engines.base import Canvas, Int, Session, StepOutputs
from lacache_trt.engines.onnxruntime.engine import OnnxRuntimeEngine
from lacache_trt.engines.tensorrt.engine import TensorRTEngine
from lacache_trt.generation import GenerationConfig
from lacache_trt.runtime import Runtime

BOUND = 2e-5
TIE = 1e-4
CASE = WindowShape(Shape(40, 6, (12, 20), (0, 5), (40, 38), 7), (2, 0), (5, 12))
Engines = Callable[[str], OnnxRuntimeEngine]


def run(engine: Any, batch: list[list[int]], config: GenerationConfig) -> list[Any]:
    """Tokens and forwards of each row."""
    results = Runtime(engine).generate(batch, config)
    assert isinstance(results, list)
    return [(each.tokens, each.forwards) for each in results]


def kept_of(session: Any) -> dict[str, Any]:
    """The kept K and V."""
    return {name: session.cache_arrays()[name] for name in ("keys", "values")}


class Pair:
    """The same calls on both engines, compared after each."""

    def __init__(self, found: Session, expected: Session, canvas: Canvas, exact: bool) -> None:
        self.found, self.expected, self.canvas, self.exact = found, expected, canvas, exact
        self.rows, self.length = canvas.tokens.shape

    def call(self, name: str, *arguments: Any) -> StepOutputs:
        """Call both; predictions and kept caches must agree."""
        outputs = getattr(self.found, name)(*arguments)
        truth = getattr(self.expected, name)(*arguments)
        assert isinstance(outputs, StepOutputs)
        if truth.logits.size:
            self.compare(outputs.logits, truth.logits)
        settled = truth.margin > TIE
        np.testing.assert_array_equal(outputs.token[settled], truth.token[settled])
        for kind, expected in kept_of(self.expected).items():
            found = kept_of(self.found)[kind]
            for row in range(self.rows):
                real = slice(self.canvas.valid_from[row], self.canvas.valid_to[row])
                own = found[:, row, :, found.shape[3] - self.length :][:, :, real]
                self.compare(own, expected[:, row, :, real])
        return outputs

    def compare(self, found: Any, expected: Any) -> None:
        """In bits or within the bound."""
        if self.exact:
            np.testing.assert_array_equal(found, expected)
        else:
            assert relative_error(found, expected) <= BOUND


def commit(canvas: Canvas, block: Int, rng: np.random.Generator, mask_id: int) -> None:
    """Another token at one place of each row's block."""
    for row, columns in enumerate(block):
        canvas.tokens[row, rng.choice(columns)] = rng.integers(0, mask_id)


def prepared(engine: TensorRTEngine) -> tuple[Canvas, Int, Any]:
    """The canvas of `CASE`, its block columns and sampling."""
    canvas = CASE.shape.canvas(engine.config)
    return canvas, CASE.shape.block_columns, greedy(2, engine.config)


def opened(engine: TensorRTEngine) -> tuple[Any, Canvas, Int, Any]:
    """A session after `fill`, and its inputs."""
    canvas, block, sampling = prepared(engine)
    session = engine.session()
    session.fill(canvas, block)
    return session, canvas, block, sampling
