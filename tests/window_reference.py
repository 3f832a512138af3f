"""The independent truth of the approximate caches: transformers' layers run by hand in float64.

`KeyValueReference` keeps K and V of every layer and column of one unpadded row and recomputes the
columns it is told to, from transformers' own norms, projections, rotary function and MLPs. Which
columns are fresh and which stale is therefore explicit; no code is shared with the toolkit.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from reference_model import ReferenceModel
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


class KeyValueReference:
    """One row of `length` columns at positions 0, 1, ..."""

    def __init__(self, reference: ReferenceModel, length: int) -> None:
        self._network = reference.network
        self._reference = reference
        config = reference.network.config
        attention = reference.network.model.layers[0].self_attn
        shape = (
            config.num_hidden_layers,
            config.num_key_value_heads,
            length,
            attention.head_dim,
        )
        self.keys = torch.full(shape, torch.nan, dtype=torch.float64)
        self.values = torch.full(shape, torch.nan, dtype=torch.float64)

    def run(
        self, tokens: NDArray[np.integer], columns: NDArray[np.integer]
    ) -> dict[int, NDArray[np.float64]]:
        """Recompute these columns over the K and V of all others; head outputs by column."""
        places = torch.as_tensor(np.asarray(columns), dtype=torch.long)
        network = self._network.model
        with torch.no_grad():
            hidden = network.embed_tokens(torch.as_tensor(np.asarray(tokens)).long()[None])
            cos, sin = network.rotary_emb(hidden, places[None])
            for index, layer in enumerate(network.layers):
                hidden = hidden + self._attend(index, layer, hidden, cos, sin, places)
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            logits = self._network.lm_head(network.norm(hidden))[0].numpy()
        return {int(column): logits[i] for i, column in enumerate(columns)}

    def predictions(
        self, rows: dict[int, NDArray[np.float64]], columns: NDArray[np.integer]
    ) -> NDArray[np.float64]:
        """float64 [M, V] for these columns, shifted if the family shifts.

        A column whose predecessor did not run is predicted by itself.
        """
        back = 1 if self._reference.shift else 0
        return np.stack([rows[c - back if c - back in rows else c] for c in columns.tolist()])

    def _attend(
        self, index: int, layer: torch.nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor,
        places: Tensor,
    ) -> Tensor:  # fmt: skip
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)

        def heads(projection: torch.nn.Module) -> Tensor:
            return projection(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

        q, k = apply_rotary_pos_emb(heads(attention.q_proj), heads(attention.k_proj), cos, sin)
        self.keys[index][:, places] = k[0]
        self.values[index][:, places] = heads(attention.v_proj)[0]
        group = q.shape[1] // self.keys.shape[1]
        keys = self.keys[index].repeat_interleave(group, dim=0)
        values = self.values[index].repeat_interleave(group, dim=0)
        shares = torch.softmax(q[0] @ keys.transpose(1, 2) / attention.head_dim**0.5, dim=-1)
        return attention.o_proj((shares @ values).transpose(0, 1).flatten(1))[None]
