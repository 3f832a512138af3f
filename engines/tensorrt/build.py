"""Writes an engine directory with the plans of `fill` and `reuse`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lacache_trt.artifacts import Manifest
from lacache_trt.contract_json import contract_to_json
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.tensorrt.bindings import RTX, TENSORRT, import_tensorrt
from lacache_trt.engines.tensorrt.inspection import layers_json
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.engines.tensorrt.plan import Target, build_plan
from lacache_trt.engines.tensorrt.profiles import parse_profiles
from lacache_trt.errors import InvalidRequestError, MissingDependencyError
from lacache_trt.gpus import find_gpus
from lacache_trt.plugins.abi import abi_hash
from lacache_trt.plugins.library import build_library
from lacache_trt.progress import Progress

GRAPHS = ("fill", "reuse")


def build(
    bundle: Manifest, directory: Path, options: BuildOptions, progress: Progress
) -> dict[str, Any]:
    """Write the plans into `directory`; returns the engine part of the manifest."""
    settings = getattr(options, "tensorrt", TensorRTOptions())
    return build_plans(bundle, directory, options.engine, settings, progress)


def build_plans(
    bundle: Manifest, directory: Path, engine: str, settings: TensorRTOptions, progress: Progress
) -> dict[str, Any]:
    """`build` for one flavour: `tensorrt`, `tensorrt-rtx`, or `auto` for whichever is there.

    Raises:
        MissingDependencyError: TensorRT, a GPU, a compiler or the headers are missing.
        EngineError: TensorRT failed.
    """
    flavour = _flavour(engine)
    trt = import_tensorrt(flavour)
    dtype = str(bundle.body["dtype"])
    _check_dtype(dtype)
    profiles = parse_profiles(settings.profiles, bundle.model.max_length)
    target = Target(
        trt=trt,
        flavour=flavour,
        sm=_target_sm(flavour, settings.sm),
        library=build_library(settings.include) if settings.plugins else None,
        timing_cache=settings.timing_cache,
    )
    contract = {name: bundle.contract[name] for name in GRAPHS}
    for name, spec in contract.items():
        plan = build_plan(target, bundle.path(f"{name}.onnx"), spec, profiles, progress)
        (directory / f"{name}.plan").write_bytes(plan)  # its buffer: a plan may have 16 GB
        layers = layers_json(trt, plan)
        if layers is not None:
            (directory / f"{name}.layers.json").write_text(layers, encoding="utf-8")
    return {
        "engine": flavour,
        "device": f"sm_{target.sm}",
        "dtype": dtype,
        "sm": target.sm,
        "tensorrt": str(trt.__version__),
        "plugin_abi": f"{abi_hash():016x}" if settings.plugins else None,
        "profiles": [profile.to_json() for profile in profiles],
        "contract": contract_to_json(contract),
    }


def _flavour(engine: str) -> str:
    """The flavour that `--engine` names; for `auto`, TensorRT before TensorRT-RTX."""
    if engine in (TENSORRT, RTX):
        return engine
    try:
        import_tensorrt(TENSORRT)
    except MissingDependencyError:
        return RTX
    return TENSORRT


def _check_dtype(dtype: str) -> None:
    if dtype == "float32":
        raise InvalidRequestError(
            "TensorRT engines are built from half-precision bundles",
            got="a float32 bundle",
            expected="float16 or bfloat16",
            fix="export again with --dtype bfloat16 or --dtype float16",
        )


def _target_sm(flavour: str, wanted: int | None) -> int:
    """The SM to build for: the one asked for, else this machine's."""
    here = [int(gpu.compute_capability.replace(".", "")) for gpu in find_gpus().devices]
    if wanted is None and not here:
        raise MissingDependencyError(
            "there is no GPU here to build for",
            fix="name the target: --engine tensorrt-rtx --sm 89"
            if flavour == RTX
            else "build on the machine with the GPU, or for an L40S or RTX GPU without one: "
            "--engine tensorrt-rtx --sm 89",
        )
    if flavour == TENSORRT and (not here or (wanted is not None and wanted not in here)):
        raise MissingDependencyError(
            "TensorRT builds only for a GPU of this machine",
            got=", ".join(f"sm_{sm}" for sm in here) or "none",
            expected=f"sm_{wanted}",
            fix="build there, or use --engine tensorrt-rtx for an L40S or RTX GPU",
        )
    return wanted if wanted is not None else here[0]
