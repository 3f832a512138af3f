"""The FP8 ops on a CUDA device; outputs are allocated here, so that a captured graph owns them."""

from __future__ import annotations

import torch
from torch import Tensor

from lacache_trt.engines.cuda.fp8 import Fp8Table
from lacache_trt.errors import EngineError
from lacache_trt.plugins.fp8 import E4M3, GROUP
from lacache_trt.plugins.group_quant import kernel as quant_kernel
from lacache_trt.plugins.rms_norm_quant import kernel as norm_kernel
from lacache_trt.plugins.swiglu_quant import kernel as swiglu_kernel


class Fp8Ops:
    """The part of `lacache_trt.model.ops.Ops` that FP8 linears need."""

    def __init__(self, fp8_gemms: Fp8Table) -> None:
        self.fp8_gemms = fp8_gemms
        self._eps: dict[float, Tensor] = {}

    def norm_quant(self, hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if eps not in self._eps:
            # Made before a capture, in the eager run that precedes it.
            self._eps[eps] = torch.full((1,), eps, dtype=torch.float32, device=hidden.device)
        quantised, scale = _outputs(hidden, hidden.shape[-1])
        norm_kernel.launch(hidden, weight, self._eps[eps], quantised, scale)
        return quantised, scale

    def swiglu_quant(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        quantised, scale = _outputs(gate_up, gate_up.shape[-1] // 2)
        swiglu_kernel.launch(gate_up, quantised, scale)
        return quantised, scale

    def group_quant(self, x: Tensor) -> tuple[Tensor, Tensor]:
        quantised, scale = _outputs(x, x.shape[-1])
        quant_kernel.launch(x, quantised, scale)
        return quantised, scale

    def group_linear(
        self, quantised: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, like: Tensor
    ) -> Tensor:
        out = like.new_empty(*quantised.shape[:-1], weight.shape[0])
        self._multiply(quantised, scale, weight, weight_scale, None, out)
        return out

    def group_linear_add(
        self,
        residual: Tensor,
        quantised: Tensor,
        scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        like: Tensor,
    ) -> Tensor:
        """In place."""
        self._multiply(quantised, scale, weight, weight_scale, residual, residual)
        return residual

    def channel_linear(
        self, x: Tensor, input_scale: Tensor, weight: Tensor, weight_scale: Tensor
    ) -> Tensor:
        """Raises `EngineError`: there is no kernel, and builds refuse the recipe before."""
        raise EngineError(
            "the cuda engine has no FP8 linears with scales per channel",
            got=f"a weight {list(weight.shape)}",
            expected="scales per group",
            fix="build with --fp8-recipe per-group",
        )

    def _multiply(
        self,
        quantised: Tensor,
        scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        residual: Tensor | None,
        out: Tensor,
    ) -> None:
        rows = quantised.view(-1, quantised.shape[-1])
        operands = (rows, scale.view(len(rows), -1), weight, weight_scale)
        flat = out.view(len(rows), -1)
        self.fp8_gemms.multiply(operands, None if residual is None else flat, flat)


def _outputs(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Values and scales for rows of `width`; the rows of the scales are innermost in memory."""
    groups, rows = width // GROUP, x.numel() // x.shape[-1]
    scale = x.new_empty(groups, rows, dtype=torch.float32).t()
    return x.new_empty(*x.shape[:-1], width, dtype=E4M3), scale.view(*x.shape[:-1], groups)
