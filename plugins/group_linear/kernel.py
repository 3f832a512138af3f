"""Triton kernels of GroupLinear; the rule is in `op`.

`stream` (few rows) and `tiled` (many rows) compute the product, both also split over K with
`finish.merge_kernel` as second phase. `RULES` says which geometry serves which sizes; the plugin
evaluates the same table on the GPU's host side.

Layout: quantised [M, K], weight [N, K], weight_scale [ceil(N / 128), K / 128], residual and out
[M, N], workspace float32; contiguous, K a multiple of 128, M and N any; scale [M, K / 128] with any
strides.
dtypes: E4M3 and float32 in, T out.
Accumulation: a group of 128 products is summed by the tensor cores without promotion in between
(`max_num_imprecise_acc` at its default), then scaled and added in float32. One instruction of SM 90
adds 32 products to the sum so far: all 33 are cut to 13 bits behind the leading bit of the largest
of them, and so is the result (DeepSeek-V3 section 3.3.2 counts 14 bits; `fp8_checks` measures it).
Error bound against float64: per instruction 2^-13 (33 max(|sum so far|, largest product) + |new
sum|), times the scales; 3 (K / 128) 2^-24 sum_k |x_k w_k| for the float32 part; half an ulp of T.
cuBLASLt's product with the same scales has the same bound. Sums that need no more than 13 bits are
exact. Promoting every 32 products would halve a typical error and cost four times the additions.
Bytes: N * K + M * K + M * N * size(T), plus the partial sums where K is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lacache_trt.errors import EngineError
from lacache_trt.plugins.fp8_kernel import GROUP, SCALE_STRIDES, scale_strides
from lacache_trt.plugins.group_linear.finish import (
    MERGE_ELEMENTS,
    MERGE_WARPS,
    MOST_SPLITS,
    merge_kernel,
)
from lacache_trt.plugins.group_linear.stream import stream_kernel
from lacache_trt.plugins.group_linear.tiled import tiled_kernel
from lacache_trt.plugins.triton_support import (
    POINTER_TYPES,
    Configuration,
    ceil_div,
    device_sm,
    dtype_label,
)

BAND = 16
ANY = 1 << 30


@dataclass(frozen=True)
class Geometry:
    """A kernel's tile and how far K is split.

    Attributes:
        rows: rows of a tile.
        columns: columns of a tile, at most 128.
        warps: warps per program.
        stages: software pipeline depth.
        streams: the weight-streaming kernel.
        step: groups per iteration (stream only).
        programs: K is split so that about this many programs run; 0 never splits.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    streams: bool = False
    step: int = 1
    programs: int = 0

    @property
    def label(self) -> str:
        """Short stable name, for example stream.m32n64w4s3 or tiled.m64n128w4s4."""
        kind = "stream" if self.streams else "tiled"
        step = f"k{self.step}" if self.step > 1 else ""
        return f"{kind}.m{self.rows}n{self.columns}{step}w{self.warps}s{self.stages}"

    @property
    def kernel(self) -> object:
        """The jitted function."""
        return stream_kernel if self.streams else tiled_kernel

    def constants(self, split: bool, add: bool) -> dict[str, object]:
        """Constants of the kernel."""
        base = {"ROWS": self.rows, "COLUMNS": self.columns, "GROUP": GROUP}
        ends = {"SPLIT": split, "ADD": add and not split}
        if self.streams:
            return {**base, "STEP": self.step, **ends}
        return {**base, "BAND": BAND, **ends}


@dataclass(frozen=True)
class Rule:
    """`geometry` serves up to `most_rows` rows of at least `least_columns` columns."""

    most_rows: int
    least_columns: int
    geometry: Geometry


# The first rule that fits decides. Chosen from sweeps on an H200 (benchmarks/fp8_kernels.py);
# SM 89 has 99 KB of shared memory.
RULES: dict[int, tuple[Rule, ...]] = {
    90: (
        Rule(16, 0, Geometry(16, 64, 4, 3, streams=True, programs=396)),
        Rule(32, 0, Geometry(32, 64, 4, 3, streams=True, programs=396)),
        Rule(64, 0, Geometry(64, 64, 4, 3, streams=True, programs=396)),
        Rule(ANY, 0, Geometry(64, 128, 4, 4, programs=264)),
    ),
    89: (
        Rule(16, 0, Geometry(16, 64, 4, 4, streams=True, programs=568)),
        Rule(64, 0, Geometry(32, 64, 4, 4, streams=True, programs=568)),
        Rule(128, 0, Geometry(64, 64, 4, 3, programs=284)),
        Rule(ANY, 0, Geometry(128, 128, 8, 2)),
    ),
}


def rules(sm: int) -> tuple[Rule, ...]:
    """The table of an SM; a later one takes that of SM 90.

    Raises:
        EngineError: the SM has no FP8.
    """
    if sm < min(RULES):
        raise EngineError(
            "this GPU has no FP8 matrix instructions",
            got=f"sm_{sm}",
            expected="sm_89 or later",
            fix="build without FP8",
        )
    return RULES[max(known for known in RULES if known <= sm)]


