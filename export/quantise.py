"""The FP8 weights file of a derived bundle, written in bounded memory.

A linear lies in the bundle as [in, out] and is written as E4M3 [out, in]. A band of its output
columns, a multiple of 128 wide, is read row by row with `pread`, transposed and quantised: no
128 x 128 block straddles two bands, and the band's result is one contiguous piece of the file. With
scales per channel a row of E4M3 [out, in] has one, and the static scale of the input is given.
Everything else is copied. Memory is a few bands, whatever the model's size.

Scales: `max` is amax / 448 of each block or row. `mse` tries multiples of it, from 0.7 (the largest
values saturate) to 2 (a whole binade: beyond, the same mantissas come back), and keeps for each the
one with the smallest squared error; 1 is among them and wins ties, so no block gets worse.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lacache_trt.errors import QuantisationError
from lacache_trt.export.bands import STORAGE, finite, widen
from lacache_trt.export.convert import copy_tensor
from lacache_trt.export.weights import new_weights_file, plan_layout, read_header, write_at
from lacache_trt.model.config import (
    INPUT_SCALE,
    Dtype,
    Granularity,
    ModelConfig,
    fp8_dtypes,
    parameter_shapes,
)
from lacache_trt.model.fp8 import Fp8Recipe
from lacache_trt.model.safetensors_file import (
    E4M3,
    FLOAT_DTYPES,
    StoredTensor,
    open_regular,
    read_exactly,
)
from lacache_trt.plugins.fp8 import (
    GROUP,
    block_scales,
    channel_scales,
    dequantise_blocks,
    dequantise_channels,
    quantise_blocks,
    quantise_channels,
)
from lacache_trt.progress import Progress

BAND_ELEMENTS = 4 * 2**20
MULTIPLES = (1.0, *(step / 20 for step in range(14, 41) if step != 20))
ScaleFunction = Callable[[Tensor], Tensor]
_STORED = {"float8_e4m3fn": E4M3, "float32": "F32"}


@dataclass(frozen=True)
class WeightRule:
    """How a weight [out, in] shares its scales.

    Attributes:
        rows: outputs that share one.
        largest: from the weight its amax / 448.
        quantise: from the weight and scales, E4M3 values and the scales.
        dequantise: the way back, in float32.
        sums: of squared errors [out, in], those that share a scale added up.
    """

    rows: int
    largest: ScaleFunction
    quantise: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    dequantise: Callable[[Tensor, Tensor], Tensor]
    sums: ScaleFunction


@dataclass(frozen=True)
class LinearFacts:
    """What quantising did to one linear.

    Attributes:
        sqnr_db: 10 log10 of the sum of squares of the weights over that of their errors; None
            if there is no error.
    """

    sqnr_db: float | None


def quantise_weights(
    source: Path,
    target: Path,
    config: ModelConfig,
    dtype: Dtype,
    linears: frozenset[str],
    recipe: Fp8Recipe,
    progress: Progress,
    input_scales: Mapping[str, float] | None = None,
) -> dict[str, LinearFacts]:
    """Write the weights file `target` with the linears in FP8; facts by name of linear.

    Per channel it takes the static scales of their inputs.

    Raises:
        QuantisationError: a weight is NaN or infinite.
        CheckpointError: `source` is not valid.
        OutputError: `target` exists or cannot be written.
    """
    tensors = read_header(source)
    kinds = fp8_dtypes(linears, recipe.recipe)
    special = {name: _STORED[kind] for name, kind in kinds.items()}
    layout = plan_layout(parameter_shapes(config, linears, recipe.recipe), dtype, special)
    rule, scales = RULES[recipe.recipe], scale_function(recipe)
    facts: dict[str, LinearFacts] = {}
    progress.start("quantise weights", layout.size - layout.data_start)
    with new_weights_file(target, layout.size) as out, open_regular(source) as descriptor:
        write_at(out, layout.header, 0)
        for name, position in layout.offsets.items():
            linear, _, part = name.rpartition(".")
            if name not in special:
                copy_tensor(out, position, descriptor, tensors[name], progress)
            elif part == "weight":
                places = (position, layout.offsets[linear + ".scale"])
                task = (descriptor, (name, tensors[name]), rule, scales, progress)
                facts[linear] = _quantise_linear(out, places, *task)
            elif name.endswith(INPUT_SCALE) and input_scales is not None:
                write_at(out, np.array(input_scales[linear], "<f4"), position)
        os.fsync(out)
    return facts


def scale_function(recipe: Fp8Recipe) -> ScaleFunction:
    """From a weight [out, in] to the scales of its blocks or rows, by the recipe's rule."""
    rule = RULES[recipe.recipe]
    largest = rule.largest
    if recipe.quantiser == "modelopt":
        from lacache_trt.export.modelopt import modelopt_scales

        largest = partial(modelopt_scales, granularity=recipe.recipe)
    if recipe.scales == "max":
        return largest
    return lambda weight: best_scales(weight, largest(weight), rule)


