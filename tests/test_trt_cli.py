"""Choosing, planning, building and inspecting TensorRT engines from the command line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from built import Built
from click.testing import Result
from synthetic import make_llada
from typer.testing import CliRunner

from lacache_trt.artifacts import load_manifest
from lacache_trt.cli.main import app
from lacache_trt.doctor_tensorrt import tensorrt_abilities
from lacache_trt.engines import registry
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.engines.tensorrt.share_weights import LARGE
from lacache_trt.errors import InvalidRequestError, MissingDependencyError
from lacache_trt.export.exporter import export_bundle
from lacache_trt.export.options import ExportOptions
from lacache_trt.gpus import Gpu, GpuReport
from lacache_trt.plugins import library
from lacache_trt.plugins.abi import abi_text

TENSORRT_RTX = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="TensorRT-RTX is not installed"
)
PROFILE = "B=1:1:2,N=64:64:128,Bk=32"
RTX = ("--engine", "tensorrt-rtx", "--sm", 89)
L40S = Gpu("NVIDIA L40S", "8.9", 48 * 2**30)
H100 = Gpu("NVIDIA H100", "9.0", 80 * 2**30)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def with_machine(patch: pytest.MonkeyPatch, packages: set[str], *gpus: Gpu) -> None:
    report = GpuReport("580", "13.0", gpus, None if gpus else "no NVIDIA driver")
    patch.setattr(registry, "find_gpus", lambda: report)
    patch.setattr(registry, "_installed", lambda name: name in packages)
    patch.setattr(registry.EngineEntry, "load_problem", lambda entry: None)
    patch.setattr(registry.EngineEntry, "version", lambda entry: "11.4.0")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trt-cli")
    checkpoint = make_llada(
        folder / "model", hidden=256, heads=4, ffn=384, layers=2, vocab=197, tokenizer=True
    )
    options = ExportOptions(dtype="float16", validate="off", cache="exact")
    export_bundle(str(checkpoint), folder / "bundle", options)
    return folder / "bundle"


# --- which engine ---

BOTH = {"tensorrt_bindings", "tensorrt_rtx_bindings"}
CUDA = {"torch", "triton", "onnxruntime", "pycuda", "cuda.bindings"}


@pytest.mark.parametrize(
    ("packages", "gpus", "chosen"),
    [
        (BOTH, (H100,), "tensorrt"),
        (BOTH, (L40S,), "tensorrt"),
        ({"tensorrt_rtx"}, (L40S,), "tensorrt-rtx"),
        ({"tensorrt_rtx"}, (H100, L40S), "tensorrt-rtx"),
    ],
)
def test_auto_takes_what_this_machine_can_use(
    monkeypatch: pytest.MonkeyPatch, packages: set[str], gpus: tuple[Gpu, ...], chosen: str
) -> None:
    with_machine(monkeypatch, packages, *gpus)
    assert registry.resolve_for_build("auto").name == chosen


@pytest.mark.parametrize(
    ("packages", "gpus", "words"),
    [
        (BOTH, (), "no NVIDIA driver"),
        ({"tensorrt_rtx"}, (H100,), "does not support sm_90"),
        ({"onnxruntime", "torch", "triton"}, (H100,), "tensorrt is not installed"),
    ],
)
def test_auto_names_the_other_choices(
    monkeypatch: pytest.MonkeyPatch, packages: set[str], gpus: tuple[Gpu, ...], words: str
) -> None:
    with_machine(monkeypatch, packages, *gpus)
    with pytest.raises(MissingDependencyError, match=words) as caught:
        registry.resolve_for_build("auto")
    assert "pip install tensorrt" in str(caught.value)
    assert ("--engine tensorrt-rtx --sm" in str(caught.value)) is ("tensorrt_rtx" in str(packages))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("engine", "packages", "gpus", "usable"),
    [
        ("tensorrt", BOTH | CUDA, (), "onnxruntime"),
        ("tensorrt", CUDA, (L40S,), "cuda or onnxruntime"),
        ("tensorrt", CUDA | {"tensorrt_rtx"}, (L40S,), "tensorrt-rtx or cuda or onnxruntime"),
        ("tensorrt-rtx", BOTH | CUDA, (), "onnxruntime"),
        ("tensorrt-rtx", BOTH | CUDA, (H100,), "tensorrt or cuda or onnxruntime"),
        ("tensorrt-rtx", BOTH | {"onnxruntime"}, (H100,), "onnxruntime"),
        ("cuda", BOTH | {"torch", "onnxruntime"}, (), "onnxruntime"),
        ("cuda", BOTH | CUDA - {"torch"}, (L40S,), "tensorrt or tensorrt-rtx or onnxruntime"),
        ("auto", CUDA, (H100,), "cuda or onnxruntime"),
        ("auto", CUDA, (), "onnxruntime"),
        ("onnxruntime", set(), (), None),
    ],
)
def test_only_engines_that_this_machine_can_use_are_suggested(
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    packages: set[str],
    gpus: tuple[Gpu, ...],
    usable: str | None,
) -> None:
    with_machine(monkeypatch, packages, *gpus)
    with pytest.raises(MissingDependencyError) as caught:
        registry.resolve_for_build(engine)
    fix = str(caught.value.fix)
    if usable is None:
        assert "choose" not in fix
    else:
        assert fix.endswith(f" choose --engine {usable}")


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_the_legacy_target_names_its_own_release(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    command = ("build", bundle, tmp_path / "out", "--engine", "tensorrt", "--trt-version", "8.5")
    for packages in ({"tensorrt_bindings"}, set()):
        with_machine(monkeypatch, packages, L40S)
        result = invoke(*command, *flags)
        assert result.exit_code == 3
        assert "pip install tensorrt==8.5.3.1 (Python 3.10)" in result.stderr
        assert ("tensorrt 11.4.0" in result.stderr) is bool(packages)
    with_machine(monkeypatch, {"tensorrt_bindings"}, L40S)
    monkeypatch.setattr(registry.EngineEntry, "load_problem", lambda entry: "it does not load")
    assert "pip install tensorrt==8.5.3.1" in invoke(*command, *flags).stderr
    monkeypatch.undo()
    with_machine(monkeypatch, {"tensorrt_bindings"}, L40S)
    monkeypatch.setattr(registry.EngineEntry, "version", lambda entry: "8.5.3.1")
    registry.require_legacy("8.5")


@pytest.mark.skipif(
    find_spec("tensorrt_bindings") is None, reason="TensorRT's bindings are not installed"
)
@TENSORRT_RTX
def test_auto_goes_on_where_tensorrt_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings are here without TensorRT's libraries: importing them fails for real."""
    monkeypatch.setattr(registry, "find_gpus", lambda: GpuReport("580", "13.0", (L40S,), None))
    assert registry.resolve_for_build("auto").name == "tensorrt-rtx"
    with pytest.raises(MissingDependencyError, match="does not load") as caught:
        registry.resolve_for_build("tensorrt")
    for text in ("libnv", "pip install tensorrt", "onnxruntime"):
        assert text in str(caught.value)
    monkeypatch.setattr(registry, "find_gpus", lambda: GpuReport("580", "13.0", (H100,), None))
    with pytest.raises(MissingDependencyError, match="sm_90") as caught:
        registry.resolve_for_build("auto")
    assert "does not load" in str(caught.value)


