"""The one definition of the model: a decoder transformer without causal mask.

Used as it stands as eager reference, as source of the ONNX graphs and by the CUDA engine; only the
`Ops` object differs. An engine may update the residual stream in place (`Ops.linear_add`), so a
caller passes tensors that it does not need again.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from lacache_trt.model.config import (
    INPUT_SCALE,
    Granularity,
    ModelConfig,
    fp8_dtypes,
    parameter_shapes,
)
from lacache_trt.model.ops import Ops


def rope_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [..., d / 2] in float32 of positions [...] times frequencies [d / 2]."""
    angles = positions[..., None].to(torch.float32) * frequencies
    return angles.cos(), angles.sin()


class Transformer(nn.Module):
    """Parameters named and shaped as in the weights file, and the pieces of a forward pass.

    The linears named in `fp8` take inputs quantised per group, or quantise them with a static scale
    (per channel); see `lacache_trt.model.fp8`.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        dtype: torch.dtype,
        fp8: Collection[str] = (),
        granularity: Granularity = "per-group",
    ) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.fp8 = frozenset(fp8)
        self._grouped = self.fp8 if granularity == "per-group" else frozenset()
        kinds = fp8_dtypes(self.fp8, granularity)
        dtypes = {name: getattr(torch, kind) for name, kind in kinds.items()}
        self.weights = nn.ParameterDict(
            {
                name.replace(".", "/"): nn.Parameter(
                    torch.empty(shape, dtype=dtypes.get(name, dtype)), False
                )
                for name, shape in parameter_shapes(config, self.fp8, granularity).items()
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
        """cos and sin [B, N, d / 2] in float32 of position * `rope_frequencies`."""
        return rope_tables(positions, self.rope_frequencies(positions.device))

    def rope_frequencies(self, device: torch.device) -> Tensor:
        """float32 [d / 2]: theta**(-2 i / d)."""
        half = self.config.head_dim // 2
        exponents = torch.arange(half, dtype=torch.float32, device=device) / half
        frequencies: Tensor = 1.0 / self.config.rope_theta**exponents
        return frequencies

    def attention_input(self, layer: int, hidden: Tensor) -> Tensor:
        """Norm of the residual stream, the input of the layer's projections."""
        return self._norm(f"layers.{layer}.attn_norm", hidden)

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
        linear = f"layers.{layer}.{name}"
        bias = self.weight(linear + ".bias") if self.config.qkv_bias else None
        if linear in self._grouped:
            fused = self._group_linear(linear, self.ops.group_quant(normed))
            fused = fused if bias is None else fused + bias
        else:
            fused = self._linear(linear, normed, bias)
        return self.ops.split_rope(fused, *tables, heads, kv_heads, self.config.head_dim)

    def after_attention(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """The residual stream after the output projection and the SwiGLU FFN."""
        prefix = f"layers.{layer}."
        out, down = prefix + "attn_out", prefix + "down"
        if out in self._grouped:
            hidden = self._group_linear_add(out, hidden, self.ops.group_quant(attended))
        else:
            hidden = self._linear_add(out, hidden, attended)
        gate_up = self._normed_linear(prefix + "ffn_norm", prefix + "gate_up", hidden)
        if down in self._grouped:
            return self._group_linear_add(down, hidden, self.ops.swiglu_quant(gate_up))
        return self._linear_add(down, hidden, self.ops.swiglu(gate_up))

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [B, M, V] of the rows given."""
        return self._normed_linear("norm", "head", hidden)

    def _norm(self, name: str, hidden: Tensor) -> Tensor:
        return self.ops.norm(hidden, self.weight(name + ".weight"), self.config.norm_eps)

    def _normed_linear(self, norm: str, linear: str, hidden: Tensor) -> Tensor:
        if linear not in self._grouped:
            return self._linear(linear, self._norm(norm, hidden))
        weight = self.weight(norm + ".weight")
        quantised = self.ops.norm_quant(hidden, weight, self.config.norm_eps)
        return self._group_linear(linear, quantised)

    def _linear(self, linear: str, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear in the model's dtype, or in FP8 per channel."""
        if linear not in self.fp8:
            return self.ops.linear(x, self.weight(linear + ".weight"), bias)
        product = self._channel_linear(linear, x)
        return product if bias is None else product + bias

    def _linear_add(self, linear: str, residual: Tensor, x: Tensor) -> Tensor:
        if linear not in self.fp8:
            return self.ops.linear_add(residual, x, self.weight(linear + ".weight"))
        return residual + self._channel_linear(linear, x)

    def _channel_linear(self, linear: str, x: Tensor) -> Tensor:
        input_scale, scale = self.weight(linear + INPUT_SCALE), self.weight(linear + ".scale")
        return self.ops.channel_linear(x, input_scale, self.weight(linear + ".weight"), scale)

    def _group_linear(self, linear: str, quantised: tuple[Tensor, Tensor]) -> Tensor:
        return self.ops.group_linear(*quantised, *self._fp8_weight(linear))

    def _group_linear_add(
        self, linear: str, residual: Tensor, quantised: tuple[Tensor, Tensor]
    ) -> Tensor:
        return self.ops.group_linear_add(residual, *quantised, *self._fp8_weight(linear))

    def _fp8_weight(self, linear: str) -> tuple[Tensor, Tensor, Tensor]:
        """Values, scales, and one element of the model's dtype, which the result will have."""
        weight, scale = self.weight(linear + ".weight"), self.weight(linear + ".scale")
        return weight, scale, self.weight("norm.weight")[:1]
