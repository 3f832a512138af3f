"""Writes an engine directory with TensorRT 8.5 from lowered graphs; needs no ONNX package."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lacache_trt.contract import GraphSpec
from lacache_trt.contract_json import contract_to_json
from lacache_trt.engines.padding import LISTED_IDS
from lacache_trt.engines.tensorrt.bindings import TENSORRT
from lacache_trt.engines.tensorrt.inspection import layers_json
from lacache_trt.engines.tensorrt.layout import WEIGHTS_FILE, layers_file, plan_file
from lacache_trt.engines.tensorrt.legacy_api import LEGACY
from lacache_trt.engines.tensorrt.legacy_build import LegacyTarget, build_legacy_plan
from lacache_trt.engines.tensorrt.legacy_graph import LoweredGraph
from lacache_trt.engines.tensorrt.profiles import Profile, Range, default_ranges, parse_profiles
from lacache_trt.errors import InvalidRequestError
from lacache_trt.gpus import find_gpus
from lacache_trt.plugins.abi import abi_text
from lacache_trt.progress import Progress

_DEFAULTS = {"S": LISTED_IDS, "E": LISTED_IDS, "R": 0}


@dataclass(frozen=True)
class LegacyModel:
    """Lowered graphs and what the manifest says of them.

    Attributes:
        graphs: `fill` and `reuse`.
        contract: of the same, as the exporter wrote it.
        dtype: of the activations.
        profile: the one value of every symbol.
        weights: folder of the weights file that the graphs refer to.
    """

    graphs: Mapping[str, LoweredGraph]
    contract: Mapping[str, GraphSpec]
    dtype: str
    profile: Profile
    weights: Path


def fixed_profile(texts: Sequence[str], max_length: int) -> Profile:
    """The sizes of a legacy build: those of `--profile`, else those that TensorRT would tune for.

    Raises:
        InvalidRequestError: several profiles, or a range of sizes.
        CapacityError: a length is beyond what the model was made for.
    """
    if len(texts) > 1:
        raise InvalidRequestError(
            "a TensorRT 8.5 engine has one profile",
            got=", ".join(texts),
            fix="build one engine directory for each",
        )
    defaults = default_ranges(max_length)
    ranges = dict(parse_profiles(texts, max_length)[0].ranges)
    for name, size in ranges.items():
        if size == defaults[name]:
            value = _DEFAULTS.get(name, size.tuned)
            ranges[name] = Range(value, value, value)
        elif size.low != size.high:
            raise InvalidRequestError(
                "a TensorRT 8.5 engine has fixed sizes",
                got=f"{name}={size}",
                expected=f"one value, as {name}={size.tuned}",
            )
    return Profile(ranges)


def write_plans(
    target: LegacyTarget, model: LegacyModel, directory: Path, progress: Progress
) -> dict[str, Any]:
    """Build every graph into `directory`; returns the engine part of the manifest.

    Raises:
        EngineError, VerificationError: see `build_legacy_plan`.
    """
    seconds: dict[str, float] = {}
    for name in model.graphs:
        progress.start(f"{name}: TensorRT {LEGACY}")
        seconds[name] = write_plan(target, model, name, directory)
    if any(graph.shared for graph in model.graphs.values()):
        progress.start("copy weights")
        shutil.copyfile(model.weights / WEIGHTS_FILE, directory / WEIGHTS_FILE)
    return engine_body(target.trt, model, seconds)


def write_plan(target: LegacyTarget, model: LegacyModel, name: str, directory: Path) -> float:
    """Build one graph into `directory`; returns the seconds of its build.

    Raises:
        EngineError, VerificationError: see `build_legacy_plan`.
    """
    sizes = {symbol: size.tuned for symbol, size in model.profile.ranges.items()}
    started = time.monotonic()
    path, spec = model.weights / f"{name}.onnx", model.contract[name]
    plan = build_legacy_plan(target, model.graphs[name], path, spec, sizes)
    seconds = round(time.monotonic() - started, 3)
    (directory / plan_file(name)).write_bytes(plan)
    layers = layers_json(target.trt, plan)
    if layers is not None:
        (directory / layers_file(name)).write_text(layers, encoding="utf-8")
    return seconds


def engine_body(trt: Any, model: LegacyModel, seconds: Mapping[str, float]) -> dict[str, Any]:
    """The engine part of the manifest; `seconds` is what each graph's build took."""
    gpus = find_gpus()
    shared = {name: [spec.name for spec in graph.shared] for name, graph in model.graphs.items()}
    return {
        "engine": TENSORRT,
        "device": f"sm_{gpus.devices[0].sm}" if gpus.devices else None,
        "dtype": model.dtype,
        "sm": gpus.devices[0].sm if gpus.devices else None,
        "tensorrt": str(trt.__version__),
        "cuda": gpus.cuda,
        "plugin_abi": abi_text(),
        "weights": "shared" if any(shared.values()) else "embedded",
        "profiles": [model.profile.to_json()],
        "shared_weights": shared,
        "absent": {name: list(graph.absent) for name, graph in model.graphs.items()},
        "contract": contract_to_json({name: model.contract[name] for name in model.graphs}),
        "build_seconds": dict(seconds),
    }
