"""Builds an engine directory from a bundle; the directory is complete or absent."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from lacache_trt.artifacts import Manifest, load_manifest, publish_directory, write_manifest
from lacache_trt.engines.base import Engine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.registry import ENGINES, resolve, resolve_for_build
from lacache_trt.errors import ArtifactError
from lacache_trt.progress import Progress, SilentProgress
from lacache_trt.publish import refuse_overlap

_TEXT_FILES = ("tokenizer.json", "text.json")


@dataclass(frozen=True)
class BuildReport:
    """What was built.

    Attributes:
        out: the engine directory.
        engine: its name in the registry.
        seconds: time it took.
        total_bytes: size of its files.
    """

    out: Path
    engine: str
    seconds: float
    total_bytes: int


def build_engine(
    bundle: Path,
    out: Path,
    options: BuildOptions | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Build the engine that `options` names from the bundle at `bundle` into the directory `out`.

    Raises:
        MissingDependencyError: the engine cannot be built on this machine.
        ArtifactError: the bundle is incomplete or was changed.
        OutputError: `out` exists already, overlaps the bundle or cannot be written.
    """
    options = options or BuildOptions()
    progress = progress or SilentProgress()
    started = time.monotonic()
    entry = resolve_for_build(options.engine, options.tensorrt.sm)
    options = replace(options, engine=entry.name)
    refuse_overlap(Path(out), Path(bundle))
    source = load_manifest(Path(bundle), "bundle", progress=progress)
    with publish_directory(Path(out), overwrite=options.overwrite) as directory:
        body = import_module(entry.module).build(source, directory, options, progress)
        for name in _TEXT_FILES:
            if name in source.files:
                shutil.copyfile(source.path(name), directory / name)
        provenance = {key: source.body[key] for key in ("source", "versions") if key in source.body}
        model = {"model": source.model.to_json(), "bundle": provenance}
        write_manifest(directory, "engine", {**model, **body})
    total = load_manifest(Path(out), "engine", hashes="sizes").total_bytes()
    return BuildReport(Path(out), entry.name, time.monotonic() - started, total)


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
    engine: Engine = import_module(resolve(name).module).load(manifest)
    return engine
