"""The floor below a denoising step: its GEMMs and cuDNN attention in one graph, nothing else.

No norms, RoPE, activation or sampler; the cuts of the design (the last layer and the head on the
block's rows) are in. A step cannot be faster with these library calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lacache_trt.engines.cuda.capture import capture, replay_milliseconds
from lacache_trt.engines.cuda.fp8 import Fp8Table, quantised_rows
from lacache_trt.engines.cuda.gemm import GemmTable
from lacache_trt.model.config import ModelConfig


def floor_milliseconds(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    gemms: GemmTable,
    sizes: tuple[int, int, int],
    repeats: int,
    *,
    full_first_layer: bool = False,
    fp8_gemms: Fp8Table | None = None,
) -> float:
    """Median device time for `sizes` = (rows, columns, block columns)."""
    calls = floor_calls(
        config, weights, gemms, *sizes, full_first_layer=full_first_layer, fp8_gemms=fp8_gemms
    )
    stream = torch.cuda.Stream()
    return median(replay_milliseconds(capture(calls, stream), stream, repeats))


def floor_calls(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    gemms: GemmTable,
    rows: int,
    columns: int,
    block: int,
    *,
    full_first_layer: bool = False,
    fp8_gemms: Fp8Table | None = None,
    attention: bool = True,
) -> list[Callable[[], object]]:
    """The GEMMs and the attention of one exact step, on fixed random inputs.

    `full_first_layer` counts layer 0 on every row, as a step without caches computes it. Linears
    that come with scales are FP8; quantising their inputs is not in the floor. `attention` off
    leaves the linears alone.
    """
    many, few = rows * columns, rows * block
    step = _StepCalls(config, weights, gemms, fp8_gemms or Fp8Table({}), rows, (many, few))
    for layer in range(config.num_layers):
        prefix, last = f"layers.{layer}.", 0 < layer == config.num_layers - 1
        first = few if layer == 0 and not full_first_layer else many
        after = few if last else many
        if last:
            step.linear(prefix + "kv.weight", many)
            step.linear(prefix + "q.weight", few)
        else:
            step.linear(prefix + "qkv.weight", first)
        if attention:
            step.attend(few if last else first)
        for name in ("attn_out", "gate_up", "down"):
            step.linear(f"{prefix}{name}.weight", after)
    step.linear("head.weight", few)
    return step.calls


class _StepCalls:
    """The calls of one step in order, on inputs drawn once.

    `counts` are the numbers of token rows that a linear may have: all, and the block's. Quantised
    inputs and the FP8 linears' outputs are made when a linear first needs them, and shared.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        gemms: GemmTable,
        table: Fp8Table,
        rows: int,
        counts: tuple[int, int],
    ) -> None:
        self.calls: list[Callable[[], object]] = []
        self._weights, self._gemms, self._table = weights, gemms, table
        self._like = weights["embed.weight"]
        widths = (config.hidden_size, config.query_size, config.intermediate_size)
        self._inputs = {(m, width): self._draw(m, width) for m in counts for width in widths}
        keys = (rows, config.num_kv_heads, counts[0] // rows, config.head_dim)
        self._k, self._v = self._draw(*keys), self._draw(*keys)
        self._q = {
            m: self._draw(rows, config.num_heads, m // rows, config.head_dim) for m in counts
        }
        self._quantised: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}

    def linear(self, name: str, m: int) -> None:
        """Add a linear on `m` rows; FP8 if its weight comes with scales."""
        weight, scale = (
            self._weights[name],
            self._weights.get(name.removesuffix("weight") + "scale"),
        )
        if scale is None:
            self.calls.append(
                partial(self._gemms.multiply, self._inputs[m, weight.shape[0]], weight)
            )
            return
        n, k = weight.shape
        if (m, k) not in self._quantised:
            self._quantised[m, k] = quantised_rows(self._inputs[m, k])
        if (m, n) not in self._outputs:
            self._outputs[m, n] = torch.empty(
                m, n, device=self._like.device, dtype=self._like.dtype
            )
        operands = (*self._quantised[m, k], weight, scale)
        self.calls.append(partial(self._table.multiply, operands, None, self._outputs[m, n]))

    def attend(self, m: int) -> None:
        """Add an attention of `m` rows over all keys."""
        self.calls.append(partial(_attention, self._q[m], self._k, self._v))

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._like.device, dtype=self._like.dtype)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
