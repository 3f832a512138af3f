"""K and V of all layers of a lane, written in place by the steps that compute them.

`reuse-kv` writes every layer's K and V where the projection computes them, straight into the cache.
`window` writes them side by side for the window's columns; its attention reads them there, and at
the end of the step one kernel puts those of all layers into the cache; where one kernel runs all
layers, that one does. A replay of a window step gives the same again: it depends on nothing of the
cache that it writes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from lacache_trt.engines.cuda.fused_window import small_window
from lacache_trt.engines.cuda.ops import CudaOps
from lacache_trt.model.columns import rows_of
from lacache_trt.model.config import ModelConfig
from lacache_trt.model.programs import Attend, KeyValue, ReuseKVProgram, WindowProgram
from lacache_trt.model.transformer import Transformer
from lacache_trt.plugins.rope import kernel as rope_kernel
from lacache_trt.plugins.window_write import kernel as window_write

Layers = Callable[[Tensor, Tensor], Tensor]
"""From the embedded window and its positions to the residual behind all layers."""


class Kept:
    """`keys` and `values` [L, B, Hkv, N, d], outside the memory pool of the graphs."""

    def __init__(self, model: Transformer, rows: int, columns: int, device: torch.device) -> None:
        config, dtype = model.config, model.weight("embed.weight").dtype
        shape = (config.num_layers, rows, config.num_kv_heads, columns, config.head_dim)
        self._model = model
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)

    def reuse(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`ReuseKVProgram` into the cache; returns the predictions."""
        into = list(zip(self.keys, self.values, strict=True))
        # The first projection is that of the block's rows in layer 0.
        program = _ReuseInPlace(_keeping(self._model, [None, *into[1:]]), into)
        outputs: tuple[Tensor, ...] = program(*inputs)
        return outputs

    def window(self, tokens: Tensor, columns: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """`WindowProgram` over the cache, which it updates; returns the predictions.

        `others`: positions, valid_from, valid_to, block_columns and the step's inputs.
        """
        geometry, step = others[:4], others[4:]
        arguments = (tokens, columns, *geometry, self.keys, self.values, *step)
        layers = self._fused(columns, geometry[1], geometry[2])
        if layers is not None:
            outputs: tuple[Tensor, ...] = _WindowAtOnce(self._model, layers)(*arguments)
            return outputs
        shape = (*self.keys.shape[:3], columns.shape[1], self.keys.shape[4])
        fresh = self.keys.new_empty(shape), self.values.new_empty(shape)
        into = list(zip(*fresh, strict=True))
        outputs = _WindowInPlace(_keeping(self._model, into), into)(*arguments)
        window_write.launch(*fresh, columns, self.keys, self.values)
        return outputs

    def _fused(self, columns: Tensor, valid_from: Tensor, valid_to: Tensor) -> Layers | None:
        """All layers of this window as one call, where a kernel serves them."""
        ops = self._model.ops
        if not isinstance(ops, CudaOps) or ops.fused_window is None or not small_window(columns):
            return None
        ranges, cached = (valid_from, valid_to), (self.keys, self.values)
        return partial(ops.fused_window.run, columns, ranges, cached)

    def nbytes(self) -> int:
        """Bytes of both."""
        return 2 * self.keys.numel() * self.keys.element_size()


def kept_bytes(config: ModelConfig, rows: int, columns: int, element_bytes: int) -> int:
    """Device bytes of a `Kept`."""
    per_column = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return rows * columns * per_column * element_bytes


class KeepingOps(CudaOps):
    """Ops whose projections write k and v into the tensors given, one pair per projection.

    A pair of None stands for tensors of their own.
    """

    def __init__(self, ops: CudaOps, into: Iterable[KeyValue | None]) -> None:
        vars(self).update(vars(ops))
        self._into = iter(into)

    def split_rope(
        self, fused: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, head_dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        target = next(self._into) if kv_heads else None
        if target is None:
            return super().split_rope(fused, cos, sin, heads, kv_heads, head_dim)
        q = fused.new_empty(fused.shape[0], heads, fused.shape[1], head_dim)
        rope_kernel.launch(fused, cos, sin, q, *target)
        return q, *target


def _keeping(model: Transformer, into: Iterable[KeyValue | None]) -> Transformer:
    """The model with ops that keep; other ops (tests) compute apart and are copied from."""
    if not isinstance(model.ops, CudaOps):
        return model
    kept = copy.copy(model)
    kept.ops = KeepingOps(model.ops, into)
    return kept


def _put(kept: list[KeyValue], into: list[KeyValue]) -> None:
    for computed, targets in zip(kept, into, strict=True):
        for tensor, target in zip(computed, targets, strict=True):
            if tensor.data_ptr() != target.data_ptr():
                target.copy_(tensor)


class _ReuseInPlace(ReuseKVProgram):
    def __init__(self, model: Transformer, into: list[KeyValue]) -> None:
        super().__init__(model)
        self._into = into

    def _keep(self, kept: list[KeyValue]) -> tuple[Tensor, ...]:
        _put(kept, self._into)
        return ()


class _WindowInPlace(WindowProgram):
    def __init__(self, model: Transformer, into: list[KeyValue]) -> None:
        super().__init__(model)
        self._into = into

    def _keep(self, kept: list[KeyValue]) -> tuple[Tensor, ...]:
        _put(kept, self._into)
        return ()


class _WindowAtOnce(WindowProgram):
    """All layers are one call, which puts their K and V into the cache."""

    def __init__(self, model: Transformer, layers: Layers) -> None:
        super().__init__(model)
        self._layers = layers

    def _finish(
        self, first_layer: int, hidden: Tensor, positions: Tensor, read: Tensor, attend: Attend
    ) -> tuple[Tensor, list[KeyValue]]:
        hidden = self._layers(hidden, positions)
        return self.model.head(rows_of(hidden, read)), []

    def _keep(self, kept: list[KeyValue]) -> tuple[Tensor, ...]:
        return ()
