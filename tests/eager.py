"""The eager module over a weights file, read with the safetensors package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from lacache_trt.engines.base import Canvas, Int, Sampling, StepOutputs
from lacache_trt.model.config import ModelConfig
from lacache_trt.model.ops import TorchOps
from lacache_trt.model.programs import FillProgram, PlainProgram, ReuseProgram
from lacache_trt.model.transformer import Transformer


def load_eager(weights: Path, config: ModelConfig, dtype: torch.dtype) -> Transformer:
    """The model with the weights of the file, in `dtype`."""
    with torch.device("meta"):
        model = Transformer(config, TorchOps(), dtype)
    tensors = {name.replace(".", "/"): value for name, value in load_file(weights).items()}
    parameters = {
        name: torch.nn.Parameter(value.to(dtype), requires_grad=False)
        for name, value in tensors.items()
    }
    assert set(parameters) == set(model.weights)
    for name, parameter in parameters.items():
        assert parameter.shape == model.weights[name].shape, name
        model.weights[name] = parameter
    return model


class EagerSession:
    """A `Session` whose engine is the module itself."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self._caches: tuple[torch.Tensor, ...] = ()
        self._geometry: tuple[torch.Tensor, ...] = ()

    def fill(self, canvas: Canvas, block_columns: Int) -> None:
        """Compute the caches."""
        tokens, *geometry = _tensors(*vars(canvas).values())
        (block,) = _tensors(block_columns)
        with torch.inference_mode():
            self._caches = FillProgram(self._model)(tokens, *geometry, block)
        self._geometry = (block, *geometry)

    def reuse(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """One step over the caches."""
        inputs = (*_tensors(block_tokens), *self._geometry, *self._caches)
        return self._step(ReuseProgram(self._model), inputs, sampling, logit_columns)

    def plain(
        self,
        canvas: Canvas,
        block_columns: Int,
        sampling: Sampling,
        logit_columns: Int | None = None,
    ) -> StepOutputs:
        """One step without caches."""
        inputs = _tensors(*vars(canvas).values(), block_columns)
        return self._step(PlainProgram(self._model), inputs, sampling, logit_columns)

    def _step(
        self,
        program: torch.nn.Module,
        inputs: tuple[torch.Tensor, ...],
        sampling: Sampling,
        logit_columns: Int | None,
    ) -> StepOutputs:
        if logit_columns is None:
            logit_columns = np.zeros((len(sampling.seed), 0), np.int32)
        extra = _tensors(*vars(sampling).values(), logit_columns)
        with torch.inference_mode():
            outputs = program(*inputs, *extra)
        return StepOutputs(*(value.numpy() for value in outputs))


def _tensors(*arrays: NDArray[np.generic]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
