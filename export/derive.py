"""A bundle whose chosen linears are FP8, derived from another bundle, which is not changed."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import cast

from lacache_trt.artifacts import Manifest, load_manifest, write_manifest
from lacache_trt.export.quantise import quantise_weights
from lacache_trt.model.config import Dtype
from lacache_trt.model.fp8 import Fp8Recipe, fp8_section, refuse_fp8_source, select_linears
from lacache_trt.progress import Progress

WEIGHTS = "weights.safetensors"


def derive_bundle(
    source: Manifest, directory: Path, recipe: Fp8Recipe, progress: Progress, *, graphs: bool = True
) -> Manifest:
    """Write the FP8 bundle into the new `directory`, inside one that is being published.

    Args:
        source: a checked bundle without FP8.
        directory: where the new bundle goes.
        recipe: what to quantise and how.
        progress: told what is being done.
        graphs: export the graphs too, which needs the export packages; the CUDA engine has none.

    Raises:
        InvalidRequestError: the bundle is FP8 already, or nothing is selected.
        QuantisationError: a weight is NaN or infinite.
    """
    refuse_fp8_source(source.body)
    selection = select_linears(source.model, recipe)
    linears = frozenset(selection.linears)
    dtype = cast(Dtype, source.body["dtype"])
    directory.mkdir()
    weights = (source.path(WEIGHTS), directory / WEIGHTS)
    facts = quantise_weights(*weights, source.model, dtype, linears, recipe, progress)
    for name in source.files:
        if name != WEIGHTS and not name.endswith(".onnx"):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.path(name), directory / name)
    if graphs:
        _export_graphs(source, directory, dtype, linears, progress)
    section = fp8_section(recipe, selection, {name: asdict(fact) for name, fact in facts.items()})
    body = {**source.body, "fp8": section, "validation": {"mode": "off"}}
    write_manifest(directory, "bundle", body)
    return load_manifest(directory, "bundle", hashes="sizes")


def _export_graphs(
    source: Manifest, directory: Path, dtype: Dtype, linears: frozenset[str], progress: Progress
) -> None:
    """Export again what `source` holds: the program is the same, its linears are not."""
    import onnx_ir as ir

    from lacache_trt.export.graphs import capture_graph, weight_locations

    names = [name for name in source.contract if f"{name}.onnx" in source.files]
    opset = source.body["opset"]
    locations = weight_locations(directory / WEIGHTS)
    progress.start("graphs", total=len(names))
    for name in names:
        graph = capture_graph(source.model, name, dtype, int(str(opset)), locations, linears)
        ir.save(graph, directory / f"{name}.onnx")
        progress.advance()
