"""Which GEMM implementation runs at which shape: measured when the engine is built, then fixed.

A table entry is keyed by (K, N) of the weight and a ceiling of M; the entry with the smallest
ceiling that is at least M decides. A fixed table makes a run reproducible: the same engine
directory always runs the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lacache_trt.engines.cuda.capture import microseconds_per_call
from lacache_trt.errors import ArtifactError
from lacache_trt.model.config import ModelConfig, parameter_shapes

ROW_CEILINGS = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
_COLD_BYTES = 256 * 2**20
_MOST_COPIES = 16


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
class GemmTable:
    """Implementation names by weight shape (K, N) and M ceiling."""

    entries: Mapping[tuple[int, int], Mapping[int, str]]

    def multiply(self, rows: Tensor, weight: Tensor, into: Tensor | None = None) -> Tensor:
        """rows [M, K] @ weight [K, N], added to `into` [M, N] in place if that is given."""
        return IMPLEMENTATIONS[self.choice(rows.shape[0], *weight.shape)](rows, weight, into)

    def choice(self, m: int, k: int, n: int) -> str:
        """Name of the implementation for a shape; cuBLAS where nothing was measured."""
        by_ceiling = self.entries.get((k, n), {})
        fitting = [ceiling for ceiling in by_ceiling if ceiling >= m]
        if not by_ceiling:
            return "cublas"
        return by_ceiling[min(fitting) if fitting else max(by_ceiling)]

    def to_json(self) -> list[dict[str, Any]]:
        """The manifest's form."""
        return [
            {"k": k, "n": n, "m_up_to": ceiling, "implementation": name}
            for (k, n), by_ceiling in self.entries.items()
            for ceiling, name in by_ceiling.items()
        ]

    @classmethod
    def from_json(cls, data: object) -> GemmTable:
        """Read the manifest's form strictly."""
        entries: dict[tuple[int, int], dict[int, str]] = {}
        for row in data if isinstance(data, list) else [None]:
            fields = row if isinstance(row, dict) else {}
            name = fields.get("implementation")
            numbers: list[Any] = [fields.get(key) for key in ("k", "n", "m_up_to")]
            known = isinstance(name, str) and name in IMPLEMENTATIONS
            if not known or not all(type(value) is int for value in numbers):
                raise ArtifactError(
                    "the GEMM table of the manifest is malformed",
                    got=row,
                    expected=f"k, n, m_up_to and one of {', '.join(IMPLEMENTATIONS)}",
                    fix="build the engine again",
                )
            k, n, ceiling = numbers
            entries.setdefault((k, n), {})[ceiling] = str(name)
        return cls(entries)


def weight_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """The distinct (K, N) of the model's linears."""
    matrices = (
        shape
        for name, shape in parameter_shapes(config).items()
        if len(shape) == 2 and name != "embed.weight"
    )
    return [(k, n) for k, n in dict.fromkeys(matrices)]


def measure_table(
    config: ModelConfig,
    dtype: torch.dtype,
    ceilings: Sequence[int] = ROW_CEILINGS,
    report: Callable[[str], None] = lambda line: None,
) -> GemmTable:
    """Time every implementation at every shape over cold weights and keep the fastest."""
    entries: dict[tuple[int, int], dict[int, str]] = {}
    stream = torch.cuda.Stream()
    for k, n in weight_shapes(config):
        copies = max(1, min(_MOST_COPIES, _COLD_BYTES // (k * n * dtype.itemsize)))
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
