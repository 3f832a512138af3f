"""A float64 `Session` over `StaleModel`: every graph recomputed, K and V kept by hand.

It also checks what it is called with: windows are consecutive, hold their block, and only follow
a `reuse_kv`. Engines are compared with it, and the runtime's loops run on it.
"""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from reference_decoding import noise
from stale_model import Kept, StaleModel

from lacache_trt.engines.base import Canvas, Capabilities, Int, Sampling, StepOutputs
from lacache_trt.model.config import ModelConfig

Logits = NDArray[np.float64]
CAPABILITIES = Capabilities(caches=frozenset({"none", "exact", "prefix", "dual"}), logits=True)


class ReferenceEngine:
    """An engine of float64 sessions; counts its calls by name."""

    name, device = "reference", "float64"

    def __init__(
        self, model: StaleModel, config: ModelConfig, capabilities: Capabilities = CAPABILITIES
    ) -> None:
        self.model = model
        self.config = config
        self.capabilities = capabilities
        self.calls: list[str] = []
        self.widths: list[int] = []

    def session(self) -> ReferenceSession:
        """A new session."""
        return ReferenceSession(self)

    def close(self) -> None:
        """Nothing to release."""

    def __enter__(self) -> ReferenceEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ReferenceSession:
    """See the module's text."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self._engine = engine
        self._canvas: Canvas | None = None
        self._block: Int | None = None
        self._kept: list[Kept] | None = None

    def fill(self, canvas: Canvas, block_columns: Int) -> None:
        """Remember the canvas; K and V are dropped."""
        _check_canvas(canvas, block_columns)
        self._canvas = replace(canvas, tokens=canvas.tokens.copy())
        self._block, self._kept = block_columns.copy(), None
        self._engine.calls.append("fill")

    def reuse(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """A whole forward of the last fill's canvas with these tokens in its block."""
        self._engine.calls.append("reuse")
        return self._full(block_tokens, sampling, logit_columns)[0]

    def reuse_kv(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """The same, keeping K and V."""
        self._engine.calls.append("reuse_kv")
        outputs, self._kept = self._full(block_tokens, sampling, logit_columns)
        return outputs

    def window(
        self,
        window_tokens: Int,
        window_columns: Int,
        block_columns: Int,
        sampling: Sampling,
        logit_columns: Int | None = None,
    ) -> StepOutputs:
        """A forward whose only fresh rows are the window's."""
        self._engine.calls.append("window")
        self._engine.widths.append(window_columns.shape[1])
        canvas, kept = self._canvas, self._kept
        assert canvas is not None, "window without fill"
        assert kept is not None, "window without reuse_kv"
        logits, starts = [], []
        for row, columns in enumerate(window_columns):
            run = columns[columns >= 0]
            assert (columns[len(run) :] == -1).all(), "pads are behind"
            assert (np.diff(run) == 1).all()
            assert set(block_columns[row]) <= set(run)
            assert canvas.valid_from[row] <= run[0]
            assert run[-1] < canvas.valid_to[row]
            canvas.tokens[row, run] = window_tokens[row, : len(run)]
            logits.append(self._row_logits(canvas, row, kept[row], set(run.tolist())))
            starts.append(int(run[0]))
        return self._outputs(canvas, logits, starts, block_columns, sampling, logit_columns)

    def plain(
        self,
        canvas: Canvas,
        block_columns: Int,
        sampling: Sampling,
        logit_columns: Int | None = None,
    ) -> StepOutputs:
        """A whole forward."""
        self._engine.calls.append("plain")
        _check_canvas(canvas, block_columns)
        return self._forward(canvas, block_columns, sampling, logit_columns)[0]

    def cache_bytes(self) -> int:
        """Not counted."""
        return 0

    def close(self) -> None:
        """Nothing to release."""

    def _full(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None
    ) -> tuple[StepOutputs, list[Kept]]:
        assert self._canvas is not None, "reuse without fill"
        assert self._block is not None
        np.put_along_axis(self._canvas.tokens, self._block, block_tokens, axis=1)
        return self._forward(self._canvas, self._block, sampling, logit_columns)

    def _forward(
        self, canvas: Canvas, block: Int, sampling: Sampling, logit_columns: Int | None
    ) -> tuple[StepOutputs, list[Kept]]:
        kept = [Kept() for _ in canvas.tokens]
        logits = [self._row_logits(canvas, row, one, None) for row, one in enumerate(kept)]
        starts = canvas.valid_from.tolist()
        return self._outputs(canvas, logits, starts, block, sampling, logit_columns), kept

    def _row_logits(self, canvas: Canvas, row: int, kept: Kept, fresh: set[int] | None) -> Logits:
        """Logits of the row's canvas columns [N, V]; zeros outside its valid range."""
        real = range(int(canvas.valid_from[row]), int(canvas.valid_to[row]))
        marks = None if fresh is None else [column in fresh for column in real]
        tokens, positions = canvas.tokens[row, real], canvas.positions[row, real]
        found = self._engine.model.forward(tokens.tolist(), positions.tolist(), kept, marks)
        logits = np.zeros((canvas.tokens.shape[1], found.shape[1]))
        logits[real] = found
        return logits

    def _outputs(
        self,
        canvas: Canvas,
        logits: list[Logits],
        starts: list[int],
        block: Int,
        sampling: Sampling,
        logit_columns: Int | None,
    ) -> StepOutputs:
        shift = int(self._engine.config.logit_shift)

        def predicting(columns: Int) -> Logits:
            rows = [
                one[np.maximum(picked - shift, start)]
                for one, picked, start in zip(logits, columns, starts, strict=True)
            ]
            return np.array(rows)

        positions = np.take_along_axis(canvas.positions, block, axis=1)
        asked = block[:, :0] if logit_columns is None else logit_columns
        return sample(predicting(block), positions, sampling, predicting(asked))


def sample(logits: Logits, positions: Int, sampling: Sampling, asked: Logits) -> StepOutputs:
    """The sampler in float64, rounded to float32 at the end."""
    shape = logits.shape[:2]
    token = np.zeros(shape, np.int32)
    scores = {name: np.zeros(shape, np.float32) for name in ("confidence", "margin", "entropy")}
    for row, column in np.ndindex(shape):
        guide = sampling.guide_row[row]
        x = logits[row, column].copy()
        if guide != row:
            scale = float(sampling.cfg_scale[row]) + 1
            x = logits[guide, column] + scale * (x - logits[guide, column])
        x[[i for i in sampling.suppress_ids[row] if i >= 0]] = -np.inf
        noisy, temperature = x.copy(), float(sampling.temperature[row])
        if temperature > 0:
            key = int(sampling.seed[row]), int(sampling.step[row]), int(positions[row, column])
            noisy += [temperature * noise(*key, identity) for identity in range(len(x))]
        token[row, column] = noisy.argmax()
        x[[i for i in sampling.confidence_exclude_ids[row] if i >= 0]] = -np.inf
        p = np.exp(x - x.max())
        p /= p.sum()
        best = np.sort(p)[::-1]
        scores["confidence"][row, column] = p[token[row, column]]
        scores["margin"][row, column] = best[0] - best[1]
        scores["entropy"][row, column] = (p[p > 0] * np.log(p[p > 0])).sum()
    return StepOutputs(
        token, scores["confidence"], scores["margin"], scores["entropy"], asked.astype(np.float32)
    )


def _check_canvas(canvas: Canvas, block_columns: Int) -> None:
    assert (np.diff(block_columns, axis=1) == 1).all()
    assert (block_columns[:, 0] >= canvas.valid_from).all()
    assert (block_columns[:, 0] < canvas.valid_to).all()
    assert block_columns.max() < canvas.tokens.shape[1]
    for row, (start, end) in enumerate(zip(canvas.valid_from, canvas.valid_to, strict=True)):
        assert (np.diff(canvas.positions[row, start:end]) >= 1).all()
