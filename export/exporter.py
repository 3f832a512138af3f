"""Checkpoint to bundle: one ONNX graph per program over one `weights.safetensors`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from lacache_trt.artifacts import publish_directory, write_manifest
from lacache_trt.contract import graph_specs
from lacache_trt.contract_json import contract_to_json
from lacache_trt.errors import CapacityError
from lacache_trt.export.graphs import capture_graph, weight_locations
from lacache_trt.export.options import ExportOptions
from lacache_trt.export.tokenizer import write_tokenizer
from lacache_trt.export.validate import validate_bundle
from lacache_trt.export.weights import write_weights
from lacache_trt.model.checkpoint import Checkpoint, resolve_model
from lacache_trt.model.config import Dtype, ModelConfig
from lacache_trt.progress import Progress, SilentProgress
from lacache_trt.publish import refuse_overlap

WEIGHTS = "weights.safetensors"
_VERSIONED = ("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class ExportReport:
    """What was exported.

    Attributes:
        out: the bundle directory.
        validation: mode and result of the numerical validation.
        seconds: time it took.
    """

    out: Path
    validation: Mapping[str, Any]
    seconds: float


def export_bundle(
    model: str,
    out: Path,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Export a local checkpoint directory or a hub id into the bundle directory `out`.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
        UnsupportedModelError: its architecture is not one that the toolkit runs.
        OutputError: `out` exists already or cannot be written.
        VerificationError: the exported graphs do not compute what the model computes.
    """
    options, progress = options or ExportOptions(), progress or SilentProgress()
    started = time.monotonic()
    directory = resolve_model(model, options.revision)
    refuse_overlap(Path(out), directory, inside_allowed=True)
    checkpoint = Checkpoint.open(directory)
    config = _configured(checkpoint.config, options)
    dtype = options.dtype or config.dtype
    with publish_directory(Path(out), overwrite=options.overwrite) as bundle:
        write_weights(checkpoint, bundle / WEIGHTS, dtype, progress)
        _write_graphs(bundle, config, dtype, options, progress)
        write_tokenizer(checkpoint.directory, bundle)
        contract = {name: graph_specs(config, dtype)[name] for name in options.graphs}
        validation = validate_bundle(
            bundle, config, dtype, options.validate, progress, tuple(contract)
        )
        body = {
            "model": config.to_json(),
            "dtype": dtype,
            "opset": options.opset,
            "contract": contract_to_json(contract),
            "source": _source(model, checkpoint),
            "validation": validation,
            "versions": {name: version(name) for name in _VERSIONED},
        }
        write_manifest(bundle, "bundle", body)
    return ExportReport(Path(out), validation, time.monotonic() - started)


def _write_graphs(
    bundle: Path, config: ModelConfig, dtype: Dtype, options: ExportOptions, progress: Progress
) -> None:
    locations = weight_locations(bundle / WEIGHTS)
    progress.start("graphs", total=len(options.graphs))
    for name in options.graphs:
        graph = capture_graph(config, name, dtype, options.opset, locations)
        ir.save(graph, bundle / f"{name}.onnx")
        onnx.checker.check_model(bundle / f"{name}.onnx")
        progress.advance()


def _configured(config: ModelConfig, options: ExportOptions) -> ModelConfig:
    if options.max_length is None:
        return config
    if options.max_length > config.max_length:
        raise CapacityError(
            "max_length (--max-seq-len) is longer than what the model was made for",
            got=options.max_length,
            expected=f"at most {config.max_length}",
            fix="leave --max-seq-len out",
        )
    return replace(config, max_length=options.max_length)


def _source(model: str, checkpoint: Checkpoint) -> dict[str, str | None]:
    return {
        "model": _source_name(model),
        "revision": checkpoint.revision,
        "dtype": checkpoint.config.dtype,
    }


def _source_name(model: str) -> str:
    """Hub id, or the name of a local directory without the path that leads to it."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model