def test_a_tensorrt_that_is_too_old_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with_machine(monkeypatch, {"tensorrt"}, H100)
    for version, good in (("8.5.3.1", False), ("10.9.0", False), ("10.15.1", True), ("11.4", True)):
        monkeypatch.setattr(registry.EngineEntry, "version", lambda entry, found=version: found)
        if good:
            assert registry.resolve_for_build("auto").name == "tensorrt"
        else:
            with pytest.raises(MissingDependencyError, match=r"older than 10\.15"):
                registry.resolve_for_build("auto")


def test_cuda_without_a_gpu_says_so_before_it_names_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_machine(monkeypatch, {"torch"})
    with pytest.raises(MissingDependencyError, match="needs an NVIDIA GPU") as caught:
        registry.resolve_for_build("cuda")
    assert str(caught.value.got).startswith("no NVIDIA driver; missing triton")
    with_machine(monkeypatch, {"torch"}, H100)
    with pytest.raises(MissingDependencyError, match="not installed"):
        registry.resolve_for_build("cuda")


def test_a_named_engine_is_for_this_machine_unless_sm_names_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_machine(monkeypatch, BOTH)
    for name in ("tensorrt", "tensorrt-rtx"):
        with pytest.raises(MissingDependencyError, match="--sm 89"):
            registry.resolve_for_build(name)
    assert registry.resolve_for_build("tensorrt-rtx", 89).name == "tensorrt-rtx"
    with pytest.raises(MissingDependencyError, match="no NVIDIA driver"):
        registry.resolve_for_build("tensorrt", 90)


