"""The engine interface: what the runtime needs from whoever executes the graphs.

An `Engine` is a loaded model, shared by every thread. A `Session` owns the caches of one batch in
flight: `fill` computes everything that stays the same while a block is denoised, `reuse` runs one
whole denoising step over those caches, `plain` runs a step without caches. `reuse_kv` is `reuse`
that also keeps K and V of all layers, `window` a step that recomputes a window of rows over them.
Arrays are NumPy; B rows, N columns, Bk block columns, W window columns, R logit columns,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lacache_trt.model.config import ModelConfig

Int = NDArray[np.int32]
Float = NDArray[np.float32]


@dataclass(frozen=True)
class Canvas:
    """A batch of token rows, left-padded to one length.

    Attributes:
        tokens: int32 [B, N]; what stands outside [valid_from, valid_to) is never attended to.
        positions: int32 [B, N]; rotary position of each column.
        valid_from: int32 [B]; first real column of each row.
        valid_to: int32 [B]; one past the last real column.
    """

    tokens: Int
    positions: Int
    valid_from: Int
    valid_to: Int


@dataclass(frozen=True)
class Sampling:
    """Per-row sampling inputs of one step.

    Attributes:
        temperature: float32 [B]; scales the Gumbel noise, 0 is greedy.
        seed: int32 [B].
        step: int32 [B]; the row's step counter, keys the noise.
        guide_row: int32 [B]; row whose logits guide this one, itself for no guidance.
        cfg_scale: float32 [B]; logits = guide + (cfg_scale + 1) (own - guide).
        suppress_ids: int32 [B, S], padded with -1; never predicted.
        confidence_exclude_ids: int32 [B, E], padded with -1; out of the confidence only.
    """

    temperature: Float
    seed: Int
    step: Int
    guide_row: Int
    cfg_scale: Float
    suppress_ids: Int
    confidence_exclude_ids: Int


@dataclass(frozen=True)
class StepOutputs:
    """Prediction for each block column.

    Attributes:
        token: int32 [B, Bk].
        confidence: float32 [B, Bk]; probability of `token`.
        margin: float32 [B, Bk]; probability of the best minus that of the second best.
        neg_entropy: float32 [B, Bk]; sum of p log p.
        logits: float32 [B, R, V]; the head's raw logits of the columns asked for.
    """

    token: Int
    confidence: Float
    margin: Float
    neg_entropy: Float
    logits: Float


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do; the runtime refuses a request that needs more.

    Attributes:
        caches: values of `GenerationConfig.cache` that it has the graphs for.
        logits: it returns the logits of `logit_columns`.
        max_batch: most rows of a batch; None for no limit but memory.
        window_fix: how to build one with `prefix` and `dual` if this one may lack their graphs;
            None where nothing would help.
    """

    caches: frozenset[str]
    logits: bool
    max_batch: int | None = None
    window_fix: str | None = None


class Session(Protocol):
    """The device-resident state of one batch in flight. Not shared between threads."""

    def fill(self, canvas: Canvas, block_columns: Int) -> None:
        """Compute the caches for these blocks: int32 [B, Bk], consecutive columns in each row."""

    def reuse(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """One step over the caches of the last `fill`; block_tokens int32 [B, Bk]."""

    def reuse_kv(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """`reuse`, bit for bit, that also keeps K and V of all layers and columns in the session.

        They belong to the last `fill` and its tokens; the next `fill` drops them.
        """

    def window(
        self,
        window_tokens: Int,
        window_columns: Int,
        block_columns: Int,
        sampling: Sampling,
        logit_columns: Int | None = None,
    ) -> StepOutputs:
        """One step that runs only the window's rows; their K and V replace the kept ones.

        Needs a `reuse_kv` since the last `fill`, whose positions and valid ranges still hold.
        window_tokens and window_columns int32 [B, W]: a consecutive run of columns in each row.
        A row with a narrower window than the others carries pads: columns of -1 behind the run,
        with any token; a pad is neither attended to nor kept.
        block_columns int32 [B, Bk]: consecutive, inside the window, Bk <= W; the outputs are
        theirs. All other columns keep the K and V of the last step that ran them.
        logit_columns must be columns of the window.
        A model with a logit shift predicts a column from the row before it, and the window's
        first column from its own row, since the row before did not run: the caller must have
        committed that column already, or have put the row before it into the window.
        """

    def plain(
        self,
        canvas: Canvas,
        block_columns: Int,
        sampling: Sampling,
        logit_columns: Int | None = None,
    ) -> StepOutputs:
        """One step without caches."""

    def cache_bytes(self) -> int:
        """Bytes that the caches of this session hold now."""

    def close(self) -> None:
        """Release the caches; closing twice is allowed."""


class Engine(Protocol):
    """A loaded model."""

    name: str
    device: str
    config: ModelConfig
    capabilities: Capabilities

    def session(self) -> Session:
        """A new session; any number may exist at once."""

    def close(self) -> None:
        """Release the model; sessions must not be used afterwards."""

    def __enter__(self) -> Engine: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class EngineLoader(Protocol):
    """Opens a built engine directory whose manifest has been checked."""

    def __call__(self, directory: Path) -> Engine: ...
