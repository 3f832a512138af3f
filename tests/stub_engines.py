"""Engines around a real one that count, delay or spoil its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

import numpy as np

from lacache_trt.engines.base import Canvas, Engine, Int, Sampling, Session, StepOutputs

Change = Callable[[StepOutputs], StepOutputs]


class StubEngine:
    """Delegates everything to `inner`; sessions count their calls.

    Args:
        inner: the real engine.
        delay_s: extra seconds of each step.
        change: what becomes of each step's outputs.
    """

    def __init__(
        self, inner: Engine, *, delay_s: float = 0.0, change: Change | None = None
    ) -> None:
        self.inner = inner
        self.name, self.device = inner.name, inner.device
        self.config, self.capabilities = inner.config, inner.capabilities
        self.delay_s = delay_s
        self.change = change or (lambda outputs: outputs)
        self.fills = self.steps = self.opened = self.closed_sessions = 0
        self.padded_windows = 0

    def session(self) -> StubSession:
        """A counted session."""
        self.opened += 1
        return StubSession(self, self.inner.session())

    def close(self) -> None:
        """The real engine belongs to whoever opened it."""

    def __enter__(self) -> StubEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class StubSession:
    """See `StubEngine`."""

    def __init__(self, engine: StubEngine, inner: Session) -> None:
        self._engine = engine
        self._inner = inner

    def fill(self, canvas: Canvas, block_columns: Int) -> None:
        """Count and delegate."""
        self._engine.fills += 1
        self._inner.fill(canvas, block_columns)

    def reuse(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """Count, delay, delegate and change."""
        return self._step(self._inner.reuse(block_tokens, sampling, logit_columns))

    def reuse_kv(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """Count, delay, delegate and change."""
        return self._step(self._inner.reuse_kv(block_tokens, sampling, logit_columns))

    def window(
        self,
        window_tokens: Int,
        window_columns: Int,
        block_columns: Int,
        sampling: Sampling,
        logit_columns: Int | None = None,
    ) -> StepOutputs:
        """Count, delay, delegate and change; notes windows with pads."""
        self._engine.padded_windows += int((window_columns < 0).any())
        window = (window_tokens, window_columns, block_columns)
        return self._step(self._inner.window(*window, sampling, logit_columns))

    def plain(
        self,
        canvas: Canvas,
        block_columns: Int,
        sampling: Sampling,
        logit_columns: Int | None = None,
    ) -> StepOutputs:
        """Count, delay, delegate and change."""
        return self._step(self._inner.plain(canvas, block_columns, sampling, logit_columns))

    def cache_bytes(self) -> int:
        """As the real session says."""
        return self._inner.cache_bytes()

    def close(self) -> None:
        """Count and delegate."""
        self._engine.closed_sessions += 1
        self._inner.close()

    def _step(self, outputs: StepOutputs) -> StepOutputs:
        self._engine.steps += 1
        time.sleep(self._engine.delay_s)
        return self._engine.change(outputs)


def broken_confidence(outputs: StepOutputs) -> StepOutputs:
    """One NaN among the confidences."""
    confidence = outputs.confidence.copy()
    confidence[-1, -1] = np.nan
    return replace(outputs, confidence=confidence)
