"""The independent truth for approximate caches: transformers' model with K and V put in by hand.

Every forward runs all the rows that it is given. Inside each layer's attention, K and V of rows
that are not `fresh` are replaced by the ones kept from an earlier forward: what such a row would
have computed reaches nobody. So the fresh rows see exactly what a window step must show them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from reference_model import ReferenceModel, float64_attention, load_reference
from torch import Tensor, nn
from transformers import AttentionInterface

STALE_ATTENTION = "lacache_reference_stale"


LONGEST = 256


@dataclass
class Kept:
    """K and V of one sequence: layer -> ([Hkv, LONGEST, d], the same), by rotary position."""

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass
class _Forward:
    """The forward that is running: its rows' positions, which of them are fresh, and the state."""

    positions: Tensor
    fresh: Tensor
    kept: Kept

    def exchange(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep fresh rows, then take every row from what is kept: [1, Hkv, N, d] each."""
        known = self.kept.layers.setdefault(layer, (_nothing(key), _nothing(value)))
        fresh = self.positions[self.fresh]
        for store, given in zip(known, (key, value), strict=True):
            store[:, fresh] = given[0][:, self.fresh]
        return known[0][None, :, self.positions], known[1][None, :, self.positions]


def _nothing(given: Tensor) -> Tensor:
    """NaN for every position: a row that was never kept must not be read."""
    heads, width = given.shape[1], given.shape[3]
    return torch.full((heads, LONGEST, width), torch.nan, dtype=given.dtype)


def stale_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Float64 attention over exchanged keys and values."""
    running: _Forward = module.stale_owner.running  # type: ignore[union-attr, assignment]
    key, value = running.exchange(module.layer_idx, key, value)  # type: ignore[arg-type]
    return float64_attention(module, query, key, value, attention_mask, scaling)


AttentionInterface.register(STALE_ATTENTION, stale_attention)


class _Owner:
    """Carries the running forward to the attention of every layer."""

    running: _Forward


class StaleModel:
    """A float64 model whose forward can be told which rows may be fresh."""

    def __init__(self, checkpoint: Path) -> None:
        self.reference: ReferenceModel = load_reference(checkpoint)
        self._owner = _Owner()
        network = self.reference.network
        network.config._attn_implementation = STALE_ATTENTION  # type: ignore[union-attr]
        for module in network.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "k_proj"):
                object.__setattr__(module, "stale_owner", self._owner)

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        kept: Kept,
        fresh: Sequence[bool] | None = None,
    ) -> NDArray[np.float64]:
        """Unshifted logits of every row: float64 [N, V]; rows that are not fresh mean nothing."""
        count = len(tokens)
        marks = torch.tensor([True] * count if fresh is None else list(fresh))
        self._owner.running = _Forward(torch.tensor(list(positions)), marks, kept)
        with torch.no_grad():
            logits: Tensor = self.reference.network(
                input_ids=torch.tensor([list(tokens)]),
                attention_mask=torch.zeros(1, 1, count, count, dtype=torch.float64),
                position_ids=torch.tensor([list(positions)]),
                use_cache=False,
            ).logits
        return logits[0].double().numpy()
