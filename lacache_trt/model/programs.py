"""The programs that become graphs: fill, reuse and plain; reuse-kv and window.

Let C be the block's columns (consecutive in each row) and U the others. During a block's denoising
steps only tokens in C change, so everything token-wise that layer 0 computes for U, and layer 0's
attention state over the U keys, is computed once by `fill`. `reuse` is one whole denoising step
over these caches. `plain` is a step without them. The last layer and the head run only on the
rows that are read. Inputs and outputs are listed in `lacache_trt.contract`.

`reuse-kv` is `reuse` that also returns K and V of every layer; `window` runs the rows of a window
alone, over the K and V of all other columns. That is approximate: in every layer but the first, K
and V of a column depend on tokens that may have changed since.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lacache_trt.model.columns import place_block, place_columns, rows_of
from lacache_trt.model.transformer import Transformer

KeyValue = tuple[Tensor, Tensor]
"""k and v of one layer, [B, Hkv, N, d]."""
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""From a layer's number and its q, k, v, the attention's output [B, M, Hq * d]."""


class _Program(nn.Module):
    """What the steps share: the layers after the first, the head and the sampler."""

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
        positions: Tensor,
        read: Tensor,
        attend: Attend,
    ) -> tuple[Tensor, list[KeyValue]]:
        """Logits [B, Bk + R, V] of the rows `read`, from the residual before `first_layer`.

        Also K and V of the layers run, for every row of `hidden`; `positions` are those rows'.
        """
        cos, sin = self.model.rope_tables(positions)
        last = self.model.config.num_layers - 1
        hidden, kept = self._whole_layers(range(first_layer, last), hidden, cos, sin, attend)
        if last == 0:
            hidden, kept = self._whole_layers(range(1), hidden, cos, sin, attend)
            return self.model.head(rows_of(hidden, read)), kept
        normed = self.model.attention_input(last, hidden)
        k, v = self.model.project_kv(last, normed, cos, sin)
        normed, hidden = rows_of(normed, read), rows_of(hidden, read)
        q = self.model.project_q(last, normed, rows_of(cos, read), rows_of(sin, read))
        hidden = self.model.after_attention(last, hidden, attend(last, q, k, v))
        return self.model.head(hidden), [*kept, (k, v)]

    def _whole_layers(
        self, layers: range, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> tuple[Tensor, list[KeyValue]]:
        """The residual behind layers that run on every row of `hidden`, and their K and V."""
        kept = []
        for layer in layers:
            normed = self.model.attention_input(layer, hidden)
            q, k, v = self.model.project_qkv(layer, normed, cos, sin)
            kept.append((k, v))
            hidden = self.model.after_attention(layer, hidden, attend(layer, q, k, v))
        return hidden, kept

    def _attention(self, valid_from: Tensor, valid_to: Tensor) -> Attend:
        """Ordinary attention over the valid columns."""
        return lambda layer, q, k, v: self.model.ops.attention(q, k, v, valid_from, valid_to)

    def _keep(self, kept: list[KeyValue]) -> tuple[Tensor, ...]:
        """K and V of all layers, [L, B, Hkv, N, d] each."""
        keys, values = zip(*kept, strict=True)
        return torch.stack(keys), torch.stack(values)

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
        block_q, block_k, block_v = model.project_qkv(0, normed, cos, sin)
        cached = (q, k, v, fa_max, fa_sum, fa_acc)
        attended = model.ops.attention_reuse(
            block_q, block_k, block_v, *cached, valid_from, valid_to, block_columns
        )
        hidden = place_block(embed, block_embed, block_columns)
        read = self._read_columns(block_columns, logit_columns, valid_from)
        kept: list[KeyValue] = []
        if model.config.num_layers == 1:
            attended, hidden = rows_of(attended, read), rows_of(hidden, read)
            logits = model.head(model.after_attention(0, hidden, attended))
        else:
            hidden = model.after_attention(0, hidden, attended)
            attend = self._attention(valid_from, valid_to)
            logits, kept = self._finish(1, hidden, positions, read, attend)
        sampling = (temperature, seed, step, guide_row, cfg_scale)
        outputs = self._sample(
            logits, positions, block_columns, (*sampling, suppress_ids, confidence_exclude_ids)
        )
        return self._returned(outputs, ((k, block_k), (v, block_v)), block_columns, kept)

    def _returned(
        self,
        outputs: tuple[Tensor, ...],
        first_layer: tuple[KeyValue, KeyValue],
        block_columns: Tensor,
        kept: list[KeyValue],
    ) -> tuple[Tensor, ...]:
        """What the graph returns, given layer 0's (k, block's k) and (v, block's v) and K and V of
        the other layers."""
        return outputs


class ReuseKVProgram(ReuseProgram):
    """`ReuseProgram` that also returns keys and values [L, B, Hkv, N, d], K after RoPE."""

    def _returned(
        self,
        outputs: tuple[Tensor, ...],
        first_layer: tuple[KeyValue, KeyValue],
        block_columns: Tensor,
        kept: list[KeyValue],
    ) -> tuple[Tensor, ...]:
        keys, values = (place_columns(*pair, block_columns) for pair in first_layer)
        return (*outputs, *self._keep([(keys, values), *kept]))


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
        attend = self._attention(valid_from, valid_to)
        logits, _ = self._finish(0, self.model.embed(tokens), positions, read, attend)
        sampling = (temperature, seed, step, guide_row, cfg_scale)
        return self._sample(
            logits, positions, block_columns, (*sampling, suppress_ids, confidence_exclude_ids)
        )


class WindowProgram(_Program):
    """One denoising step of a window's rows alone, over K and V of all other columns.

    A pad of the window (column -1) runs as if it stood at column 0, attends to what the others
    attend to, and is attended to by nobody. A row that the head would read outside the window is
    replaced by the nearest one inside.
    """

    def forward(
        self,
        window_tokens: Tensor,
        window_columns: Tensor,
        positions: Tensor,
        valid_from: Tensor,
        valid_to: Tensor,
        block_columns: Tensor,
        keys: Tensor,
        values: Tensor,
        temperature: Tensor,
        seed: Tensor,
        step: Tensor,
        guide_row: Tensor,
        cfg_scale: Tensor,
        suppress_ids: Tensor,
        confidence_exclude_ids: Tensor,
        logit_columns: Tensor,
    ) -> tuple[Tensor, ...]:
        """The outputs of `ReuseProgram`; window_keys and window_values [L, B, Hkv, W, d]."""
        width = window_columns.shape[1]
        read = self._read_columns(block_columns, logit_columns, valid_from)
        slots = (read - window_columns[:, :1]).clamp(0, width - 1)
        ranges = (window_columns, valid_from, valid_to)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.model.ops.attention_window(q, k, v, keys[layer], values[layer], *ranges)

        window_positions = rows_of(positions, window_columns.clamp(min=0))
        hidden = self.model.embed(window_tokens)
        logits, kept = self._finish(0, hidden, window_positions, slots, attend)
        sampling = (temperature, seed, step, guide_row, cfg_scale)
        outputs = self._sample(
            logits, positions, block_columns, (*sampling, suppress_ids, confidence_exclude_ids)
        )
        return (*outputs, *self._keep(kept))