def best_scales(weight: Tensor, largest: Tensor, rule: WeightRule | None = None) -> Tensor:
    """For each block (or by another rule) the multiple of its scale with the least squared error.

    `largest` are the scales by largest magnitude.
    """
    rule = rule or RULES["per-group"]
    best = largest
    least = torch.full_like(largest, math.inf)
    for multiple in MULTIPLES:
        candidate = largest * multiple
        error = rule.sums((rule.dequantise(*rule.quantise(weight, candidate)) - weight) ** 2)
        better = error < least
        best, least = torch.where(better, candidate, best), torch.where(better, error, least)
    return best


def block_sums(values: Tensor) -> Tensor:
    """Sum over every 128 x 128 block of values [out, in]."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % GROUP, 0, -rows % GROUP))
    sums: Tensor = padded.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP)).sum(dim=(1, 3))
    return sums


def row_sums(values: Tensor) -> Tensor:
    """Sum over every row of values [out, in]."""
    return values.sum(dim=1)


RULES: dict[Granularity, WeightRule] = {
    "per-group": WeightRule(GROUP, block_scales, quantise_blocks, dequantise_blocks, block_sums),
    "per-channel": WeightRule(1, channel_scales, quantise_channels, dequantise_channels, row_sums),
}


def _quantise_linear(
    out: int,
    places: tuple[int, int],
    descriptor: int,
    named: tuple[str, StoredTensor],
    rule: WeightRule,
    scales: ScaleFunction,
    progress: Progress,
) -> LinearFacts:
    """Quantise one linear into the values and the scales at `places`, band by band."""
    inputs, outputs = named[1].shape
    width = max(GROUP, BAND_ELEMENTS // inputs // GROUP * GROUP)
    signal = noise = 0.0
    for first in range(0, outputs, width):
        weight = _read_columns(descriptor, named, first, min(width, outputs - first))
        values, scale = rule.quantise(weight, scales(weight))
        signal += _energy(weight)
        noise += _energy(rule.dequantise(values, scale) - weight)
        row = first // rule.rows * scale[0].nbytes
        write_at(out, values.view(torch.uint8).numpy(), places[0] + first * inputs)
        write_at(out, scale.contiguous().numpy(), places[1] + row)
        progress.advance(values.nbytes + scale.nbytes)
    return LinearFacts(10 * math.log10(max(signal, 1e-300) / noise) if noise else None)


def _energy(values: Tensor) -> float:
    return float(values.square().sum(dtype=torch.float64))


def _read_columns(
    descriptor: int, named: tuple[str, StoredTensor], first: int, count: int
) -> Tensor:
    """Columns [first, first + count) of a tensor [in, out] as float32 [count, in], all finite."""
    name, tensor = named
    dtype = FLOAT_DTYPES[tensor.dtype]
    size = STORAGE[dtype].itemsize
    inputs, outputs = tensor.shape
    band = np.empty((inputs, count), STORAGE[dtype])
    for row in range(inputs):
        place = tensor.offset + (row * outputs + first) * size
        data = read_exactly(descriptor, count * size, place, tensor.path)
        band[row] = np.frombuffer(data, STORAGE[dtype])
    if not finite(band, dtype).all():
        row, column = (int(index) for index in np.argwhere(~finite(band, dtype))[0])
        raise QuantisationError(
            f"a weight of {name} is not finite",
            got=f"{widen(band, dtype)[row, column]} at {[row, first + column]}",
            expected="finite weights",
            fix="export the checkpoint again, or leave this linear out with --fp8-exclude",
        )
    return torch.from_numpy(np.ascontiguousarray(widen(band, dtype).T))
