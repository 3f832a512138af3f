"""Who answers: a case of the torch reference, or an engine directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lacache_trt.accuracy.dataset import State
from lacache_trt.accuracy.decode import decode, on_device, predict
from lacache_trt.accuracy.models import StudyOps
from lacache_trt.closing import ClosesOnExit
from lacache_trt.engines.base import Int, Sampling
from lacache_trt.errors import InvalidRequestError
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.columns import rows_of
from lacache_trt.model.config import ModelConfig
from lacache_trt.model.transformer import Transformer
from lacache_trt.runtime import Runtime


class Candidate(Protocol):
    """Whoever can answer problems and predict blocks."""

    name: str
    most_rows: int

    def answers(self, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> Int:
        """Generated tokens int32 [B, gen_length] of prompts of one length."""

    def predictions(self, state: State) -> tuple[Tensor, list[Tensor]]:
        """Logits float32 [B, Bk, V] and, where known, each layer's residual rows [B, Bk, D]."""


class TorchCandidate:
    """A model of `build_model`."""

    def __init__(
        self, name: str, model: Transformer, ops: StudyOps, device: torch.device, most_rows: int
    ) -> None:
        self.name, self.most_rows = name, most_rows
        self._model, self._ops, self._device = model, ops, device

    def answers(self, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> Int:
        """See `Candidate`."""
        return decode(self._model, prompts, config, self._device)

    @torch.inference_mode()
    def predictions(self, state: State) -> tuple[Tensor, list[Tensor]]:
        """See `Candidate`; the residual stream after each layer, at the block's columns."""
        tensors = on_device(state.canvas, self._device)
        columns = torch.from_numpy(state.columns).to(self._device)
        residuals: list[Tensor] = []

        def keep(name: str, hidden: Tensor) -> None:
            if name.endswith(".down"):
                whole = hidden.shape[1] == state.canvas.tokens.shape[1]
                rows = rows_of(hidden, columns) if whole else hidden[:, : columns.shape[1]]
                residuals.append(rows.float())

        self._ops.on_residual = keep
        try:
            _, _, logits = predict(self._model, tensors, columns, logits=True)
        finally:
            self._ops.on_residual = None
        return logits, residuals


class EngineCandidate(ClosesOnExit):
    """An engine directory, through `Runtime` and its sessions."""

    def __init__(self, directory: Path, most_rows: int) -> None:
        self.name = directory.name
        self._runtime = Runtime.load(directory)
        engine = self._runtime.engine
        limit = engine.capabilities.max_batch
        self.most_rows = most_rows if limit is None else min(most_rows, limit)
        if not engine.capabilities.logits:
            raise InvalidRequestError(
                "the engine returns no logits",
                got=f"{engine.name} engine in {directory}",
                expected="an engine with logit columns",
                fix="build it with the onnxruntime or the cuda engine",
            )

    @property
    def model_config(self) -> ModelConfig:
        """The architecture, to compare with other engines'."""
        return self._runtime.engine.config

    @property
    def device(self) -> str:
        """Engine and device."""
        return f"{self._runtime.engine.name} on {self._runtime.engine.device}"

    def close(self) -> None:
        """Release the engine."""
        self._runtime.close()

    def answers(self, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> Int:
        """See `Candidate`; exact caches."""
        results = self._runtime.generate([list(prompt) for prompt in prompts], config)
        listed = results if isinstance(results, list) else [results]
        return np.array([result.tokens for result in listed], np.int32)

    def predictions(self, state: State) -> tuple[Tensor, list[Tensor]]:
        """See `Candidate`; one fill and one reuse, no residuals."""
        engine = self._runtime.engine
        count = len(state.members)
        sampling = Sampling(
            temperature=np.zeros(count, np.float32),
            seed=np.zeros(count, np.int32),
            step=np.zeros(count, np.int32),
            guide_row=np.arange(count, dtype=np.int32),
            cfg_scale=np.zeros(count, np.float32),
            suppress_ids=np.full((count, 1), engine.config.mask_id, np.int32),
            confidence_exclude_ids=np.full((count, 1), -1, np.int32),
        )
        session = engine.session()
        try:
            session.fill(state.canvas, state.columns)
            tokens = np.take_along_axis(state.canvas.tokens, state.columns, axis=1)
            logits = session.reuse(tokens, sampling, state.columns).logits
            return torch.from_numpy(logits), []
        finally:
            session.close()
