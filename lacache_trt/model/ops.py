"""The ops that the model is written with, and the two implementations that need no GPU.

`TorchOps` is the eager definition. `ExportOps` records the ops of domain `lacache` as ONNX
nodes while a program is exported. The CUDA engine brings a third, over the Triton kernels.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lacache_trt.model.channel_linear import channel_linear, record_channel_linear
from lacache_trt.plugins.attention.op import ATTENTION
from lacache_trt.plugins.attention_fill.op import ATTENTION_FILL
from lacache_trt.plugins.attention_reuse.op import ATTENTION_REUSE
from lacache_trt.plugins.attention_window.op import ATTENTION_WINDOW
from lacache_trt.plugins.group_linear.op import GROUP_LINEAR
from lacache_trt.plugins.group_quant.op import GROUP_QUANT
from lacache_trt.plugins.rms_norm_quant.op import RMS_NORM_QUANT
from lacache_trt.plugins.sample_block.op import SAMPLE_BLOCK
from lacache_trt.plugins.spec import OpSpec
from lacache_trt.plugins.swiglu_quant.op import SWIGLU_QUANT


class Ops(Protocol):
    """Shapes: x [B, N, D]; cos, sin [B, N, d / 2] float32; weights [in, out]."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight + bias."""

    def linear_add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """residual + x @ weight; may overwrite `residual`."""

    def norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm in float32, rounded, times weight."""

    def split_rope(
        self, fused: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, head_dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, heads, N, d] and k, v [B, kv_heads, N, d] of a projection; q and k after RoPE.

        Either number of heads may be 0 where the projection has only the others.
        """

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of the two halves of the last dimension."""

    def norm_quant(self, hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`norm`, quantised per group: E4M3 [B, N, D] and float32 scales [B, N, D / 128]."""

    def swiglu_quant(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """`swiglu`, quantised per group."""

    def group_quant(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x, quantised per group."""

    def group_linear(
        self, quantised: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, like: Tensor
    ) -> Tensor:
        """x @ weight.T of quantised x and weight [out, in], in the dtype of `like`."""

    def group_linear_add(
        self,
        residual: Tensor,
        quantised: Tensor,
        scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        like: Tensor,
    ) -> Tensor:
        """residual + `group_linear`; may overwrite `residual`."""

    def channel_linear(
        self, x: Tensor, input_scale: Tensor, weight: Tensor, weight_scale: Tensor
    ) -> Tensor:
        """See `lacache_trt.model.channel_linear`."""

    def attention_fill(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """See `plugins/attention_fill`."""

    def attention_reuse(self, *tensors: Tensor) -> Tensor:
        """See `plugins/attention_reuse`."""

    def attention(self, *tensors: Tensor) -> Tensor:
        """See `plugins/attention`."""

    def attention_window(self, *tensors: Tensor) -> Tensor:
        """See `plugins/attention_window`."""

    def sample_block(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """See `plugins/sample_block`."""


class TorchOps:
    """Plain torch; the ops of the domain run as registered torch operators."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = x @ weight
        return product if bias is None else product + bias

    def linear_add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return residual + x @ weight

    def norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
        return weight * normed.to(hidden.dtype)

    def split_rope(
        self, fused: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, head_dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        rotated = heads + kv_heads
        split = fused.unflatten(-1, (rotated + kv_heads, head_dim)).transpose(1, 2)
        wide = split[:, :rotated].to(torch.promote_types(fused.dtype, torch.float32))
        first, second = wide[..., : head_dim // 2], wide[..., head_dim // 2 :]
        cos, sin = cos[:, None], sin[:, None]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        turned = turned.to(fused.dtype)
        return turned[:, :heads], turned[:, heads:], split[:, rotated:].contiguous()

    def swiglu(self, gate_up: Tensor) -> Tensor:
        half = gate_up.shape[-1] // 2
        return F.silu(gate_up[..., :half]) * gate_up[..., half:]

    def norm_quant(self, hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        epsilon = torch.full((1,), eps, dtype=torch.float32, device=hidden.device)
        quantised, scale = self._run(RMS_NORM_QUANT, hidden, weight, epsilon)
        return quantised, scale

    def swiglu_quant(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        quantised, scale = self._run(SWIGLU_QUANT, gate_up)
        return quantised, scale

    def group_quant(self, x: Tensor) -> tuple[Tensor, Tensor]:
        quantised, scale = self._run(GROUP_QUANT, x)
        return quantised, scale

    def group_linear(
        self, quantised: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, like: Tensor
    ) -> Tensor:
        return self._run(GROUP_LINEAR, quantised, scale, weight, weight_scale, like)[0]

    def group_linear_add(
        self,
        residual: Tensor,
        quantised: Tensor,
        scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        like: Tensor,
    ) -> Tensor:
        return residual + self.group_linear(quantised, scale, weight, weight_scale, like)

    def channel_linear(
        self, x: Tensor, input_scale: Tensor, weight: Tensor, weight_scale: Tensor
    ) -> Tensor:
        return channel_linear(x, input_scale, weight, weight_scale)

    def attention_fill(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self._run(ATTENTION_FILL, *tensors)

    def attention_reuse(self, *tensors: Tensor) -> Tensor:
        return self._run(ATTENTION_REUSE, *tensors)[0]

    def attention(self, *tensors: Tensor) -> Tensor:
        return self._run(ATTENTION, *tensors)[0]

    def attention_window(self, *tensors: Tensor) -> Tensor:
        return self._run(ATTENTION_WINDOW, *tensors)[0]

    def sample_block(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self._run(SAMPLE_BLOCK, *tensors)

    def _run(self, spec: OpSpec, *tensors: Tensor) -> tuple[Tensor, ...]:
        return spec.call(*tensors)


class ExportOps(TorchOps):
    """Records each op of the domain as one ONNX node, and FP8 per channel as standard ones."""

    def channel_linear(
        self, x: Tensor, input_scale: Tensor, weight: Tensor, weight_scale: Tensor
    ) -> Tensor:
        return record_channel_linear(x, input_scale, weight, weight_scale)

    def _run(self, spec: OpSpec, *tensors: Tensor) -> tuple[Tensor, ...]:
        return spec.symbolic(*tensors)
