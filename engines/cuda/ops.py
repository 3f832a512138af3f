"""The model's ops on a CUDA device: Triton kernels, and the library's GEMMs by a fixed table."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from lacache_trt.engines.cuda.fp8 import Fp8Table
from lacache_trt.engines.cuda.fp8_ops import Fp8Ops
from lacache_trt.engines.cuda.fused_window import FusedWindow
from lacache_trt.engines.cuda.gemm import GemmTable
from lacache_trt.plugins.attention import kernel as attention_kernel
from lacache_trt.plugins.attention_fill import kernel as fill_kernel
from lacache_trt.plugins.attention_reuse import kernel as reuse_kernel
from lacache_trt.plugins.attention_window import kernel as window_kernel
from lacache_trt.plugins.rms_norm import kernel as norm_kernel
from lacache_trt.plugins.rope import kernel as rope_kernel
from lacache_trt.plugins.sample_block import kernel as sample_kernel
from lacache_trt.plugins.swiglu import kernel as swiglu_kernel


def _launch(kernel: ModuleType, *tensors: Tensor) -> None:
    """Launch a kernel whose arguments are the op's inputs, its workspace and its outputs."""
    kernel.launch(*tensors)


class CudaOps(Fp8Ops):
    """Implements `lacache_trt.model.ops.Ops`; every output is allocated here, so that a captured
    graph owns it."""

    def __init__(self, gemms: GemmTable, fp8_gemms: Fp8Table | None = None) -> None:
        super().__init__(fp8_gemms or Fp8Table({}))
        self.gemms = gemms
        self.fused_window: FusedWindow | None = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        product = self.gemms.multiply(rows, weight)
        if bias is not None:
            product += bias
        return product.view(*x.shape[:-1], weight.shape[1])

    def linear_add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """In place: the product is added in the GEMM's epilogue, rounded once."""
        rows = x.reshape(-1, x.shape[-1])
        self.gemms.multiply(rows, weight, residual.view(-1, residual.shape[-1]))
        return residual

    def norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = torch.empty_like(hidden)
        norm_kernel.launch(hidden, None, weight, None, normed, eps)
        return normed

    def split_rope(
        self, fused: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, head_dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = fused.shape
        q = fused.new_empty(batch, heads, length, head_dim)
        k = fused.new_empty(batch, kv_heads, length, head_dim)
        v = torch.empty_like(k)
        rope_kernel.launch(fused, cos, sin, q, k, v)
        return q, k, v

    def swiglu(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        swiglu_kernel.launch(gate_up, out)
        return out

    def attention_fill(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        q = tensors[0]
        fa_max = q.new_empty(q.shape[:3], dtype=torch.float32)
        fa_sum = torch.empty_like(fa_max)
        fa_acc = q.new_empty(q.shape, dtype=torch.float32)
        _launch(fill_kernel, *tensors, fa_max, fa_sum, fa_acc)
        return fa_max, fa_sum, fa_acc

    def attention_reuse(self, *tensors: Tensor) -> Tensor:
        block, q, k = tensors[0].shape[2], tensors[3], tensors[4]
        batch, heads, length, head_dim = q.shape
        elements = reuse_kernel.workspace_size(batch, heads, k.shape[1], length, block, head_dim)
        workspace = q.new_empty(elements, dtype=torch.float32)
        out = q.new_empty(batch, length, heads * head_dim)
        _launch(reuse_kernel, *tensors, workspace, out)
        return out

    def attention(self, *tensors: Tensor) -> Tensor:
        q, k, v, valid_from, valid_to = tensors
        batch, heads, count, head_dim = q.shape
        elements = attention_kernel.workspace_size(
            batch, heads, k.shape[1], count, k.shape[2], head_dim
        )
        workspace = q.new_empty(elements, dtype=torch.float32) if elements else None
        out = q.new_empty(batch, count, heads * head_dim)
        attention_kernel.launch(q, k, v, valid_from, valid_to, workspace, out)
        return out

    def attention_window(self, *tensors: Tensor) -> Tensor:
        q, k_w, v_w, k, v, columns, valid_from, valid_to = tensors
        batch, heads, count, head_dim = q.shape
        elements = window_kernel.workspace_size(
            batch, heads, k.shape[1], count, k.shape[2], head_dim
        )
        workspace = q.new_empty(elements, dtype=torch.float32) if elements else None
        out = q.new_empty(batch, count, heads * head_dim)
        window_kernel.launch(q, k_w, v_w, k, v, columns, valid_from, valid_to, workspace, out)
        return out

    def sample_block(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        logits = tensors[0]
        batch, rows, vocabulary = logits.shape
        elements = sample_kernel.workspace_size(batch, rows, vocabulary)
        workspace = logits.new_empty(elements, dtype=torch.float32)
        token = logits.new_empty(batch, rows, dtype=torch.int32)
        scores = [logits.new_empty(batch, rows, dtype=torch.float32) for _ in range(3)]
        _launch(sample_kernel, *tensors, workspace, token, *scores)
        return (token, *scores)


class FillOps(CudaOps):
    """Ops of a fill: layer 0's heads and attention state are written into the caches themselves."""

    def __init__(self, ops: CudaOps, caches: Mapping[str, Tensor]) -> None:
        super().__init__(ops.gemms, ops.fp8_gemms)
        self._caches = caches

    def split_rope(
        self, fused: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, head_dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self._caches[name] for name in ("q", "k", "v"))
        rope_kernel.launch(fused, cos, sin, q, k, v)
        return q, k, v

    def attention_fill(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        state = tuple(self._caches[name] for name in ("fa_max", "fa_sum", "fa_acc"))
        _launch(fill_kernel, *tensors, *state)
        return state
