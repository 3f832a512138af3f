"""What the TensorRT 8.5 run keeps when it is stopped, and what it leaves for the next machine."""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import benchmark_path
import pytest
from built import Built

from lacache_trt.artifacts import load_manifest
from lacache_trt.contract import TensorSpec
from lacache_trt.contract_json import contract_to_json
from lacache_trt.engines.tensorrt.legacy_directory import fixed_profile
from lacache_trt.engines.tensorrt.legacy_graph import LoweredGraph
from lacache_trt.errors import EngineError

FOLDER = benchmark_path.BENCHMARKS / "tensorrt85"
SHARED = (TensorSpec("embed.weight", (3, 4), "float16"),)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that the run works in; its scripts can be imported meanwhile."""
    root = tmp_path / "root"
    for name in ("results", "logs", "work", "plugin", "scripts", "site/tensorrt"):
        (root / name).mkdir(parents=True)
    (root / "plugin" / "liblacache_trt_plugins.so").write_bytes(b"plugins")
    (root / "site" / "tensorrt" / "__init__.py").write_text('import os\n__version__ = "8.5.3.1"\n')
    (root / "scripts" / "result_file.py").symlink_to(benchmark_path.BENCHMARKS / "result_file.py")
    for name, value in {"ROOT": root, "RESULTS": root / "results", "LOGS": root / "logs"}.items():
        monkeypatch.setenv(f"TRT85_{name}", str(value))
    monkeypatch.delenv("TRT85_TACTICS", raising=False)
    monkeypatch.delenv("TRT85_QUICK", raising=False)
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    known = sys.modules.pop("result_file", None)
    yield root
    for name in set(sys.modules) - before | {"result_file"}:
        file = str(getattr(sys.modules.get(name), "__file__", ""))
        if str(FOLDER) in file or str(root) in file:
            del sys.modules[name]
    if known is not None:
        sys.modules["result_file"] = known


# --- plans ---


class Builder:
    """Stands for `write_plan`: remembers what was built, and fails or is killed where told to."""

    def __init__(self) -> None:
        self.built: list[tuple[str, str]] = []
        self.fails: dict[tuple[str, str], BaseException] = {}

    def __call__(self, target: Any, model: Any, name: str, out: Path) -> float:
        (out / f"{name}.plan").write_bytes(b"half a plan")
        failure = self.fails.pop((name, target.constraints), None)
        if failure is not None:
            raise failure
        (out / f"{name}.plan").write_bytes(b"a plan of " + model.graphs[name].data)
        self.built.append((name, target.constraints))
        return 2.5


@pytest.fixture
def builder(root: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    builder = Builder()
    monkeypatch.setattr(import_module("on_device"), "write_plan", builder)
    return builder


@pytest.fixture
def build(root: Path, models: Callable[[str], Built]) -> Callable[[], Any]:
    """Builds a model of two graphs whose embedding table is an input."""
    source = load_manifest(models("llada").engine, "engine")
    model, weights = root / "models" / "m", root / "weights"
    model.mkdir(parents=True)
    weights.mkdir()
    (weights / "weights.safetensors").write_bytes(b"weights")
    for name in ("fill", "reuse"):
        LoweredGraph(name.encode(), {}, (), SHARED).write(model / f"{name}.onnx")
    facts = {
        "model": source.model.to_json(),
        "dtype": "float16",
        "profile": fixed_profile(("B=1,N=64,Bk=8",), source.model.max_length).to_json(),
        "contract": contract_to_json({name: source.contract[name] for name in ("fill", "reuse")}),
    }
    (model / "model.json").write_text(json.dumps(facts))
    trt = SimpleNamespace(__version__="8.5.3.1")
    out = root / "work" / "m" / "engine"
    return lambda: import_module("on_device").build(trt, model, weights, out)


def test_a_build_that_is_killed_in_reuse_keeps_fill(
    root: Path, builder: Builder, build: Callable[[], Any]
) -> None:
    builder.fails["reuse", "obey"] = SystemExit("killed")
    with pytest.raises(SystemExit):
        build()
    assert builder.built == [("fill", "obey")]
    built = build()
    assert builder.built == [("fill", "obey"), ("reuse", "obey")]
    assert built.seconds == {"fill": 2.5, "reuse": 2.5}
    shared = built.manifest.body["shared_weights"]
    assert shared == {"fill": ["embed.weight"], "reuse": ["embed.weight"]}
    linked = built.manifest.path("weights.safetensors")
    assert linked.stat().st_ino == (root / "weights" / "weights.safetensors").stat().st_ino
    again = build()
    assert len(builder.built) == 2
    assert (again.seconds, again.bytes) == (built.seconds, built.bytes)
    assert (built.manifest.directory / "reuse.plan").read_bytes() == b"a plan of reuse"


def test_only_a_plan_whose_sources_changed_is_built_again(
    root: Path, builder: Builder, build: Callable[[], Any]
) -> None:
    build()
    LoweredGraph(b"other", {}, (), SHARED).write(root / "models" / "m" / "reuse.onnx")
    build()
    assert [name for name, _ in builder.built] == ["fill", "reuse", "reuse"]
    (root / "plugin" / "liblacache_trt_plugins.so").write_bytes(b"other")
    build()
    assert [name for name, _ in builder.built][3:] == ["fill", "reuse"]


def test_types_that_cannot_be_obeyed_are_preferred_in_that_graph(
    builder: Builder, build: Callable[[], Any]
) -> None:
    builder.fails["reuse", "obey"] = EngineError("no kernel")
    assert build().constraints == {"fill": "obey", "reuse": "prefer"}


def test_large_plans_and_weights_go_after_the_measurement(root: Path, tmp_path: Path) -> None:
    module = import_module("slice")
    for name, size in {"fill.plan": 1000, "reuse.plan": module.SMALL_PLAN + 1}.items():
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)
    (tmp_path / "weights.safetensors").write_bytes(b"weights")
    module.tidy(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["fill.plan"]


@pytest.mark.parametrize(("kind", "prefix"), [("slice", ""), ("shared", "shared.")])
def test_a_length_is_written_before_the_next_is_built(
    root: Path, monkeypatch: pytest.MonkeyPatch, kind: str, prefix: str
) -> None:
    module, done = import_module("slice"), []
    figures = {"device_ms": {"reuse": 1.5, "fill": 0.5}, "wall_ms": 2.0}
    facts = {"build_s": {"fill": 3.0, "reuse": 4.0}, "plan_bytes": {"fill": 5, "reuse": 6}}
    built = SimpleNamespace(manifest=None, constraints={}, to_json=lambda: facts)

    def build(trt: Any, model: Path, weights: Path, out: Path) -> Any:
        finished = sorted(path.stem for path in (root / "results").iterdir())
        done.append((model.relative_to(root).as_posix(), finished))
        return built

    monkeypatch.setattr(module, "build", build)
    monkeypatch.setattr(module, "tensorrt", lambda: None)
    monkeypatch.setattr(module, "log_tensorrt", lambda name: None)
    monkeypatch.setattr(module, "open_engine", lambda manifest, trt: nullcontext())
    monkeypatch.setattr(module, "measure", lambda trt, engine, length: figures)
    monkeypatch.setattr(sys, "argv", ["slice.py", kind, "4", str(root / "weights"), "384", "1152"])
    module.main()
    first = f"{kind}.l4.n384"
    assert done == [(f"models/{kind}.4/n384", []), (f"models/{kind}.4/n1152", [first])]
    metrics = json.loads((root / "results" / f"{first}.json").read_text())["metrics"]
    assert metrics[f"h200.trt85.{prefix}l4.n384.exact_reuse_ms.fp16"] == 1.5
    assert metrics[f"h200.trt85.{prefix}l4.n384.build_s"] == 7.0


# --- the order of the parts ---


@pytest.mark.parametrize(
    ("finished", "expected"),
    [
        ([[384, 1152]], ["slice.l4.n384 384 1152"]),
        ([[384], [1152]], ["slice.l4.n384 384 1152", "slice.l4.n1152 1152"]),
        ([[], [1152]], ["slice.l4.n384 384 1152", "slice.l4.n1152 1152"]),
    ],
    ids=["both at once", "stopped at the second", "stopped at the first"],
)
def test_every_length_gets_its_turn(
    root: Path, monkeypatch: pytest.MonkeyPatch, finished: list[list[int]], expected: list[str]
) -> None:
    parts = import_module("parts")
    run, started, turns = parts.Run(root, dict(parts.LIMITS)), [], iter(finished)
    (root / "results" / "slice.l4.n384.json").write_text("of an earlier run")

    def start(label: str, script: str, kind: str, layers: str, weights: Path, *rest: int) -> bool:
        started.append(" ".join([label, *map(str, rest)]))
        assert (script, kind, layers) == ("slice.py", "slice", "4")
        assert label.split(".")[0] in run.limits
        for length in next(turns):
            (run.results / f"{kind}.l{layers}.n{length}.json").write_text("{}")
        return True

    monkeypatch.setattr(run, "old_python", start)
    monkeypatch.setattr(run, "new_python", lambda *arguments: True)
    parts.ACTIONS["slice"](run, "4")
    assert started == expected


def test_one_length_and_shared_weights(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = import_module("parts")
    run, calls = parts.Run(root, dict(parts.LIMITS)), []
    for name in ("old_python", "new_python"):
        monkeypatch.setattr(run, name, lambda *arguments: calls.append(arguments) or True)
    parts.ACTIONS["shared"](run, "32", "n1152")
    weights = root / "weights" / "32"
    assert calls == [
        ("weights.l32", "peers.py", "weights", "shared.32", weights),
        ("shared.l32.n1152", "slice.py", "shared", "32", weights, 1152),
    ]


# --- what is left in $OUT, and what is taken from the payload ---


@pytest.fixture
def run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = import_module("run")
    monkeypatch.setattr(module, "OUT", tmp_path / "out")
    monkeypatch.setattr(module, "device_name", lambda: "NVIDIA H200")
    (tmp_path / "out").mkdir()
    (root / "worker.log").write_text("log")
    return module


def test_the_result_names_commit_and_versions(
    run: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "COMMIT").write_text("packed\n")
    part = {"metrics": {"m": 1.5}, "details": {"d": 1}, "versions": {"torch": "2.11"}}
    (root / "results" / "peers.l4.json").write_text(json.dumps(part))
    commits = []
    for told in ("", "told"):
        monkeypatch.setenv("LACACHE_TRT_COMMIT", told)
        run.collect(root)
        content = json.loads((tmp_path / "out" / "trt85.json").read_text())
        commits.append(content["commit"])
    assert commits == ["packed", "told"]
    assert content["versions"]["tensorrt"] == "8.5.3.1"
    assert content["versions"]["torch"] == "2.11"
    assert content["versions"]["python"]
    assert content["metrics"] == {"m": 1.5}
    assert content["details"]["peers.l4"] == {"d": 1}


def test_tactics_and_small_plans_are_kept(run: Any, root: Path, tmp_path: Path) -> None:
    (root / "work" / "timing.cache").write_bytes(b"tactics")
    for name, size in {"small": 100, "large": run.PLANS_BYTES}.items():
        engine = root / "work" / name / "engine"
        engine.mkdir(parents=True)
        with open(engine / "reuse.plan", "wb") as file:
            file.truncate(size)
    run.collect(root)
    out = tmp_path / "out"
    assert (out / "timing" / "timing.cache").read_bytes() == b"tactics"
    facts = json.loads((out / "timing" / "timing.json").read_text())
    assert facts == {"device": "NVIDIA H200", "tensorrt": "8.5.3.1"}
    assert [path.name for path in out.glob("plans.*")] == ["plans.small.tar"]
    with tarfile.open(out / "plans.small.tar") as tar:
        assert tar.getnames() == ["reuse.plan"]
    assert len([path for path in out.rglob("*") if path.is_file()]) <= 8


@pytest.mark.parametrize("there", [False, True], ids=["fresh machine", "warm machine"])
@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA H100"])
def test_packed_tactics_serve_the_same_gpu_model_only(
    run: Any, root: Path, tmp_path: Path, device: str, there: bool
) -> None:
    prepare = import_module("prepare")
    (tmp_path / "timing.cache").write_bytes(b"packed")
    (tmp_path / "timing.json").write_text(json.dumps({"device": device, "tensorrt": "8.5.3.1"}))
    prepare.copy_timing_cache(tmp_path, root / "timing")
    cache = root / "work" / "timing.cache"
    if there:
        cache.write_bytes(b"fresher")
    run.take_timing_cache(root)
    packed = b"packed" if device == "NVIDIA H200" else None
    expected = b"fresher" if there else packed
    assert (cache.read_bytes() if cache.exists() else None) == expected


def test_tactics_of_another_tensorrt_are_not_packed(root: Path, tmp_path: Path) -> None:
    prepare = import_module("prepare")
    (tmp_path / "timing.json").write_text(json.dumps({"device": "d", "tensorrt": "8.6.1"}))
    with pytest.raises(SystemExit, match=r"8\.6\.1"):
        prepare.copy_timing_cache(tmp_path, root / "timing")
