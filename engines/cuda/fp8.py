"""The GEMMs of FP8 linears, and which implementation runs at which shape.

    triton     our GroupLinear: few rows stream the weight, many rows run tiles; the residual is
               added before the only rounding
    cublaslt   the library's 1x128 by 128x128 scaled product (SM 90 only); it rounds before a
               residual, and reads scales in steps of 16 bytes: where M is no multiple of 4 or K
               none of 512, `triton` runs in its place
Only FP8 weights are on the device, so a 16-bit product is no candidate: it would read twice the
bytes of a second copy. The table keeps the fastest of what gives the same numbers as `triton`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lacache_trt.engines.cuda.capture import microseconds_per_call
from lacache_trt.engines.cuda.choices import ChoiceTable
from lacache_trt.engines.cuda.gemm import COLD_BYTES, MOST_COPIES, ROW_CEILINGS
from lacache_trt.errors import ArtifactError, MissingDependencyError
from lacache_trt.model.config import ModelConfig, parameter_shapes
from lacache_trt.model.fp8 import fp8_granularity
from lacache_trt.plugins.fp8 import quantise_blocks, quantise_groups
from lacache_trt.plugins.group_linear import kernel

Operands = tuple[Tensor, Tensor, Tensor, Tensor]
"""Rows E4M3 [M, K], their scales [M, K / 128] with M innermost, weight E4M3 [N, K], its scales."""
FIRST_SM = 89
_SCALES_PER_STEP = 4
_AGREEMENT = 2e-2


def require_fp8(linears: Collection[str]) -> None:
    """Raise `MissingDependencyError` if FP8 linears are to run on a GPU without FP8."""
    major, minor = torch.cuda.get_device_capability()
    if linears and 10 * major + minor < FIRST_SM:
        raise MissingDependencyError(
            "this GPU has no FP8 tensor cores",
            got=f"{torch.cuda.get_device_name()}, sm_{10 * major + minor}",
            expected=f"sm_{FIRST_SM} or later (L40S, RTX 40 and 50, H100, H200, B200)",
            fix="build without --fp8, or on another GPU",
        )


def require_per_group(body: Mapping[str, object]) -> None:
    """Raise `ArtifactError` if the FP8 linears of a manifest have scales per channel."""
    if fp8_granularity(body) != "per-group":
        raise ArtifactError(
            "the cuda engine has no FP8 linears with scales per channel",
            got="weights quantised with --fp8-recipe per-channel",
            expected="scales per group",
            fix="build from the unquantised bundle: --engine cuda --fp8",
        )


def _triton(operands: Operands, residual: Tensor | None, out: Tensor) -> None:
    rows, weight = operands[0], operands[2]
    elements = kernel.workspace_size(rows.shape[0], *weight.shape)
    workspace = out.new_empty(elements, dtype=torch.float32) if elements else None
    kernel.launch(*operands, residual, workspace, out)


def _cublaslt(operands: Operands, residual: Tensor | None, out: Tensor) -> None:
    rows, scale, weight, weight_scale = operands
    multiply = partial(
        torch._scaled_mm,
        rows,
        weight.t(),
        scale,
        weight_scale.t(),
        out_dtype=out.dtype,
    )
    if residual is None:
        multiply(out=out)
    else:
        torch.add(residual, multiply(), out=out)


IMPLEMENTATIONS: Mapping[str, Callable[[Operands, Tensor | None, Tensor], None]] = {
    "triton": _triton,
    "cublaslt": _cublaslt,
}


@dataclass(frozen=True)
class Fp8Table(ChoiceTable):
    """The choices for the FP8 linears."""

    NAMES = tuple(IMPLEMENTATIONS)

    def multiply(self, operands: Operands, residual: Tensor | None, out: Tensor) -> None:
        """Write the product [M, N], plus `residual` if given, which may be `out` itself."""
        rows, weight = operands[0], operands[2]
        name = self.choice(rows.shape[0], weight.shape[1], weight.shape[0])
        if not steps_fit(operands):
            name = "triton"
        IMPLEMENTATIONS[name](operands, residual, out)


def steps_fit(operands: Sequence[Tensor]) -> bool:
    """Whether rows and groups come in fours: torch checks no more than that strides are M and G."""
    rows, groups = operands[1].shape
    return rows % _SCALES_PER_STEP == 0 and groups % _SCALES_PER_STEP == 0


def quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantise_groups` of x [M, K] with the scales stored as `Operands` has them."""
    rows, scale = quantise_groups(x)
    return rows, scale.t().contiguous().t()


def fp8_shapes(config: ModelConfig, linears: Collection[str]) -> list[tuple[int, int]]:
    """The distinct (K, N) of the FP8 linears."""
    shapes = parameter_shapes(config)
    found = [shapes[name + ".weight"] for name in sorted(linears)]
    return [(k, n) for k, n in dict.fromkeys(found)]


def measure_fp8_table(
    config: ModelConfig,
    linears: Collection[str],
    dtype: torch.dtype,
    ceilings: Sequence[int] = ROW_CEILINGS,
    report: Callable[[str], None] = lambda line: None,
) -> Fp8Table:
    """Time what works at every shape over cold weights and keep the fastest."""
    entries: dict[tuple[int, int], dict[int, str]] = {}
    stream = torch.cuda.Stream()
    for k, n in fp8_shapes(config, linears):
        copies = max(1, min(MOST_COPIES, COLD_BYTES // (k * n)))
        weights = [
            quantise_blocks(torch.randn(n, k, device="cuda", dtype=dtype)) for _ in range(copies)
        ]
        for ceiling in ceilings:
            activations = quantised_rows(torch.randn(ceiling, k, device="cuda", dtype=dtype))
            out = torch.empty(ceiling, n, device="cuda", dtype=dtype)
            calls = {
                name: [partial(run, (*activations, *weight), None, out) for weight in weights]
                for name, run in IMPLEMENTATIONS.items()
                if name == "triton"
                or (steps_fit(activations) and agrees(run, (*activations, *weights[0]), out))
            }
            times = {name: microseconds_per_call(each, stream) for name, each in calls.items()}
            best = min(times, key=lambda name: times[name])
            entries.setdefault((k, n), {})[ceiling] = best
            report(f"FP8 M={ceiling} K={k} N={n}: {best} {times}")
    return Fp8Table(entries)


def agrees(
    run: Callable[[Operands, Tensor | None, Tensor], None], operands: Operands, out: Tensor
) -> bool:
    """Whether an implementation exists here and gives the numbers of `triton`."""
    _triton(operands, None, out)
    expected = out.to(torch.float32, copy=True)
    try:
        run(operands, None, out)
    except (RuntimeError, TypeError, ValueError):  # torch refuses what the GPU cannot do
        return False
    return bool((out.float() - expected).abs().max() <= _AGREEMENT * expected.abs().max())
