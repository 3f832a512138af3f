"""An engine directory for TensorRT whose plans the simulated TensorRT executes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from built import Built
from fake_device import SM, FakeDevice
from fake_tensorrt import VERSION, FakeContext, FakeTrt

from lacache_trt.artifacts import Manifest, load_manifest, write_manifest
from lacache_trt.contract import KEY_VALUE_GRAPHS
from lacache_trt.contract_json import contract_to_json
from lacache_trt.engines.tensorrt.engine import TensorRTEngine, load
from lacache_trt.engines.tensorrt.profiles import parse_profiles

EXACT = ("fill", "reuse")
ALL = (*EXACT, *KEY_VALUE_GRAPHS)
PROFILE = "B=1:2:4,N=16:64:192,Bk=2:8:32,S=1:1:16,E=1:1:16,R=0:0:16"
WIDE = f"{PROFILE},W=1:8:192"
NAME = "llada"


def write_engine(
    built: Built,
    directory: Path,
    *profiles: str,
    graphs: tuple[str, ...] = EXACT,
    **changes: Any,
) -> Manifest:
    """An engine directory whose plans are the names of their graphs."""
    source = load_manifest(built.engine, "engine")
    directory.mkdir()
    for graph in graphs:
        (directory / f"{graph}.plan").write_bytes(graph.encode().ljust(64, b"\0"))
    parsed = parse_profiles(profiles or (PROFILE,), source.model.max_length)
    body = {
        "model": source.model.to_json(),
        "engine": "tensorrt",
        "dtype": "float32",
        "sm": SM,
        "tensorrt": VERSION,
        "plugin_abi": None,
        "profiles": [each.to_json() for each in parsed],
        "shared_weights": {},
        "contract": contract_to_json({name: source.contract[name] for name in graphs}),
    }
    write_manifest(directory, "engine", {**body, **changes})
    return load_manifest(directory, "engine")


def fakes(built: Built, manifest: Manifest, memory: int = 1 << 30) -> tuple[FakeTrt, FakeDevice]:
    device = FakeDevice(memory)
    trt = FakeTrt(device, dict(manifest.contract), built.engine)
    trt.profiles = manifest.body.get("profiles")
    return trt, device


def open_engine(built: Built, manifest: Manifest) -> tuple[TensorRTEngine, FakeTrt, FakeDevice]:
    trt, device = fakes(built, manifest)
    return load(manifest, trt, device), trt, device


def prompts(model_vocabulary: int) -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(3, model_vocabulary - 8, n).tolist() for n in (3, 9, 20)]


def contexts(trt: FakeTrt) -> list[FakeContext]:
    return [context for engine in trt.engines.values() for context in engine.contexts]