def choose(rows: int, columns: int, sm: int) -> Geometry:
    """The geometry of the first rule that fits."""
    return next(
        rule.geometry
        for rule in rules(sm)
        if rows <= rule.most_rows and columns >= rule.least_columns
    )


def splits(rows: int, columns: int, groups: int, geometry: Geometry) -> tuple[int, int]:
    """(splits of K, groups of each but the last)."""
    tiles = ceil_div(rows, geometry.rows) * ceil_div(columns, geometry.columns)
    wanted = max(1, min(geometry.programs // tiles, MOST_SPLITS, groups))
    each = ceil_div(groups, wanted)
    return ceil_div(groups, each), each


def most_partial(geometry: Geometry) -> int:
    """Partial sums that a split product of this geometry can need, at most."""
    return geometry.programs * geometry.rows * geometry.columns


def workspace_limit() -> int:
    """Float32 elements that are enough for every product on every SM."""
    return max(most_partial(rule.geometry) for table in RULES.values() for rule in table)


def workspace_size(rows: int, columns: int, width: int) -> int:
    """Float32 elements of workspace that cover every product of up to these sizes.

    A product is only split while its tiles are fewer than `programs`, which bounds its partial sums
    whatever its sizes are.
    """
    return min(workspace_limit(), min(MOST_SPLITS, width // GROUP) * rows * columns)


def launch(
    quantised: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    residual: Tensor | None,
    workspace: Tensor | None,
    out: Tensor,
    geometry: Geometry | None = None,
) -> None:
    """Write `out` [..., N], of `residual` (may be `out` itself) plus the product if there is one.

    Without a workspace K is never split. The leading dimensions of quantised and out are alike.
    """
    columns, width = weight.shape
    rows, groups = quantised.numel() // width, width // GROUP
    chosen = geometry or choose(rows, columns, device_sm(weight))
    count, each = (1, groups) if workspace is None else splits(rows, columns, groups, chosen)
    split, add = count > 1, residual is not None
    tiles = (ceil_div(rows, chosen.rows), ceil_div(columns, chosen.columns))
    grid = (tiles[1], count, tiles[0]) if chosen.streams else (tiles[0] * tiles[1], count)
    partial = workspace if split else out
    function = stream_kernel if chosen.streams else tiled_kernel
    function[grid](
        quantised, scale, weight, weight_scale, residual if add and not split else out, partial,
        out, rows, columns, groups, each, *scale_strides(scale),
        **chosen.constants(split, add), num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    if split:
        total = rows * columns
        merge_kernel[(ceil_div(total, MERGE_ELEMENTS),)](
            residual if add else out, workspace, out, total, count,
            **merge_constants(add), num_warps=MERGE_WARPS, num_stages=1,
        )  # fmt: skip


def merge_constants(add: bool) -> dict[str, object]:
    """Constants of the merge."""
    return {"ELEMENTS": MERGE_ELEMENTS, "MOST": MOST_SPLITS, "ADD": add}


def product_configuration(
    geometry: Geometry, dtype: torch.dtype, split: bool, add: bool
) -> Configuration:
    """One instance of a product."""
    pointers = {
        "quantised": "*fp8e4nv",
        "scale": "*fp32",
        "weight": "*fp8e4nv",
        "weight_scale": "*fp32",
        "residual": POINTER_TYPES[dtype],
        "workspace": "*fp32" if split else POINTER_TYPES[dtype],
        "out": POINTER_TYPES[dtype],
    }
    scalars = dict.fromkeys(("rows", "columns", "groups", "split_groups"), "i32") | SCALE_STRIDES
    ending = ".split" if split else ".add" if add else ""
    return Configuration(
        name=f"group_linear.{geometry.label}{ending}.{dtype_label(dtype)}",
        kernel=geometry.kernel,
        arguments={**pointers, **scalars},
        constants=geometry.constants(split, add),
        warps=geometry.warps,
        stages=geometry.stages,
    )


def merge_configuration(dtype: torch.dtype, add: bool) -> Configuration:
    """The second phase of a split product."""
    kind = POINTER_TYPES[dtype]
    pointers = {"residual": kind, "workspace": "*fp32", "out": kind}
    return Configuration(
        name=f"group_linear.merge.{'add.' if add else ''}{dtype_label(dtype)}",
        kernel=merge_kernel,
        arguments={**pointers, "total": "i32", "splits": "i32"},
        constants=merge_constants(add),
        warps=MERGE_WARPS,
        stages=1,
    )


def configurations(dtype: torch.dtype, sm: int, add: bool = False) -> list[Configuration]:
    """The instances that ship: every geometry, whole and, where it may split, split."""
    found = {}
    for rule in rules(sm):
        for split in (False, True) if rule.geometry.programs else (False,):
            made = product_configuration(rule.geometry, dtype, split, add)
            found[made.name] = made
    merge = merge_configuration(dtype, add)
    return [*found.values(), *([merge] if _any_split(rules(sm)) else [])]


def _any_split(table: Sequence[Rule]) -> bool:
    return any(rule.geometry.programs for rule in table)