@pytest.mark.parametrize("arguments", [(), ("--engine", "tensorrt"), ("--engine", "tensorrt-rtx")])
def test_build_exits_3_where_it_cannot_be_used(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    with_machine(monkeypatch, BOTH | {"onnxruntime"})
    result = invoke("build", bundle, tmp_path / "out", *arguments)
    assert result.exit_code == 3
    assert "onnxruntime" in result.stderr
    assert not list(tmp_path.iterdir())


def test_options_of_tensorrt_are_refused_elsewhere(bundle: Path, tmp_path: Path) -> None:
    for flags in (("--sm", 89), ("--no-plugins",), ("--weights", "shared"), ("--profile", "B=1")):
        result = invoke("build", bundle, tmp_path / "out", "--engine", "onnxruntime", *flags)
        assert result.exit_code == 2, flags
    assert invoke("build", bundle, tmp_path, "--engine", "cuda", "--dry-run").exit_code == 2
    with pytest.raises(InvalidRequestError, match="weights"):
        TensorRTOptions(weights="elsewhere")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="sm"):
        BuildOptions(tensorrt=TensorRTOptions(sm=7))


# --- what is missing or wrong ---


def refused_build(bundle: Path, folder: Path, *flags: object) -> str:
    """What a build says that cannot be made; it leaves nothing behind."""
    before = sorted(folder.iterdir())
    result = invoke("build", bundle, folder / "out", *RTX, *flags)
    assert result.exit_code == 3, result.output
    assert sorted(folder.iterdir()) == before
    return result.stderr


