"""The denoising step with one thing switched off at a time.

exact            `ReuseProgram`: what the engine runs
last layer full  the last layer on every row, the head and the sampler on the block's
head full        the last layer, the head and the sampler on every row
no caches        `PlainProgram`: the cuts of `exact`, but layer 0 computed anew
unfused          `exact` with residual adds, norm, RoPE and SwiGLU as torch operators
eager            `exact` without a graph
"""

from __future__ import annotations

from torch import Tensor

from lacache_trt.engines.cuda.ops import CudaOps
from lacache_trt.model.columns import rows_of
from lacache_trt.model.ops import TorchOps
from lacache_trt.model.programs import Attend, KeyValue, ReuseProgram


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
        positions: Tensor,
        read: Tensor,
        attend: Attend,
    ) -> tuple[Tensor, list[KeyValue]]:
        hidden = self._all_rows(first_layer, hidden, positions, attend)
        return self.model.head(rows_of(hidden, read)), []

    def _all_rows(
        self,
        first_layer: int,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
    ) -> Tensor:
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
            hidden = model.after_attention(layer, hidden, attend(layer, q, k, v))
        return hidden


class FullHead(FullLastLayer):
    """`FullLastLayer` with the head and the sampler on every row; the outputs are all rows'."""

    def _finish(
        self,
        first_layer: int,
        hidden: Tensor,
        positions: Tensor,
        read: Tensor,
        attend: Attend,
    ) -> tuple[Tensor, list[KeyValue]]:
        return self.model.head(self._all_rows(first_layer, hidden, positions, attend)), []

    def _sample(
        self, logits: Tensor, positions: Tensor, block_columns: Tensor, sampling: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        return self.model.ops.sample_block(logits, positions, *sampling)
