"""The TensorRT engine's own logic, over a TensorRT and a GPU that are simulated."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from built import Built
from fake_tensorrt import FakeContext
from trt_engines import NAME, PROFILE, contexts, fakes, open_engine, prompts, write_engine

from lacache_trt.artifacts import Manifest, load_manifest, write_manifest
from lacache_trt.engines.onnxruntime.engine import OnnxRuntimeEngine
from lacache_trt.engines.tensorrt.engine import load
from lacache_trt.errors import (
    CapacityError,
    InvalidRequestError,
)
from lacache_trt.generation import GenerationConfig, GenerationResult
from lacache_trt.runtime import Runtime
from lacache_trt.verify import verify_engine


@pytest.fixture
def built(models: Callable[[str], Built]) -> Built:
    return models(NAME)


@pytest.fixture
def manifest(built: Built, tmp_path: Path) -> Manifest:
    return write_engine(built, tmp_path / "engine")


# --- whole generations ---


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.8, "seed": 5},
        {"cfg_scale": 1.0},
        {"policy": "maskgit_plus", "top_k": 5, "temperature": 0.7},
    ],
    ids=["greedy", "noise", "guidance", "logits"],
)
def test_generations_equal_the_onnxruntime_engine(
    built: Built,
    manifest: Manifest,
    engines: Callable[[str], OnnxRuntimeEngine],
    settings: dict[str, Any],
) -> None:
    engine, trt, device = open_engine(built, manifest)
    config = GenerationConfig(gen_length=16, block_length=8, steps=16, **settings)
    batch = prompts(engine.config.vocab_size)[: 2 if "cfg_scale" in settings else 3]
    got = Runtime(engine).generate(batch, config)
    expected = Runtime(engines(NAME)).generate(batch, config)
    assert isinstance(got, list)
    assert isinstance(expected, list)
    assert [each.tokens for each in got] == [each.tokens for each in expected]
    assert device.captures == len(contexts(trt))
    assert device.replays > device.captures
    engine.close()
    assert (device.closed, device.pins) == (True, 0)


def test_rows_and_reused_lanes_do_not_mix(
    built: Built, manifest: Manifest, engines: Callable[[str], OnnxRuntimeEngine]
) -> None:
    engine, trt, device = open_engine(built, manifest)
    config = GenerationConfig(gen_length=8, block_length=8, steps=4)
    results = []
    for runtime in (Runtime(engine), Runtime(engines(NAME))):
        for prompt in prompts(engine.config.vocab_size) * 2:
            result = runtime.generate(prompt, config)
            assert isinstance(result, GenerationResult)
            results.append(result.tokens)
    assert results[:6] == results[6:]
    assert len(contexts(trt)) == 2
    assert device.captures == 2


def test_sessions_in_threads_have_lanes_of_their_own(
    built: Built, manifest: Manifest, engines: Callable[[str], OnnxRuntimeEngine]
) -> None:
    engine, _, _ = open_engine(built, manifest)
    config = GenerationConfig(gen_length=16, block_length=8, steps=16)
    batch = prompts(engine.config.vocab_size)
    runtime, found = Runtime(engine), dict[int, Any]()

    def work(index: int) -> None:
        found[index] = runtime.generate(batch[index], config)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reference = Runtime(engines(NAME))
    for index in range(3):
        expected = reference.generate(batch[index], config)
        assert isinstance(expected, GenerationResult)
        assert found[index].tokens == expected.tokens


def test_verify_against_the_bundle(
    built: Built, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lacache_trt.verify as verify

    open_directory = verify.load_engine

    def load_any(found: Manifest) -> Any:
        own = found.body["engine"] == "tensorrt"
        return load(found, *fakes(built, found)) if own else open_directory(found)

    monkeypatch.setattr(verify, "load_engine", load_any)
    with pytest.raises(InvalidRequestError, match="--bundle"):
        verify_engine(manifest.directory)
    assert verify_engine(manifest.directory, bundle=built.bundle).passed
    fixed = "B=1,N=64,Bk=16,S=1,E=1,R=0"
    narrow = write_engine(built, tmp_path / "narrow", fixed)
    report = verify_engine(narrow.directory, bundle=built.bundle)
    assert report.passed
    assert report.checks[-1].figures["rows"] == 1


# --- shapes, addresses, graphs ---


def test_caches_are_bound_in_place(built: Built, manifest: Manifest) -> None:
    engine, trt, _ = open_engine(built, manifest)
    Runtime(engine).generate([5, 6, 7], GenerationConfig(gen_length=8, block_length=8, steps=8))
    fill, reuse = (trt.engines[name].contexts[0] for name in ("fill", "reuse"))
    caches = [spec.name for spec in manifest.contract["fill"].outputs]
    assert caches
    for name in caches:
        assert fill.addresses[name] == reuse.addresses[name]
    assert fill.scratch == reuse.scratch
    assert fill.shapes["tokens"] == (1, 64)
    assert reuse.shapes["block_tokens"] == (1, 8)
    assert (fill.enqueued, reuse.enqueued) == (2, 2)  # once eager, once captured


def test_logit_columns_have_a_context_of_their_own(built: Built, manifest: Manifest) -> None:
    engine, trt, _ = open_engine(built, manifest)
    config = GenerationConfig(
        gen_length=8, block_length=8, steps=4, policy="maskgit_plus", top_k=3, temperature=0.5
    )
    runtime = Runtime(engine)
    runtime.generate([5, 6, 7], config)
    runtime.generate([5, 6, 7], GenerationConfig(gen_length=8, block_length=8, steps=4))
    reads = {each.shapes["logit_columns"][1] for each in trt.engines["reuse"].contexts}
    assert len(reads) == len(trt.engines["reuse"].contexts) == 2


def test_a_context_that_cannot_be_captured_stays_eager(
    built: Built, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FakeContext, "is_stream_capturable", lambda self, stream: False, raising=False
    )
    engine, trt, device = open_engine(built, manifest)
    Runtime(engine).generate([5, 6, 7], GenerationConfig(gen_length=8, block_length=8, steps=8))
    assert (device.captures, device.replays) == (0, 0)
    assert trt.engines["reuse"].contexts[0].enqueued == 8


def test_lengths_of_a_profile_are_reached_by_pads(built: Built, tmp_path: Path) -> None:
    manifest = write_engine(built, tmp_path / "e", PROFILE.replace("16:64:192", "16:64:100"))
    engine, _, _ = open_engine(built, manifest)
    assert [engine.shape_for(1, n, 8).columns for n in (1, 64, 65, 100)] == [64, 64, 100, 100]
    with pytest.raises(CapacityError, match="--profile"):
        engine.shape_for(1, 101, 8)


@pytest.mark.parametrize("rows", ["4", "2:4:6"])
def test_rows_of_a_profile_are_reached_by_repeating_the_last(
    built: Built, tmp_path: Path, engines: Callable[[str], OnnxRuntimeEngine], rows: str
) -> None:
    """Batches of 1 and 3 rows run where a profile has no such batch, with the same tokens."""
    profile = ",".join([f"B={rows}", *PROFILE.split(",")[1:]])
    engine, trt, _ = open_engine(built, write_engine(built, tmp_path / "e", profile))
    config = GenerationConfig(gen_length=16, block_length=8, steps=16)
    batch = prompts(engine.config.vocab_size)
    for count in (1, 3):
        got = Runtime(engine).generate(batch[:count], config)
        expected = Runtime(engines(NAME)).generate(batch[:count], config)
        assert isinstance(got, list)
        assert isinstance(expected, list)
        assert [each.tokens for each in got] == [each.tokens for each in expected]
    low = int(rows[0])
    assert {
        each.shapes["block_tokens"][0] for each in contexts(trt) if "block_tokens" in each.shapes
    } == {
        low,
        max(3, low),
    }
    high = int(rows[-1])
    assert engine.shape_for(high, 64, 8).rows == high
    with pytest.raises(CapacityError, match="--profile"):
        engine.shape_for(high + 1, 64, 8)


def test_memory_is_given_back(built: Built, manifest: Manifest) -> None:
    engine, _, device = open_engine(built, manifest)
    before = len(device.live)
    session = engine.session()
    Runtime(engine).generate([5] * 60, GenerationConfig(gen_length=8, block_length=8, steps=2))
    assert len(device.live) > before
    device.memory = sum(size for _, size in device.live.values()) + 1000
    Runtime(engine).generate([5], GenerationConfig(gen_length=8, block_length=8, steps=2))
    assert device.free_bytes() > 0
    session.close()
    engine.close()
    engine.close()


def test_shared_weights_are_bound_once(built: Built, tmp_path: Path) -> None:
    """The fake executes graphs with weights of their own; what counts are addresses and bytes."""
    from lacache_trt.model.safetensors_file import read_safetensors_header

    shared = {"fill": ["embed.weight"], "reuse": ["embed.weight", "head.weight"]}
    folder = tmp_path / "e"
    weights = (built.engine / "weights.safetensors").read_bytes()
    manifest = write_engine(built, folder)
    (folder / "weights.safetensors").write_bytes(weights)
    body = {key: value for key, value in manifest.body.items() if key != "shared_weights"}
    write_manifest(folder, "engine", {**body, "shared_weights": shared})
    manifest = load_manifest(folder, "engine")
    header = read_safetensors_header(folder / "weights.safetensors")
    trt, device = fakes(built, manifest)
    trt.shared = {
        graph: {name: header[name].shape for name in names} for graph, names in shared.items()
    }
    with load(manifest, trt, device) as engine:
        Runtime(engine).generate([5], GenerationConfig(gen_length=8, block_length=8, steps=8))
        fill, reuse = (trt.engines[name].contexts[0] for name in ("fill", "reuse"))
        address = fill.addresses["embed.weight"]
        assert address == reuse.addresses["embed.weight"] != reuse.addresses["head.weight"]
        tensor = header["embed.weight"]
        assert fill.shapes["embed.weight"] == tensor.shape
        data = weights[tensor.offset : tensor.offset + tensor.nbytes]
        assert device.live[address][0].tobytes().find(data) >= 0


# --- dependencies ---


def test_the_engine_needs_no_torch() -> None:
    script = (
        "import sys\n"
        "absent = ('torch', 'triton', 'onnx', 'onnx_ir', 'safetensors')\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        "import lacache_trt.engines.tensorrt as flavour\n"
        "import lacache_trt.engines.tensorrt.engine\n"
        "print(flavour.load)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
