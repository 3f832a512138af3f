"""A bundle whose chosen linears are FP8, derived from another bundle, which is not changed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lacache_trt.artifacts import Manifest, load_manifest, write_manifest
from lacache_trt.engines.fp8_recipes import check_calibration
from lacache_trt.export.quantise import LinearFacts, quantise_weights
from lacache_trt.model.config import Dtype, Granularity
from lacache_trt.model.fp8 import Fp8Recipe, fp8_section, refuse_fp8_source, select_linears
from lacache_trt.progress import Progress

if TYPE_CHECKING:
    from lacache_trt.export.calibrate import Calibration

WEIGHTS = "weights.safetensors"


def derive_bundle(
    source: Manifest,
    directory: Path,
    recipe: Fp8Recipe,
    progress: Progress,
    *,
    graphs: bool = True,
    calibration: Path | None = None,
) -> Manifest:
    """Write the FP8 bundle into the new `directory`, inside one that is being published.

    Args:
        source: a checked bundle without FP8.
        directory: where the new bundle goes.
        recipe: what to quantise and how.
        progress: told what is being done.
        graphs: export the graphs too, which needs the export packages; the CUDA engine has none.
        calibration: file of prompts, for a recipe with scales per channel.

    Raises:
        InvalidRequestError: the bundle is FP8 already, nothing is selected, or prompts are missing.
        QuantisationError: a weight is NaN or infinite, or an input is all zeros.
    """
    check_calibration(recipe, calibration)
    refuse_fp8_source(source.body)
    selection = select_linears(source.model, recipe)
    linears = frozenset(selection.linears)
    dtype = cast(Dtype, source.body["dtype"])
    measured = _measured(source, selection.linears, calibration, progress)
    directory.mkdir()
    weights = (source.path(WEIGHTS), directory / WEIGHTS)
    scales = measured.input_scales if measured is not None else None
    facts = quantise_weights(*weights, source.model, dtype, linears, recipe, progress, scales)
    _copy_rest(source, directory)
    if graphs:
        _export_graphs(source, directory, dtype, (linears, recipe.recipe), progress)
    section = fp8_section(recipe, selection, *_recorded(facts, measured))
    body = {**source.body, "fp8": section, "validation": {"mode": "off"}}
    write_manifest(directory, "bundle", body)
    return load_manifest(directory, "bundle", hashes="sizes")


def _measured(
    source: Manifest, linears: Sequence[str], calibration: Path | None, progress: Progress
) -> Calibration | None:
    if calibration is None:
        return None
    from lacache_trt.export.calibrate import calibrate_inputs

    return calibrate_inputs(source, linears, calibration, progress)


def _copy_rest(source: Manifest, directory: Path) -> None:
    """Copy what is neither weights nor graph."""
    for name in source.files:
        if name != WEIGHTS and not name.endswith(".onnx"):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.path(name), directory / name)


def _recorded(
    facts: Mapping[str, LinearFacts], measured: Calibration | None
) -> tuple[dict[str, dict[str, float | None]], dict[str, object] | None]:
    """For the manifest: facts of each linear, and what static scales were measured on."""
    found = {name: asdict(fact) for name, fact in facts.items()}
    if measured is None:
        return found, None
    for name, amax in measured.input_amax.items():
        found[name]["input_amax"] = amax
    return found, measured.to_json()


def _export_graphs(
    source: Manifest,
    directory: Path,
    dtype: Dtype,
    fp8: tuple[frozenset[str], Granularity],
    progress: Progress,
) -> None:
    """Export again what `source` holds: the program is the same, its linears are not."""
    import onnx_ir as ir

    from lacache_trt.export.graphs import capture_graph, weight_locations

    names = [name for name in source.contract if f"{name}.onnx" in source.files]
    opset = source.body["opset"]
    locations = weight_locations(directory / WEIGHTS)
    progress.start("graphs", total=len(names))
    for name in names:
        graph = capture_graph(source.model, name, dtype, int(str(opset)), locations, *fp8)
        ir.save(graph, directory / f"{name}.onnx")
        progress.advance()
