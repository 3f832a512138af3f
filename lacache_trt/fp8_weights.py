"""Checks that a weights file holds the FP8 linears that its manifest names, with usable scales.

Only headers and scales are read: about a byte in 4,096. The digests of the manifest find damage;
this finds files that do not belong together and scales that no quantiser of ours writes, before a
NaN reaches the logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lacache_trt.artifacts import Manifest
from lacache_trt.errors import ArtifactError, CheckpointError
from lacache_trt.model.config import INPUT_SCALE, fp8_dtypes, parameter_shapes
from lacache_trt.model.fp8 import fp8_granularity, fp8_linears
from lacache_trt.model.safetensors_file import (
    E4M3,
    StoredTensor,
    open_regular,
    read_exactly,
    read_safetensors_header,
)

WEIGHTS = "weights.safetensors"
_STORED = {"float8_e4m3fn": E4M3, "float32": "F32"}
_FIX = "build again with --fp8"


def checked_fp8_linears(manifest: Manifest) -> frozenset[str]:
    """The FP8 linears of a bundle or engine directory, checked against its weights file.

    Raises:
        ArtifactError: recipe and weights do not fit, or a scale is NaN, infinite, 0 or negative.
    """
    linears = fp8_linears(manifest.body, manifest.model)
    if WEIGHTS in manifest.files:
        path = manifest.path(WEIGHTS)
        try:
            tensors = read_safetensors_header(path.resolve())
        except CheckpointError as error:
            if not linears:
                return linears
            raise ArtifactError(error.what, got=error.got, expected=error.expected) from error
        _check_tensors(tensors, manifest, linears)
        for name, kind in sorted(fp8_dtypes(linears, fp8_granularity(manifest.body)).items()):
            if kind == "float32":
                values = check_scales(path, name, tensors[name])
                if name.endswith(INPUT_SCALE):
                    _check_calibrated(manifest, name.removesuffix(INPUT_SCALE), values)
    return linears


def _check_tensors(
    tensors: Mapping[str, StoredTensor], manifest: Manifest, linears: frozenset[str]
) -> None:
    granularity = fp8_granularity(manifest.body)
    shapes = parameter_shapes(manifest.model, linears, granularity)
    special = {name: _STORED[kind] for name, kind in fp8_dtypes(linears, granularity).items()}
    wrong = [
        f"{name} is {_described(tensors.get(name))}, not {dtype} {list(shapes[name])}"
        for name, dtype in special.items()
        if name not in tensors
        or (tensors[name].dtype, tensors[name].shape) != (dtype, shapes[name])
    ]
    wrong += [
        f"{name} is FP8"
        for name, each in tensors.items()
        if each.dtype == E4M3 and name not in special
    ]
    if wrong:
        raise ArtifactError(
            "the weights are not those of the FP8 recipe in the manifest",
            got="; ".join(sorted(wrong)[:8]),
            expected=f"{len(linears)} FP8 linears with scales {granularity}",
            fix=_FIX,
        )


def _described(tensor: StoredTensor | None) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor is not None else "missing"


_LARGEST_SCALE = np.finfo(np.float32).max / 448  # 448 is the largest E4M3 value


def check_scales(path: Path, name: str, tensor: StoredTensor) -> NDArray[np.float32]:
    """The scales; `ArtifactError` unless each is positive, and finite times the largest E4M3."""
    with open_regular(path.resolve()) as descriptor:
        data = read_exactly(descriptor, tensor.nbytes, tensor.offset, path)
    values = np.frombuffer(data, "<f4")
    good = np.isfinite(values) & (values > 0) & (values <= _LARGEST_SCALE)
    if not good.all():
        place = np.unravel_index(int(np.argmin(good)), tensor.shape)
        raise ArtifactError(
            f"{name} holds a scale that cannot be one",
            got=f"{float(values[np.argmin(good)])} at {[int(index) for index in place]}; "
            f"{int((~good).sum())} of {math.prod(tensor.shape)} are wrong",
            expected="positive, finite scales: zeros have 1",
            fix=_FIX,
        )
    return values


def _check_calibrated(manifest: Manifest, linear: str, scale: NDArray[np.float32]) -> None:
    """A static scale is what the manifest's calibration measured, over 448."""
    section = manifest.body["fp8"]
    facts = section["facts"].get(linear) if isinstance(section, dict) else None
    amax = facts.get("input_amax") if isinstance(facts, dict) else None
    if not isinstance(amax, float) or np.float32(amax) / np.float32(448) != scale.item():
        raise ArtifactError(
            f"the input scale of {linear} is not that of the calibration",
            got=f"{scale.item()!r}, largest magnitude {amax!r}",
            expected="the largest magnitude / 448",
            fix=_FIX,
        )
