"""Builds an engine directory from a bundle; the directory is complete or absent."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from lacache_trt.artifacts import Manifest, load_manifest, publish_directory, write_manifest
from lacache_trt.engines.base import Engine
from lacache_trt.engines.fp8_recipes import check_recipe
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.registry import ENGINES, TENSORRT_ENGINES, resolve, resolve_for_build
from lacache_trt.errors import ArtifactError, MissingDependencyError
from lacache_trt.fp8_weights import checked_fp8_linears
from lacache_trt.gpus import find_gpus
from lacache_trt.model.fp8 import FP8_SM, fp8_granularity
from lacache_trt.progress import Progress, SilentProgress
from lacache_trt.publish import refuse_overlap

_TEXT_FILES = ("tokenizer.json", "text.json")
DERIVED = "bundle"
"""Where `--fp8` keeps the FP8 bundle in the engine directory."""


@dataclass(frozen=True)
class BuildReport:
    """What was built.

    Attributes:
        out: the engine directory.
        engine: its name in the registry.
        seconds: time it took.
        total_bytes: size of its files.
        warnings: what was asked for and could not be done.
    """

    out: Path
    engine: str
    seconds: float
    total_bytes: int
    warnings: tuple[str, ...] = ()


def build_engine(
    bundle: Path,
    out: Path,
    options: BuildOptions | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Build the engine that `options` names from the bundle at `bundle` into the directory `out`.

    Raises:
        MissingDependencyError: the engine cannot be built on this machine, or not with FP8.
        ArtifactError: the bundle is incomplete or was changed.
        QuantisationError: FP8 is asked for, and a weight is NaN or infinite, or an input is zero.
        InvalidRequestError: the bundle is FP8 in a way that the engine cannot have, or the prompts
            of a calibration are none.
        OutputError: `out` exists already, overlaps the bundle or cannot be written.
    """
    options = options or BuildOptions()
    progress = progress or SilentProgress()
    started = time.monotonic()
    entry = resolve_for_build(options.engine, options.tensorrt.sm)
    options = replace(options, engine=entry.name)
    refuse_overlap(Path(out), Path(bundle))
    source = load_manifest(Path(bundle), "bundle", progress=progress)
    require_fp8(source, options, options.tensorrt.sm)
    with publish_directory(Path(out), overwrite=options.overwrite) as directory:
        if options.fp8 is not None:
            source = _quantised(source, directory, options, progress)
        body = import_module(entry.module).build(source, directory, options, progress)
        for name in _TEXT_FILES:
            if name in source.files:
                shutil.copyfile(source.path(name), directory / name)
        provenance = {key: source.body[key] for key in ("source", "versions") if key in source.body}
        model = {"model": source.model.to_json(), "bundle": provenance}
        fp8 = {"fp8": source.body["fp8"]} if "fp8" in source.body else {}
        write_manifest(directory, "engine", {**model, **fp8, **body})
    total = load_manifest(Path(out), "engine", hashes="sizes").total_bytes()
    seconds = time.monotonic() - started
    return BuildReport(Path(out), entry.name, seconds, total, _warnings(source))


def require_fp8(source: Manifest, options: BuildOptions, sm: int | None) -> None:
    """Raise if the bundle or the options ask for FP8 that the GPU or the engine cannot have.

    Raises:
        ArtifactError: the bundle's FP8 weights are not those of its recipe.
        MissingDependencyError, InvalidRequestError: see `require_fp8_gpu`, `check_recipe`.
    """
    quantised = bool(checked_fp8_linears(source))
    if quantised or options.fp8 is not None:
        require_fp8_gpu(options.engine, sm)
    if quantised:
        check_recipe(fp8_granularity(source.body), options.engine, options.tensorrt)
    if quantised or options.fp8 is not None:
        _require_fp8_cuda(options.engine)


def _require_fp8_cuda(engine: str) -> None:
    """Ask torch for a GPU with FP8 before anything is quantised for the cuda engine."""
    if engine == "cuda":
        from lacache_trt.engines.cuda.engine import require_cuda
        from lacache_trt.engines.cuda.fp8 import require_fp8 as require_device

        require_cuda()
        require_device(["any"])


def require_fp8_gpu(engine: str, wanted: int | None) -> None:
    """Raise `MissingDependencyError` if TensorRT is to build FP8 for a GPU without it."""
    if engine not in TENSORRT_ENGINES:
        return  # ONNX Runtime computes it on the CPU; the CUDA engine asks torch
    here = [(gpu.sm, gpu.name) for gpu in find_gpus().devices]
    sm, name = (wanted, "the GPU of --sm") if wanted is not None else (here or [(FP8_SM, "")])[0]
    if sm < FP8_SM:
        raise MissingDependencyError(
            "this GPU has no FP8 tensor cores",
            got=f"{name}, sm_{sm}",
            expected=f"sm_{FP8_SM} or later (L40S, RTX 40 and 50, H100, H200, B200)",
            fix="build without --fp8, or for another GPU",
        )


def _quantised(
    source: Manifest, directory: Path, options: BuildOptions, progress: Progress
) -> Manifest:
    """The FP8 bundle that the engine is built from; it stays in the engine directory."""
    from lacache_trt.export.derive import derive_bundle

    if options.fp8 is None:
        return source
    return derive_bundle(
        source,
        directory / DERIVED,
        options.fp8,
        progress,
        graphs=options.engine != "cuda",
        calibration=options.calibration,
    )


def _warnings(source: Manifest) -> tuple[str, ...]:
    section = source.body.get("fp8")
    unfit = section.get("unfit") if isinstance(section, dict) else None
    items = unfit.items() if isinstance(unfit, dict) else ()
    return tuple(f"{name} is not FP8: {reason}" for name, reason in items)


def load_engine(manifest: Manifest) -> Engine:
    """Open a checked engine directory with the engine that its manifest names."""
    name = manifest.body.get("engine")
    if not isinstance(name, str) or name not in ENGINES:
        raise ArtifactError(
            "the manifest names an unknown engine",
            got=repr(name),
            expected=", ".join(ENGINES),
            fix="build it again with this version",
        )
    checked_fp8_linears(manifest)
    engine: Engine = import_module(resolve(name).module).load(manifest)
    return engine
