"""Writes an engine directory with a plan per graph: `fill` and `reuse`, and more if asked for."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx_ir as ir

from lacache_trt.artifacts import Manifest
from lacache_trt.contract import KEY_VALUE_GRAPHS, GraphSpec, TensorSpec
from lacache_trt.contract_json import contract_to_json
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.registry import ENGINES
from lacache_trt.engines.tensorrt.bindings import TENSORRT, import_tensorrt
from lacache_trt.engines.tensorrt.inspection import layers_json
from lacache_trt.engines.tensorrt.layout import (
    GRAPHS,
    WEIGHTS_FILE,
    layers_file,
    plan_file,
    with_weights,
)
from lacache_trt.engines.tensorrt.legacy import build_legacy
from lacache_trt.engines.tensorrt.options import LEGACY_VERSION, TensorRTOptions
from lacache_trt.engines.tensorrt.plan import Target, build_plan
from lacache_trt.engines.tensorrt.profiles import Profile, parse_profiles
from lacache_trt.engines.tensorrt.share_weights import large_weights
from lacache_trt.errors import InvalidRequestError, MissingDependencyError
from lacache_trt.gpus import find_gpus
from lacache_trt.plugins.abi import abi_text
from lacache_trt.plugins.library import find_library
from lacache_trt.progress import Progress


@dataclass(frozen=True)
class Resolved:
    """A build with every choice made.

    Attributes:
        flavour: `tensorrt` or `tensorrt-rtx`.
        trt: its Python module.
        dtype: of the activations.
        sm: compute capability to build for.
        profiles: the optimisation profiles.
        contract: the graphs without shared weights.
        shared: weights that are inputs, by graph; empty tuples where they are embedded.
    """

    flavour: str
    trt: Any
    dtype: str
    sm: int
    profiles: tuple[Profile, ...]
    contract: dict[str, GraphSpec]
    shared: dict[str, tuple[TensorSpec, ...]]


def build(
    bundle: Manifest, directory: Path, options: BuildOptions, progress: Progress
) -> dict[str, Any]:
    """Write the plans into `directory`; returns the engine part of the manifest."""
    if options.tensorrt.trt_version is not None and options.engine == TENSORRT:
        return build_legacy(bundle, directory, options.tensorrt, progress)
    return build_plans(bundle, directory, options.engine, options.tensorrt, progress)


def resolve_build(bundle: Manifest, flavour: str, settings: TensorRTOptions) -> Resolved:
    """Make every choice of a build and check that it can be made here.

    Raises:
        MissingDependencyError: TensorRT or a GPU is missing.
        InvalidRequestError, CapacityError: the bundle or a profile does not suit.
    """
    _check_flavour(flavour, settings)
    trt = import_tensorrt(flavour)
    _check_version(flavour, str(trt.__version__))
    dtype = str(bundle.body["dtype"])
    _check_dtype(dtype)
    graphs = graphs_to_build(bundle.contract, settings.cache)
    return Resolved(
        flavour=flavour,
        trt=trt,
        dtype=dtype,
        sm=_target_sm(flavour, settings.sm),
        profiles=parse_profiles(settings.profiles, bundle.model.max_length),
        contract={name: bundle.contract[name] for name in graphs},
        shared={
            name: large_weights(ir.load(bundle.path(f"{name}.onnx")))
            if settings.weights == "shared"
            else ()
            for name in graphs
        },
    )


def _check_flavour(flavour: str, settings: TensorRTOptions) -> None:
    """Refuse what only the other flavour has."""
    given = {"--trt-version": settings.trt_version, "--timing-cache": settings.timing_cache}
    for flag, value in given.items():
        if value is not None and flavour != TENSORRT:
            raise InvalidRequestError(
                f"{flag} is for TensorRT",
                got=f"--engine {flavour}",
                expected=f"--engine {TENSORRT}",
                fix=f"leave {flag} out",
            )


def graphs_to_build(contract: Mapping[str, GraphSpec], cache: str) -> tuple[str, ...]:
    """Names of the graphs that get a plan.

    Raises:
        InvalidRequestError: the bundle lacks one.
    """
    wanted = GRAPHS + (KEY_VALUE_GRAPHS if cache == "exact,kv" else ())
    missing = [name for name in wanted if name not in contract]
    if missing:
        raise InvalidRequestError(
            "the bundle has no graphs for approximate caches",
            got=f"no {', '.join(missing)}",
            fix="export it again with --cache exact,kv, or build with --cache exact",
        )
    return wanted


def build_plans(
    bundle: Manifest, directory: Path, flavour: str, settings: TensorRTOptions, progress: Progress
) -> dict[str, Any]:
    """`build` for one flavour: `tensorrt` or `tensorrt-rtx`.

    Raises:
        MissingDependencyError: TensorRT, a GPU, a compiler or the headers are missing.
        EngineError: TensorRT failed.
    """
    resolved = resolve_build(bundle, flavour, settings)
    target = Target(
        trt=resolved.trt,
        flavour=flavour,
        sm=resolved.sm,
        library=find_library(settings.include) if settings.plugins else None,
        timing_cache=settings.timing_cache,
        share_weights=settings.weights == "shared",
    )
    for name, graph in resolved.contract.items():
        spec = with_weights(graph, resolved.shared[name])
        path = bundle.path(f"{name}.onnx")
        plan = build_plan(target, path, spec, resolved.profiles, progress)
        (directory / plan_file(name)).write_bytes(plan)  # its buffer: a plan may have 16 GB
        layers = layers_json(target.trt, plan)
        if layers is not None:
            (directory / layers_file(name)).write_text(layers, encoding="utf-8")
    if target.share_weights:
        progress.start("copy weights")
        shutil.copyfile(bundle.path(WEIGHTS_FILE), directory / WEIGHTS_FILE)
    return _body(resolved, settings)


def _body(resolved: Resolved, settings: TensorRTOptions) -> dict[str, Any]:
    """The engine part of the manifest."""
    return {
        "engine": resolved.flavour,
        "device": f"sm_{resolved.sm}",
        "dtype": resolved.dtype,
        "sm": resolved.sm,
        "tensorrt": str(resolved.trt.__version__),
        "cuda": find_gpus().cuda,
        "triton": version("triton") if settings.plugins else None,
        "plugin_abi": abi_text() if settings.plugins else None,
        "weights": settings.weights,
        "profiles": [profile.to_json() for profile in resolved.profiles],
        "shared_weights": {
            name: [tensor.name for tensor in tensors] for name, tensors in resolved.shared.items()
        },
        "contract": contract_to_json(resolved.contract),
    }


def _check_version(flavour: str, version: str) -> None:
    problem = ENGINES[flavour].age_problem(version)
    if problem is not None:
        raise MissingDependencyError(
            "the TensorRT that is installed is too old to build with",
            got=problem,
            fix=f"{ENGINES[flavour].install} --upgrade, or for TensorRT {LEGACY_VERSION}: "
            f"--trt-version {LEGACY_VERSION}",
        )


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
    here = [gpu.sm for gpu in find_gpus().devices]
    if wanted is None and not here:
        raise MissingDependencyError(
            "there is no GPU here to build for",
            fix="name the target: --engine tensorrt-rtx --sm 89"
            if flavour != TENSORRT
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
