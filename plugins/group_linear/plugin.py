"""GroupLinear as a TensorRT plugin: the table of `kernel` over the node's dimensions.

The residual is not part of the op: the graph adds it.
"""

from __future__ import annotations

import torch

from lacache_trt.plugins.expressions import (
    Expression,
    ceil_div,
    constant,
    dimension,
    maximum,
    minimum,
    negation,
)
from lacache_trt.plugins.fp8 import E4M3
from lacache_trt.plugins.group_linear.finish import MERGE_ELEMENTS, MOST_SPLITS
from lacache_trt.plugins.group_linear.kernel import (
    Geometry,
    Rule,
    merge_configuration,
    product_configuration,
    rules,
    workspace_limit,
)
from lacache_trt.plugins.packing import InputRule, LaunchRule, OutputRule, PluginProgram

FLOAT_BYTES = 4
ONE = constant(1)


def plugin_program(dtype: torch.dtype, width: int, sm: int) -> PluginProgram:
    """The op for results of `dtype` on `sm`; the kernels serve every K, so `width` is not used."""
    rows = dimension("quantised", 0) * dimension("quantised", 1)
    columns = dimension("weight", 0)
    parts = minimum(dimension("scale", 2), MOST_SPLITS)
    return PluginProgram(
        op="GroupLinear",
        inputs=(
            InputRule("quantised", E4M3, 3),
            InputRule("scale", torch.float32, 3),
            InputRule("weight", E4M3, 2),
            InputRule("weight_scale", torch.float32, 2),
            InputRule("like", dtype, 1),
        ),
        outputs=(
            OutputRule(
                "out", dtype, (dimension("quantised", 0), dimension("quantised", 1), columns)
            ),
        ),
        workspace=minimum(workspace_limit(), parts * rows * columns) * FLOAT_BYTES,
        launches=_launches(rules(sm), dtype, rows, columns),
    )


def _launches(
    table: tuple[Rule, ...], dtype: torch.dtype, rows: Expression, columns: Expression
) -> tuple[LaunchRule, ...]:
    """The rules in order; each holds where it fits and none before it did."""
    free = ONE
    found: list[LaunchRule] = []
    for rule in table:
        fits = (rows < rule.most_rows + 1) * negation(columns < rule.least_columns)
        found += _rule_launches(rule.geometry, dtype, rows, columns, free * fits)
        free = free * negation(fits)
    return tuple(found)


def _rule_launches(
    geometry: Geometry, dtype: torch.dtype, rows: Expression, columns: Expression, fits: Expression
) -> list[LaunchRule]:
    """`kernel.launch` of one geometry: whole, and where it may split, split and merged."""
    groups = dimension("scale", 2)
    count, each = _splits(geometry, rows, columns, groups)
    sizes = {"rows": rows, "columns": columns, "groups": groups, "split_groups": each}
    scalars = {**sizes, "scale_row": groups, "scale_group": ONE}
    tiles = ceil_div(rows, geometry.rows), ceil_div(columns, geometry.columns)
    grid = (tiles[1], count, tiles[0]) if geometry.streams else (tiles[0] * tiles[1], count, ONE)
    whole = product_configuration(geometry, dtype, split=False, add=False)
    unused = {"residual": "out", "workspace": "out"}
    if not geometry.programs:
        return [LaunchRule(whole, grid, scalars, unused, fits)]
    several = count > 1
    product = product_configuration(geometry, dtype, split=True, add=False)
    total = rows * columns
    return [
        LaunchRule(whole, grid, scalars, unused, fits * negation(several)),
        LaunchRule(product, grid, scalars, {"residual": "out"}, fits * several),
        LaunchRule(
            merge_configuration(dtype, add=False),
            (ceil_div(total, MERGE_ELEMENTS), ONE, ONE),
            {"total": total, "splits": count},
            {"residual": "out"},
            fits * several,
        ),
    ]


def _splits(
    geometry: Geometry, rows: Expression, columns: Expression, groups: Expression
) -> tuple[Expression, Expression]:
    """`kernel.splits`."""
    if not geometry.programs:
        return ONE, groups
    tiles = ceil_div(rows, geometry.rows) * ceil_div(columns, geometry.columns)
    possible = constant(geometry.programs) // tiles
    wanted = maximum(1, minimum(minimum(possible, MOST_SPLITS), groups))
    each = ceil_div(groups, wanted)
    return ceil_div(groups, each), each
