"""The one definition of the model: a decoder transformer without causal mask.

Used as it stands as eager reference, as source of the ONNX graphs and by the CUDA engine; only the
`Ops` object differs. The residual stream travels as a pair (hidden, delta) whose sum it is, so
that an engine can fuse each addition into the norm that follows it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lacache_trt.model.config import ModelConfig, parameter_shapes
from lacache_trt.model.ops import Ops


class Transformer(nn.Module):
    """Parameters named and shaped as in the weights file, and the pieces of a forward pass."""

    def __init__(self, config: ModelConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.weights = nn.ParameterDict(
            {
                name.replace(".", "/"): nn.Parameter(torch.empty(shape, dtype=dtype), False)
                for name, shape in parameter_shapes(config).items()
            }
        )

    def weight(self, name: str) -> Tensor:
        """The parameter that the weights file calls `name`."""
        parameter: Tensor = self.weights[name.replace(".", "/")]
        return parameter

    def embed(self, tokens: Tensor) -> Tensor:
        """Embedding rows [B, N, D] of tokens [B, N]."""
        return nn.functional.embedding(tokens, self.weight("embed.weight"))

    def rope_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, N, d / 2] in float32 of position * theta**(-2 i / d)."""
        half = self.config.head_dim // 2
        exponents = torch.arange(half, dtype=torch.float32, device=positions.device) / half
        frequencies = 1.0 / self.config.rope_theta**exponents
        angles = positions[..., None].to(torch.float32) * frequencies
        return angles.cos(), angles.sin()

    def attention_input(
        self, layer: int, hidden: Tensor, delta: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Residual and its norm, the input of the layer's projections."""
        weight = self.weight(f"layers.{layer}.attn_norm.weight")
        return self.ops.add_norm(hidden, delta, weight, self.config.norm_eps)

    def project_qkv(
        self, layer: int, normed: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, Hq, N, d], k and v [B, Hkv, N, d]; q and k after RoPE."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        return self._project(layer, "qkv", normed, (cos, sin), heads, kv_heads)

    def project_q(self, layer: int, normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """q [B, Hq, M, d] of the last layer, for the rows that the head reads."""
        return self._project(layer, "q", normed, (cos, sin), self.config.num_heads, 0)[0]

    def project_kv(
        self, layer: int, normed: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """k and v [B, Hkv, N, d] of the last layer, for every row."""
        return self._project(layer, "kv", normed, (cos, sin), 0, self.config.num_kv_heads)[1:]

    def _project(
        self,
        layer: int,
        name: str,
        normed: Tensor,
        tables: tuple[Tensor, Tensor],
        heads: int,
        kv_heads: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        prefix = f"layers.{layer}.{name}"
        bias = self.weight(prefix + ".bias") if self.config.qkv_bias else None
        fused = self.ops.linear(normed, self.weight(prefix + ".weight"), bias)
        return self.ops.split_rope(fused, *tables, heads, kv_heads, self.config.head_dim)

    def after_attention(
        self, layer: int, hidden: Tensor, attended: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Output projection, residual, norm and SwiGLU FFN: the (hidden, delta) pair after it."""
        prefix = f"layers.{layer}."
        delta = self.ops.linear(attended, self.weight(prefix + "attn_out.weight"))
        norm_weight = self.weight(prefix + "ffn_norm.weight")
        hidden, normed = self.ops.add_norm(hidden, delta, norm_weight, self.config.norm_eps)
        gate_up = self.ops.linear(normed, self.weight(prefix + "gate_up.weight"))
        return hidden, self.ops.linear(
            self.ops.swiglu(gate_up), self.weight(prefix + "down.weight")
        )

    def head(self, hidden: Tensor, delta: Tensor) -> Tensor:
        """Logits [B, M, V] of the rows given."""
        weight = self.weight("norm.weight")
        _, normed = self.ops.add_norm(hidden, delta, weight, self.config.norm_eps)
        return self.ops.linear(normed, self.weight("head.weight"))
