"""The three programs that become graphs: fill, reuse and plain.

Let C be the block's columns (consecutive in each row) and U the others. During a block's denoising
steps only tokens in C change, so everything token-wise that layer 0 computes for U, and layer 0's
attention state over the U keys, is computed once by `fill`. `reuse` is one whole denoising step
over these caches. `plain` is a step without them. The last layer and the head run only on the
rows that are read. Inputs and outputs are listed in `lacache_trt.contract`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lacache_trt.model.transformer import Transformer


def rows_of(values: Tensor, columns: Tensor) -> Tensor:
    """values[b, columns[b, j]] as [B, M, ...] for values [B, N, ...] and columns [B, M].

    One Gather on the flattened rows, which takes int32 indices in every runtime.
    """
    batch, length = values.shape[:2]
    offsets = torch.arange(batch, device=columns.device, dtype=columns.dtype)[:, None] * length
    table = values.reshape(batch * length, -1)
    picked = nn.functional.embedding(columns + offsets, table)
    return picked.reshape(*columns.shape, *values.shape[2:])


def place_block(values: Tensor, block_values: Tensor, block_columns: Tensor) -> Tensor:
    """values [B, N, D] with the block's rows taken from block_values [B, Bk, D]."""
    width = block_columns.shape[1]
    columns = torch.arange(values.shape[1], device=values.device, dtype=block_columns.dtype)
    slots = columns[None, :] - block_columns[:, :1]
    inside = (slots >= 0) & (slots < width)
    return torch.where(inside[..., None], rows_of(block_values, slots.clamp(0, width - 1)), values)


class _Program(nn.Module):
    """What the three programs share: the layers after the first, the head and the sampler."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def _read_columns(
        self, block_columns: Tensor, logit_columns: Tensor, valid_from: Tensor
    ) -> Tensor:
        """Columns whose hidden rows the head reads: the block's, then those asked for.

        Dream predicts a column from the row before it; a row's first real column from its own.
        """
        columns = torch.cat([block_columns, logit_columns], dim=1)
        if self.model.config.logit_shift:
            columns = torch.maximum(columns - 1, valid_from[:, None])
        return columns

    def _finish(
        self,
        first_layer: int,
        hidden: Tensor,
        geometry: tuple[Tensor, Tensor, Tensor],
        read: Tensor,
    ) -> Tensor:
        """Logits [B, Bk + R, V] of the rows `read`, from the residual before `first_layer`."""
        positions, valid_from, valid_to = geometry
        cos, sin = self.model.rope_tables(positions)
        last = self.model.config.num_layers - 1
        for layer in range(first_layer, last + 1):
            normed = self.model.attention_input(layer, hidden)
            if layer == last and layer > 0:
                k, v = self.model.project_kv(layer, normed, cos, sin)
                normed, hidden = rows_of(normed, read), rows_of(hidden, read)
                q = self.model.project_q(layer, normed, rows_of(cos, read), rows_of(sin, read))
            else:
                q, k, v = self.model.project_qkv(layer, normed, cos, sin)
            attended = self.model.ops.attention(q, k, v, valid_from, valid_to)
            hidden = self.model.after_attention(layer, hidden, attended)
        return self.model.head(rows_of(hidden, read) if last == 0 else hidden)

    def _sample(
        self, logits: Tensor, positions: Tensor, block_columns: Tensor, sampling: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        width = block_columns.shape[1]
        block_positions = rows_of(positions, block_columns)
        predicted = self.model.ops.sample_block(
            logits[:, :width].contiguous(), block_positions, *sampling
        )
        return (*predicted, logits[:, width:].to(torch.float32))


class FillProgram(nn.Module):
    """Layer 0's token-wise part for every column, and its attention state over the U keys."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        valid_from: Tensor,
        valid_to: Tensor,
        block_columns: Tensor,
    ) -> tuple[Tensor, ...]:
        """EmbedCache, RoPECache (q, k, v) and FACache (fa_max, fa_sum, fa_acc)."""
        embed = self.model.embed(tokens)
        cos, sin = self.model.rope_tables(positions)
        normed = self.model.attention_input(0, embed)
        q, k, v = self.model.project_qkv(0, normed, cos, sin)
        state = self.model.ops.attention_fill(q, k, v, valid_from, valid_to, block_columns)
        return (embed, q, k, v, *state)


class ReuseProgram(_Program):
    """One denoising step over the caches of `FillProgram`."""

    def forward(
        self,
        block_tokens: Tensor,
        block_columns: Tensor,
        positions: Tensor,
        valid_from: Tensor,
        valid_to: Tensor,
        embed: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        fa_max: Tensor,
        fa_sum: Tensor,
        fa_acc: Tensor,
        temperature: Tensor,
        seed: Tensor,
        step: Tensor,
        guide_row: Tensor,
        cfg_scale: Tensor,
        suppress_ids: Tensor,
        confidence_exclude_ids: Tensor,
        logit_columns: Tensor,
    ) -> tuple[Tensor, ...]:
        """token, confidence, margin, neg_entropy [B, Bk] and logits [B, R, V]."""
        model = self.model
        block_embed = model.embed(block_tokens)
        cos, sin = model.rope_tables(rows_of(positions, block_columns))
        normed = model.attention_input(0, block_embed)
        block_qkv = model.project_qkv(0, normed, cos, sin)
        state = (fa_max, fa_sum, fa_acc)
        attended = model.ops.attention_reuse(
            *block_qkv, q, k, v, *state, valid_from, valid_to, block_columns
        )
        hidden = place_block(embed, block_embed, block_columns)
        read = self._read_columns(block_columns, logit_columns, valid_from)
        if model.config.num_layers == 1:
            attended, hidden = rows_of(attended, read), rows_of(hidden, read)
            logits = model.head(model.after_attention(0, hidden, attended))
        else:
            hidden = model.after_attention(0, hidden, attended)
            logits = self._finish(1, hidden, (positions, valid_from, valid_to), read)
        sampling = (temperature, seed, step, guide_row, cfg_scale)
        return self._sample(
            logits, positions, block_columns, (*sampling, suppress_ids, confidence_exclude_ids)
        )


class PlainProgram(_Program):
    """One denoising step without caches."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        valid_from: Tensor,
        valid_to: Tensor,
        block_columns: Tensor,
        temperature: Tensor,
        seed: Tensor,
        step: Tensor,
        guide_row: Tensor,
        cfg_scale: Tensor,
        suppress_ids: Tensor,
        confidence_exclude_ids: Tensor,
        logit_columns: Tensor,
    ) -> tuple[Tensor, ...]:
        """The outputs of `ReuseProgram`."""
        read = self._read_columns(block_columns, logit_columns, valid_from)
        geometry = (positions, valid_from, valid_to)
        logits = self._finish(0, self.model.embed(tokens), geometry, read)
        sampling = (temperature, seed, step, guide_row, cfg_scale)
        return self._sample(
            logits, positions, block_columns, (*sampling, suppress_ids, confidence_exclude_ids)
        )
