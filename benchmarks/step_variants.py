"""The denoising step with one thing switched off at a time, and the floor below all of them.

    exact            `ReuseProgram`: what the engine runs
    last layer full  the last layer on every row, the head and the sampler on the block's
    head full        the last layer, the head and the sampler on every row
    no caches        `PlainProgram`: the cuts of `exact`, but layer 0 computed anew
    unfused          `exact` with norm, RoPE and SwiGLU from plain torch operators
    eager            `exact` without a graph
The floor holds the step's GEMMs and cuDNN attention and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from ragged_attention import sdpa
from torch import Tensor

from lacache_trt.engines.cuda.gemm import GemmTable
from lacache_trt.engines.cuda.ops import CudaOps
from lacache_trt.model.config import ModelConfig
from lacache_trt.model.ops import TorchOps
from lacache_trt.model.programs import ReuseProgram, rows_of


class UnfusedOps(CudaOps):
    """Token-wise ops as plain torch operators; linears and attention stay."""

    _plain = TorchOps()

    def linear_add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return residual + self.linear(x, weight)

    def norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._plain.norm(hidden, weight, eps)

    def split_rope(
        self, fused: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, head_dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = self._plain.split_rope(fused, cos, sin, heads, kv_heads, head_dim)
        q, k, v = (part.contiguous() for part in parts)
        return q, k, v

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return self._plain.swiglu(gate_up)


class FullLastLayer(ReuseProgram):
    """`ReuseProgram` without the last layer's cut."""

    def _finish(
        self,
        first_layer: int,
        hidden: Tensor,
        geometry: tuple[Tensor, Tensor, Tensor],
        read: Tensor,
    ) -> Tensor:
        hidden = self._all_rows(first_layer, hidden, geometry)
        return self.model.head(rows_of(hidden, read))

    def _all_rows(
        self,
        first_layer: int,
        hidden: Tensor,
        geometry: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        positions, valid_from, valid_to = geometry
        model = self.model
        cos, sin = model.rope_tables(positions)
        last = model.config.num_layers - 1
        for layer in range(first_layer, last + 1):
            normed = model.attention_input(layer, hidden)
            if layer == last and layer > 0:
                k, v = model.project_kv(layer, normed, cos, sin)
                q = model.project_q(layer, normed, cos, sin)
            else:
                q, k, v = model.project_qkv(layer, normed, cos, sin)
            attended = model.ops.attention(q, k, v, valid_from, valid_to)
            hidden = model.after_attention(layer, hidden, attended)
        return hidden


class FullHead(FullLastLayer):
    """`FullLastLayer` with the head and the sampler on every row; the outputs are all rows'."""

    def _finish(
        self,
        first_layer: int,
        hidden: Tensor,
        geometry: tuple[Tensor, Tensor, Tensor],
        read: Tensor,
    ) -> Tensor:
        return self.model.head(self._all_rows(first_layer, hidden, geometry))

    def _sample(
        self, logits: Tensor, positions: Tensor, block_columns: Tensor, sampling: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        return self.model.ops.sample_block(logits, positions, *sampling)


def floor_calls(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    gemms: GemmTable,
    rows: int,
    columns: int,
    block: int,
    *,
    full_first_layer: bool = False,
) -> list[Callable[[], object]]:
    """The GEMMs and the attention of one exact step, on fixed random inputs.

    `full_first_layer` counts layer 0 on every row, as a step without caches computes it.
    """
    device, dtype = weights["embed.weight"].device, weights["embed.weight"].dtype

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    many, few = rows * columns, rows * block
    inputs = {
        (m, width): draw(m, width)
        for m in (many, few)
        for width in (config.hidden_size, config.query_size, config.intermediate_size)
    }
    heads = (rows, config.num_kv_heads, columns, config.head_dim)
    k, v = draw(*heads), draw(*heads)
    q = {m: draw(rows, config.num_heads, m // rows, config.head_dim) for m in (many, few)}
    calls: list[Callable[[], object]] = []

    def linear(name: str, m: int) -> None:
        weight = weights[name]
        calls.append(lambda: gemms.multiply(inputs[m, weight.shape[0]], weight))

    for layer in range(config.num_layers):
        prefix, last = f"layers.{layer}.", 0 < layer == config.num_layers - 1
        first = few if layer == 0 and not full_first_layer else many
        after = few if last else many
        if last:
            linear(prefix + "kv.weight", many)
            linear(prefix + "q.weight", few)
        else:
            linear(prefix + "qkv.weight", first)
        queries = q[few if last else first]
        calls.append(lambda queries=queries: sdpa(queries, k, v))
        for name in ("attn_out", "gate_up", "down"):
            linear(f"{prefix}{name}.weight", after)
    linear("head.weight", few)
    return calls