@TENSORRT_RTX
def test_a_build_that_cannot_be_made_leaves_nothing_and_a_usable_process(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = tmp_path / "no-headers"
    headers.mkdir()
    assert "make plugin-headers" in refused_build(bundle, tmp_path, "--include", headers)
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        words = refused_build(bundle, tmp_path)
        assert "no-such-compiler" in words
        assert "apt-get install g++" in words
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_installed", lambda name: False)
        assert "pip install tensorrt-rtx" in refused_build(bundle, tmp_path)
    assert invoke("build", bundle, tmp_path / "out", *RTX, "--dry-run").exit_code == 0


@TENSORRT_RTX
def test_a_bundle_of_a_newer_schema_is_refused(bundle: Path, tmp_path: Path) -> None:
    newer = tmp_path / "newer"
    shutil.copytree(bundle, newer)
    manifest = json.loads((newer / "manifest.json").read_text())
    manifest["schema_version"] += 1
    (newer / "manifest.json").write_text(json.dumps(manifest))
    words = refused_build(newer, tmp_path)
    assert str(manifest["schema_version"]) in words
    assert "fix:" in words


def test_a_tensorrt_that_is_too_old_builds_nothing(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from lacache_trt.engines.tensorrt import building

    old = SimpleNamespace(__version__="10.3.0")
    monkeypatch.setattr(building, "import_tensorrt", lambda flavour: old)
    options = TensorRTOptions(sm=90)
    with pytest.raises(MissingDependencyError, match=r"10\.3\.0 is older(.|\n)*--trt-version 8\.5"):
        building.resolve_build(load_manifest(bundle), "tensorrt", options)


def test_an_engine_without_its_packages_is_refused_when_opened(
    models: Callable[[str], Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trt_engines import write_engine

    directory = write_engine(models("llada"), tmp_path / "e").directory
    with_machine(monkeypatch, {"onnxruntime"}, H100)
    result = invoke("generate", directory, "--tokens", "5 6 7")
    assert result.exit_code == 3
    assert "pip install tensorrt" in result.stderr
    assert "choose --engine onnxruntime\n" in result.stderr


# --- dry run, build, inspect ---


@TENSORRT_RTX
def test_dry_run_builds_nothing(bundle: Path, tmp_path: Path) -> None:
    call = ("build", bundle, tmp_path / "out", *RTX, "--profile", PROFILE, "--dry-run")
    embedded, shared = (
        json.loads(invoke(*call, "--weights", kind, "--json").stdout)
        for kind in ("embedded", "shared")
    )
    model = load_manifest(bundle).model
    (memory,) = embedded["memory"]
    assert memory["caches"] == 2 * 128 * model.cache_bytes_per_token(2)
    assert memory["weights"] > shared["memory"][0]["weights"]
    assert embedded["plugins"]["AttentionFill"] == embedded["plugins"]["AttentionReuse"] == 1
    assert len(embedded["precision"]) == model.num_layers + 3
    text = invoke(*call, "--no-plugins").stdout
    assert "none" in text
    assert "estimates" in text
    assert not (tmp_path / "out").exists()


@TENSORRT_RTX
def test_dry_run_lists_what_approximate_caches_keep(tmp_path: Path) -> None:
    checkpoint = make_llada(
        tmp_path / "model", hidden=256, heads=4, ffn=384, layers=3, vocab=197, tokenizer=True
    )
    export_bundle(
        str(checkpoint), tmp_path / "bundle", ExportOptions(dtype="float16", validate="off")
    )
    profiles = ("--profile", PROFILE + ",W=8:8:40", "--profile", PROFILE + ",W=1000")
    call = ("build", tmp_path / "bundle", tmp_path / "out", *RTX, *profiles, "--dry-run")
    exact, kept = (
        json.loads(invoke(*call, "--cache", cache, "--json").stdout)["memory"]
        for cache in ("exact", "exact,kv")
    )
    model = load_manifest(tmp_path / "bundle").model
    column = 2 * 2 * 3 * 2 * model.num_kv_heads * model.head_dim  # K and V, float16, layers, rows
    assert [(each["kept"], each["window"]) for each in exact] == [(0, 0)] * 2
    assert [each["kept"] for each in kept] == [column * 128] * 2
    assert [each["window"] for each in kept] == [column * 40, column * 128]  # no wider than N
    heading = "weights +caches +kept K and V +window K and V +activations"
    assert re.search(heading, invoke(*call, "--cache", "exact,kv").stdout)
    assert "K and V" not in invoke(*call, "--cache", "exact").stdout


@TENSORRT_RTX
def test_build_and_inspect(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ("--profile", PROFILE, "--profile", "B=4,N=128,Bk=32", "--weights", "shared")
    built = invoke("build", bundle, out, *RTX, *flags, "--json")
    assert built.exit_code == 0, built.stderr
    report = json.loads(built.stdout)
    assert report["engine"] == "tensorrt-rtx"
    manifest = load_manifest(out, "engine")
    assert {"fill.plan", "reuse.plan", "weights.safetensors"} <= set(manifest.files)
    assert {"tokenizer.json", "text.json"} <= set(manifest.files)
    found = json.loads(invoke("inspect", out, "--json").stdout)
    assert found["plugin_abi"] == abi_text()
    assert found["weights"] == "shared"
    assert (len(found["profiles"]), found["sm"]) == (2, 89)
    assert found["tensorrt"].startswith("1.")
    shared = manifest.body["shared_weights"]
    assert "embed.weight" in shared["fill"]  # type: ignore[index]
    assert set(shared["fill"]) < set(shared["reuse"])  # type: ignore[index]
    embedded = tmp_path / "embedded"
    assert invoke("build", bundle, embedded, *RTX, *flags[:-2]).exit_code == 0
    saved = (embedded / "reuse.plan").stat().st_size - (out / "reuse.plan").stat().st_size
    assert saved > 0.8 * manifest.path("weights.safetensors").stat().st_size
    text = invoke("inspect", out).stdout
    assert all(word in text for word in ("plugin ABI", "reuse.plan", "4:4:4"))
    missing = invoke("inspect", out, "--layers")
    assert (missing.exit_code, "layer report" in missing.stderr) == (3, True)
    assert invoke("generate", out, "hello").exit_code == 3


@TENSORRT_RTX
def test_small_weights_stay_in_the_plan(bundle: Path) -> None:
    import onnx

    from lacache_trt.engines.tensorrt.graphs import prepare_graph

    path = load_manifest(bundle).path("reuse.onnx")
    plain = onnx.load_from_string(prepare_graph(path, 89))
    shared = onnx.load_from_string(prepare_graph(path, 89, True))
    names = [value.name for value in shared.graph.input][len(plain.graph.input) :]
    assert names
    assert {each.name for each in plain.graph.initializer} - set(names) == {
        each.name for each in shared.graph.initializer
    }
    for tensor in shared.graph.initializer:
        lengths = [int(each.value) for each in tensor.external_data if each.key == "length"]
        assert all(length < LARGE for length in lengths)


def test_layer_reports_are_printed(models: Callable[[str], Built], tmp_path: Path) -> None:
    from trt_engines import write_engine

    from lacache_trt.artifacts import write_manifest

    manifest = write_engine(models("llada"), tmp_path / "e")
    (manifest.directory / "reuse.layers.json").write_text('{"Layers": ["gemm"]}')
    write_manifest(manifest.directory, "engine", manifest.body)
    report = json.loads(invoke("inspect", manifest.directory, "--layers").stdout)
    assert report == {"reuse": {"Layers": ["gemm"]}}


# --- plugins build, doctor ---


def test_plugins_build(tmp_path: Path) -> None:
    result = json.loads(invoke("plugins", "build", "--out", tmp_path, "--json").stdout)
    assert Path(result["library"]) == tmp_path / library.LIBRARY_NAME
    assert Path(result["library"]).stat().st_size > 10_000
    assert result["plugin_abi"] == abi_text()
    failed = invoke("plugins", "build", "--include", tmp_path)
    assert failed.exit_code == 3
    assert "make plugin-headers" in failed.stderr


def test_a_named_library_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(tmp_path / "mine.so"))
    assert library.find_library() == tmp_path / "mine.so"


def test_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from lacache_trt import doctor_tensorrt as doctor

    monkeypatch.setattr(doctor, "_load", lambda entry: ("tensorrt 11.4", None))

    def abilities(packages: set[str], *gpus: Gpu) -> dict[str, doctor.Ability]:
        with_machine(monkeypatch, packages, *gpus)
        return {each.name: each for each in tensorrt_abilities(registry.find_gpus())}

    found = abilities(set(), H100)
    assert "pip install tensorrt" in str(found["build tensorrt"].fix)
    found = abilities(BOTH, H100)
    assert found["build tensorrt"].works
    assert "pip install pycuda cuda-bindings" in str(found["run tensorrt"].fix)
    assert "another machine" in found["build tensorrt-rtx"].reason
    assert not found["run tensorrt-rtx"].works
    found = abilities(BOTH | {"pycuda", "cuda.bindings"}, L40S)
    assert all(ability.works for ability in found.values())
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiling = abilities(BOTH, L40S)["compile plugins"]
    assert (compiling.works, "g++" in str(compiling.fix)) == (False, True)
