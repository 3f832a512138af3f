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
    table = fp8_gemms or Fp8Table({})
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
    quantised: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    outputs: dict[tuple[int, int], Tensor] = {}
    calls: list[Callable[[], object]] = []

    def linear(name: str, m: int) -> None:
        weight, scale = weights[name], weights.get(name.removesuffix("weight") + "scale")
        if scale is None:
            calls.append(lambda: gemms.multiply(inputs[m, weight.shape[0]], weight))
            return
        n, k = weight.shape
        if (m, k) not in quantised:
            quantised[m, k] = quantised_rows(inputs[m, k])
        if (m, n) not in outputs:
            outputs[m, n] = torch.empty(m, n, device=device, dtype=dtype)
        operands = (*quantised[m, k], weight, scale)
        calls.append(lambda: table.multiply(operands, None, outputs[m, n]))

    for layer in range(config.num_layers):
        prefix, last = f"layers.{layer}.", 0 < layer == config.num_layers - 1
        first = few if layer == 0 and not full_first_layer else many
        after = few if last else many
        if last:
            linear(prefix + "kv.weight", many)
            linear(prefix + "q.weight", few)
        else:
            linear(prefix + "qkv.weight", first)
        if attention:
            calls.append(partial(_attention, q[few if last else first], k, v))
        for name in ("attn_out", "gate_up", "down"):
            linear(f"{prefix}{name}.weight", after)
    linear("head.weight", few)
    return calls


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
