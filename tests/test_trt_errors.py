"""What goes wrong with a TensorRT engine: typed errors, and the process stays usable."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from built import Built
from trt_engines import NAME, fakes, open_engine, write_engine

from lacache_trt.artifacts import Manifest
from lacache_trt.engines.tensorrt.engine import load
from lacache_trt.errors import (
    ArtifactError,
    CapacityError,
    EngineError,
    InvalidRequestError,
    MissingDependencyError,
)
from lacache_trt.generation import GenerationConfig
from lacache_trt.runtime import Runtime


@pytest.fixture
def built(models: Callable[[str], Built]) -> Built:
    return models(NAME)


@pytest.fixture
def manifest(built: Built, tmp_path: Path) -> Manifest:
    return write_engine(built, tmp_path / "engine")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensorrt": "10.15.1"}, r"tensorrt version(.|\n)*10\.15\.1(.|\n)*--force"),
        ({"sm": 89}, r"another GPU(.|\n)*sm_89(.|\n)*sm_90"),
        ({"plugin_abi": "0" * 16}, r"plugin ABI(.|\n)*build it again"),
        ({"profiles": []}, "no optimisation profiles"),
        ({"profiles": [{"B": [1, 1, 1]}]}, "malformed"),
        ({"shared_weights": {"fill": ["embed.weight"]}}, "no file"),
    ],
    ids=["version", "sm", "abi", "no-profiles", "profile", "weights"],
)
def test_directories_of_another_machine_are_refused(
    built: Built, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    manifest = write_engine(built, tmp_path / "e", **changes)
    trt, device = fakes(built, manifest)
    with pytest.raises(ArtifactError, match=words):
        load(manifest, trt, device)
    assert device.closed
    assert not trt.engines


def test_a_truncated_plan_is_refused_before_tensorrt_sees_it(manifest: Manifest) -> None:
    path = manifest.directory / "reuse.plan"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ArtifactError, match=r"reuse\.plan"):
        Runtime.load(manifest.directory)


def test_a_plan_that_tensorrt_refuses_gives_its_words(built: Built, tmp_path: Path) -> None:
    manifest = write_engine(built, tmp_path / "e")
    (manifest.directory / "fill.plan").write_bytes(b"other bytes")
    with pytest.raises(EngineError, match=r"fill\.plan(.|\n)*magic tag"):
        load(manifest, *fakes(built, manifest))


def test_swapped_plans_are_refused(built: Built, tmp_path: Path) -> None:
    manifest = write_engine(built, tmp_path / "e")
    (manifest.directory / "fill.plan").write_bytes(b"reuse")
    with pytest.raises(ArtifactError, match=r"tensors of fill\.plan"):
        load(manifest, *fakes(built, manifest))


def test_a_failing_enqueue_gives_tensorrts_words(built: Built, manifest: Manifest) -> None:
    engine, trt, _ = open_engine(built, manifest)
    trt.failures["reuse"] = True
    config = GenerationConfig(gen_length=8, block_length=8, steps=8)
    with pytest.raises(EngineError, match="words of TensorRT"):
        Runtime(engine).generate([5, 6], config)
    Runtime(engine).generate([5, 6], config)


def test_requests_beyond_the_profile(built: Built, manifest: Manifest) -> None:
    engine, _, _ = open_engine(built, manifest)
    runtime = Runtime(engine)
    with pytest.raises(CapacityError, match="at most 4"):
        runtime.generate([[5]] * 5, GenerationConfig(gen_length=8, block_length=8, steps=8))
    with pytest.raises(CapacityError, match=r"Bk=64(.|\n)*--profile"):
        runtime.generate([5], GenerationConfig(gen_length=64, block_length=64, steps=8))
    config = GenerationConfig(
        gen_length=32, block_length=32, steps=8, policy="maskgit_plus", top_k=3, temperature=1
    )
    with pytest.raises(CapacityError, match="logit columns"):
        runtime.generate([5], config)


def test_there_is_no_plain_graph(built: Built, manifest: Manifest) -> None:
    engine, _, _ = open_engine(built, manifest)
    config = GenerationConfig(gen_length=8, block_length=8, steps=8, cache="none")
    with pytest.raises(InvalidRequestError, match="cache='none'"):
        Runtime(engine).generate([5], config)
    with pytest.raises(InvalidRequestError, match="no plain graph"):
        engine.session().plain(*[None] * 3)  # type: ignore[arg-type]


def test_too_little_memory(built: Built, manifest: Manifest) -> None:
    with pytest.raises(CapacityError, match="does not fit"):
        load(manifest, *fakes(built, manifest, memory=4000))
    trt, device = fakes(built, manifest, memory=20_000)
    engine = load(manifest, trt, device)
    with pytest.raises(CapacityError, match="smaller batch"):
        Runtime(engine).generate([5], GenerationConfig(gen_length=8, block_length=8, steps=8))
    device.memory = 1 << 30
    Runtime(engine).generate([5], GenerationConfig(gen_length=8, block_length=8, steps=8))


def test_a_closed_engine_and_a_session_without_fill(built: Built, manifest: Manifest) -> None:
    engine, _, _ = open_engine(built, manifest)
    with pytest.raises(EngineError, match="before fill"):
        engine.session().reuse(np.zeros((1, 8), np.int32), None)  # type: ignore[arg-type]
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.session()


def test_without_pycuda_the_install_line_is_named(built: Built, manifest: Manifest) -> None:
    trt, _ = fakes(built, manifest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pycuda", None)
        with pytest.raises(MissingDependencyError, match="pip install pycuda cuda-bindings"):
            load(manifest, trt)
