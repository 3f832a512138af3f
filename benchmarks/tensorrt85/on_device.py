"""What the scripts under Python 3.10 share: an engine built from lowered graphs, opened, timed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import build_log
import numpy as np
from numpy.typing import NDArray

from lacache_trt.artifacts import Manifest, load_manifest, write_manifest
from lacache_trt.contract_json import contract_from_json
from lacache_trt.engines.tensorrt.bindings import TENSORRT, import_tensorrt
from lacache_trt.engines.tensorrt.engine import TensorRTEngine, load
from lacache_trt.engines.tensorrt.layout import GRAPHS, WEIGHTS_FILE, plan_file
from lacache_trt.engines.tensorrt.legacy_build import QUICK_TACTICS, TACTICS, LegacyTarget
from lacache_trt.engines.tensorrt.legacy_directory import LegacyModel, engine_body, write_plan
from lacache_trt.engines.tensorrt.legacy_graph import LoweredGraph
from lacache_trt.engines.tensorrt.profiles import profiles_from_json
from lacache_trt.errors import EngineError
from lacache_trt.model_section import read_model_section

ROOT = Path(os.environ["TRT85_ROOT"])
PLUGINS = ROOT / "plugin" / "liblacache_trt_plugins.so"
# All graphs of a run share it. Most of a first build goes into compiling candidates for pointwise
# layers (157 s of tiny-llada's 217 s), which no setting of the builder shortens; with measured
# tactics, or for another length in the same process, that time is not spent again.
TIMING_CACHE = ROOT / "work" / "timing.cache"
TACTICS_VARIABLE = "TRT85_TACTICS"
"""Names of TensorRT's tactic sources to build with instead, or nothing for none but its own."""
QUICK_VARIABLE = "TRT85_QUICK"
"""Set: time fewer kernels in every part."""


def tensorrt() -> Any:
    """TensorRT's module. Its library names cuDNN's, of which an empty stand-in is there."""
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)
    return import_tensorrt(TENSORRT)


@dataclass(frozen=True)
class Built:
    """A built engine directory.

    Attributes:
        manifest: checked.
        seconds: of each graph's build.
        bytes: of each plan.
        constraints: of each graph, whether TensorRT obeyed the types or could prefer others.
    """

    manifest: Manifest
    seconds: Mapping[str, float]
    bytes: Mapping[str, int]
    constraints: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"build_s": self.seconds, "plan_bytes": self.bytes, "constraints": self.constraints}


def build(trt: Any, model: Path, weights: Path, out: Path, quick: bool = False) -> Built:
    """Build the lowered graphs of `model` into the engine directory `out`.

    A plan that an earlier call finished is taken as it is, also where that call was stopped in the
    middle of the next one.

    Args:
        trt: TensorRT's module.
        model: folder of the lowered graphs.
        weights: folder of their weights file.
        out: of an earlier call of the same model, or to be made.
        quick: time fewer kernels, and none that is compiled for it.
    """
    quick = quick or QUICK_VARIABLE in os.environ
    tactics = QUICK_TACTICS if quick else TACTICS
    if TACTICS_VARIABLE in os.environ:
        tactics = tuple(os.environ[TACTICS_VARIABLE].split())
    facts = json.loads((model / "model.json").read_text())
    described = LegacyModel(
        graphs={name: LoweredGraph.read(model / f"{name}.onnx") for name in GRAPHS},
        contract=contract_from_json(facts["contract"]),
        dtype=facts["dtype"],
        profile=profiles_from_json([facts["profile"]])[0],
        weights=weights,
    )
    out.mkdir(parents=True, exist_ok=True)
    target = LegacyTarget(trt, PLUGINS, TIMING_CACHE, "obey", tactics, quick, same_gpu_model=True)
    made = {name: _plan(target, described, name, out) for name in GRAPHS}
    (out / WEIGHTS_FILE).unlink(missing_ok=True)
    if any(graph.shared for graph in described.graphs.values()):
        os.link(weights / WEIGHTS_FILE, out / WEIGHTS_FILE)
    seconds = {name: each["seconds"] for name, each in made.items()}
    config = read_model_section(facts["model"])
    body = engine_body(trt, described, seconds)
    write_manifest(out, "engine", {"model": config.to_json(), **body})
    manifest = load_manifest(out, "engine", hashes="sizes")
    sizes = {name: manifest.path(plan_file(name)).stat().st_size for name in GRAPHS}
    return Built(manifest, seconds, sizes, {name: each["types"] for name, each in made.items()})


