"""The GEMMs of linears in the model's dtype, and which library runs them at which shape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lacache_trt.engines.cuda.capture import microseconds_per_call
from lacache_trt.engines.cuda.choices import ChoiceTable
from lacache_trt.model.config import ModelConfig, parameter_shapes

ROW_CEILINGS = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
COLD_BYTES = 256 * 2**20
MOST_COPIES = 16


@contextmanager
def _preferred(library: str) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def _multiply(library: str, rows: Tensor, weight: Tensor, into: Tensor | None = None) -> Tensor:
    with _preferred(library):
        return rows @ weight if into is None else into.addmm_(rows, weight)


IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "cublas": partial(_multiply, "cublas"),
    "cublaslt": partial(_multiply, "cublaslt"),
}


@dataclass(frozen=True)
class GemmTable(ChoiceTable):
    """The choices for the linears in the model's dtype."""

    NAMES = tuple(IMPLEMENTATIONS)

    def multiply(self, rows: Tensor, weight: Tensor, into: Tensor | None = None) -> Tensor:
        """rows [M, K] @ weight [K, N], added to `into` [M, N] in place if that is given."""
        return IMPLEMENTATIONS[self.choice(rows.shape[0], *weight.shape)](rows, weight, into)


def weight_shapes(config: ModelConfig, fp8: Collection[str] = ()) -> list[tuple[int, int]]:
    """The distinct (K, N) of the model's linears but those that are FP8."""
    matrices = (
        shape
        for name, shape in parameter_shapes(config).items()
        if len(shape) == 2 and name != "embed.weight" and name.removesuffix(".weight") not in fp8
    )
    return [(k, n) for k, n in dict.fromkeys(matrices)]


def measure_table(
    config: ModelConfig,
    dtype: torch.dtype,
    ceilings: Sequence[int] = ROW_CEILINGS,
    report: Callable[[str], None] = lambda line: None,
    fp8: Collection[str] = (),
) -> GemmTable:
    """Time every implementation at every shape over cold weights and keep the fastest."""
    entries: dict[tuple[int, int], dict[int, str]] = {}
    stream = torch.cuda.Stream()
    for k, n in weight_shapes(config, fp8):
        copies = max(1, min(MOST_COPIES, COLD_BYTES // (k * n * dtype.itemsize)))
        weights = [torch.randn(k, n, device="cuda", dtype=dtype) for _ in range(copies)]
        for ceiling in ceilings:
            rows = torch.randn(ceiling, k, device="cuda", dtype=dtype)
            times = {
                name: microseconds_per_call(
                    [partial(function, rows, weight) for weight in weights], stream
                )
                for name, function in IMPLEMENTATIONS.items()
            }
            best = min(times, key=lambda name: times[name])
            entries.setdefault((k, n), {})[ceiling] = best
            report(f"M={ceiling} K={k} N={n}: {best} {times}")
    return GemmTable(entries)
