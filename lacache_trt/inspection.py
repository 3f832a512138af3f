"""What a bundle, an engine directory or a checkpoint holds, as plain JSON types."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

from lacache_trt.artifacts import MANIFEST_NAME, Hashes, Manifest, load_manifest
from lacache_trt.contract_json import contract_to_json
from lacache_trt.errors import ArtifactError
from lacache_trt.model.config import DTYPE_BYTES, Dtype, ModelConfig, parameter_shapes
from lacache_trt.model.fp8 import fp8_linears
from lacache_trt.progress import Progress
from lacache_trt.strict_json import read_object

MAX_LAYERS_BYTES = 256 * 2**20
_RECORDED = (
    "engine",
    "device",
    "dtype",
    "opset",
    "source",
    "bundle",
    "validation",
    "versions",
    "sm",
    "tensorrt",
    "cuda",
    "triton",
    "plugin_abi",
    "weights",
    "profiles",
    "fp8",
    "gemms",
    "fp8_gemms",
)


def inspect_path(
    path: Path, hashes: Hashes = "sizes", progress: Progress | None = None
) -> dict[str, object]:
    """Describe what lies at `path`; no weights are read unless `hashes` is `full`.

    Raises:
        ArtifactError: nothing that the toolkit knows lies there, or its manifest does not hold.
        CheckpointError: it is a checkpoint, but not a complete one.
    """
    path = Path(path)
    if os.path.lexists(path / MANIFEST_NAME):
        return _describe_artifact(load_manifest(path, hashes=hashes, progress=progress), hashes)
    if (path / "config.json").is_file():
        return _describe_checkpoint(path)
    raise ArtifactError(
        f"{path} is neither a bundle nor an engine directory nor a checkpoint",
        got="nothing there" if not path.exists() else f"no {MANIFEST_NAME} and no config.json",
        expected="the path of a directory that holds one of the two",
    )


def read_layers(path: Path) -> dict[str, object]:
    """What TensorRT's inspector said of each plan when it was built, by graph.

    Raises:
        ArtifactError: the directory holds no such report.
    """
    manifest = load_manifest(Path(path), "engine", hashes="sizes")
    suffix = ".layers.json"
    names = [name for name in manifest.files if name.endswith(suffix)]
    if not names:
        raise ArtifactError(
            "this engine directory holds no layer report",
            got=", ".join(manifest.files),
            expected=f"files that end in {suffix}",
            fix="TensorRT writes it where it can open the plan: build on a machine with the GPU",
        )
    return {
        name.removesuffix(suffix): read_object(manifest.path(name), MAX_LAYERS_BYTES)
        for name in sorted(names)
    }


def describe_model(config: ModelConfig, dtype: Dtype) -> dict[str, object]:
    """Architecture, parameters, bytes of the caches."""
    parameters = sum(prod(shape) for shape in parameter_shapes(config).values())
    per_token = config.cache_bytes_per_token(DTYPE_BYTES[dtype])
    return {
        "architecture": config.to_json(),
        "parameters": parameters,
        "cache_bytes_per_token": per_token,
        "cache_bytes_full_length": per_token * config.max_length,
    }


def describe_cuts(config: ModelConfig) -> dict[str, str]:
    """Rows that the graphs leave out because nothing reads them."""
    rows = "the block's rows and requested logit rows"
    if config.logit_shift:
        rows += ", each shifted by one"
    last = "keys and values of all rows; queries, attention, output projection and FFN of "
    kept = last + rows if config.num_layers > 1 else "not cut: the only layer is layer 0"
    return {"head and sampler": rows, "last layer": kept}


def _describe_artifact(manifest: Manifest, hashes: Hashes) -> dict[str, object]:
    dtype = _dtype(manifest)
    fp8_linears(manifest.body, manifest.model)  # refuses a malformed section
    recorded = {name: manifest.body[name] for name in _RECORDED if name in manifest.body}
    return {
        "path": str(manifest.directory),
        "kind": manifest.kind,
        "toolkit_version": manifest.toolkit_version,
        "checked": "sizes and SHA-256" if hashes == "full" else "names and sizes",
        "total_bytes": manifest.total_bytes(),
        "files": {name: record.size for name, record in manifest.files.items()},
        **describe_model(manifest.model, dtype),
        **recorded,
        "cut": describe_cuts(manifest.model),
        "contract": contract_to_json(manifest.contract),
    }


def _dtype(manifest: Manifest) -> Dtype:
    """Dtype of the graphs: the manifest's own, else the model's."""
    recorded = manifest.body.get("dtype")
    for dtype in DTYPE_BYTES:
        if dtype == recorded:
            return dtype  # type: ignore[return-value]
    return manifest.model.dtype


def _describe_checkpoint(path: Path) -> dict[str, object]:
    from lacache_trt.model.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(path)
    config = checkpoint.config
    files = sorted(entry for entry in checkpoint.directory.iterdir() if entry.is_file())
    return {
        "path": str(path),
        "kind": "checkpoint",
        "revision": checkpoint.revision,
        "total_bytes": sum(entry.stat().st_size for entry in files),
        "files": {entry.name: entry.stat().st_size for entry in files},
        "dtype": config.dtype,
        "tensors": len(checkpoint.tensors),
        **describe_model(config, config.dtype),
    }