def _plan(target: LegacyTarget, model: LegacyModel, name: str, out: Path) -> dict[str, Any]:
    """Seconds and treatment of types of one graph's plan, which is built if it is not there."""
    done, key = out.with_name(f"{out.name}.{name}.json"), _sources(target, model, name)
    if done.is_file() and (out / plan_file(name)).is_file():
        known: dict[str, Any] = json.loads(done.read_text())
        if known["key"] == key:
            print(f"{name}: the plan of an earlier run", flush=True)
            return known
    done.unlink(missing_ok=True)
    try:
        seconds = write_plan(target, model, name, out)
    except EngineError as error:
        print(f"obeying the types failed, preferring them instead: {error}", flush=True)
        target = replace(target, constraints="prefer")
        seconds = write_plan(target, model, name, out)
    print(f"{name}: built in {seconds:.0f} s", flush=True)
    known = {"key": key, "seconds": seconds, "types": target.constraints}
    fresh = done.with_suffix(".fresh")
    fresh.write_text(json.dumps(known))
    fresh.rename(done)
    return known


def _sources(target: LegacyTarget, model: LegacyModel, name: str) -> str:
    """What a plan depends on: the graph, the plugin library, where kernels come from."""
    chosen = repr((target.tactics, target.heuristic)).encode()
    digest = hashlib.sha256(target.library.read_bytes() + chosen)
    digest.update(model.graphs[name].data)
    return digest.hexdigest()


def open_engine(manifest: Manifest, trt: Any) -> TensorRTEngine:
    """The project's own runtime over the plans."""
    os.environ["LACACHE_TRT_PLUGIN_LIBRARY"] = str(PLUGINS)
    return load(manifest, trt)


def events_milliseconds(engine: Any, action: Any, repeats: int) -> list[float]:
    """Device milliseconds of each run of `action` on the engine's stream."""
    cuda, stream = engine._device._cuda, engine._device._stream
    times = []
    with engine._device.activated():
        for _ in range(repeats):
            start, end = cuda.Event(), cuda.Event()
            start.record(stream)
            action()
            end.record(stream)
            end.synchronize()
            times.append(float(end.time_since(start)))
    return times


def replay_milliseconds(engine: Any, session: Any, repeats: int) -> dict[str, float]:
    """Median device time of the captured graph of each call that the session has made."""
    return {
        graph: median(
            events_milliseconds(engine, lambda c=call: engine._device.replay(c._captured), repeats)
        )
        for (graph, _), call in session._lane._calls.items()
    }


def layer_milliseconds(trt: Any, engine: Any, session: Any) -> dict[str, dict[str, float]]:
    """Milliseconds of every layer in one eager run of each graph, largest first."""

    class Profiler(trt.IProfiler):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.layers: dict[str, float] = {}

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.layers[layer_name] = self.layers.get(layer_name, 0.0) + ms

    found = {}
    for (graph, _), call in session._lane._calls.items():
        profiler = Profiler()
        call._context._wrapped.profiler = profiler
        with engine._device.activated():
            for _ in range(2):  # the first run after a change warms up
                profiler.layers.clear()
                call._enqueue()
                engine._device.synchronize()
        found[graph] = dict(sorted(profiler.layers.items(), key=lambda item: -item[1]))
    return found


def fnv1a(data: bytes) -> str:
    """The hash that `loader` prints."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & ((1 << 64) - 1)
    return f"{value:016x}"


def same_bits(left: Mapping[str, NDArray[Any]], right: Mapping[str, NDArray[Any]]) -> bool:
    """Whether arrays are equal to the last bit."""
    return all(left[name].tobytes() == right[name].tobytes() for name in left)


def copied(outputs: Any) -> dict[str, NDArray[Any]]:
    """The arrays of a step's outputs."""
    return {name: np.array(array) for name, array in vars(outputs).items()}


def write_json(name: str, metrics: Mapping[str, float], details: Mapping[str, Any]) -> None:
    """A part's results, for `run.py` to collect."""
    text = json.dumps({"metrics": dict(metrics), "details": details}, indent=1)
    (Path(os.environ["TRT85_RESULTS"]) / f"{name}.json").write_text(text)


def log_tensorrt(name: str) -> None:
    """TensorRT's warnings on stderr, every message in a file."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    build_log.record(Path(os.environ["TRT85_LOGS"]) / f"{name}.verbose.log")


class Clock:
    """Says how long each part took."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def mark(self, label: str) -> None:
        now = time.monotonic()
        print(f"-- {label}: {now - self._last:.1f} s", flush=True)
        self._last = now
