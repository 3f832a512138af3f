"""Shared fixtures: models built once, engines opened once per worker, their float64 truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from built import FLOAT32, SYNTHETIC, Built, build_once
from reference_model import ReferenceModel, load_reference

from lacache_trt.artifacts import load_manifest
from lacache_trt.engines.builder import load_engine
from lacache_trt.engines.onnxruntime.engine import OnnxRuntimeEngine
from lacache_trt.runtime import Runtime
from lacache_trt.text import TextCodec


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--slow` adds the tests that take more than a minute."""
    parser.addoption("--slow", action="store_true", help="run tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests unless they are asked for."""
    if config.getoption("--slow") or config.getoption("markexpr"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str], Built]:
    """Directories of a configuration of `built`, by name."""
    base = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / "models"
    known: dict[str, Built | Exception] = {}

    def lookup(name: str) -> Built:
        if name not in known:
            try:
                known[name] = build_once(name, shared)
            except Exception as error:  # said again to every test, without exporting again
                known[name] = error
        found = known[name]
        if isinstance(found, Exception):
            raise found
        return found

    return lookup


@pytest.fixture(scope="session")
def engines(models: Callable[[str], Built]) -> Iterator[Callable[[str], OnnxRuntimeEngine]]:
    """Open engines by name; closed at the end."""
    opened: dict[str, OnnxRuntimeEngine] = {}

    def open_engine(name: str) -> OnnxRuntimeEngine:
        if name not in opened:
            engine = load_engine(load_manifest(models(name).engine, "engine"))
            assert isinstance(engine, OnnxRuntimeEngine)
            opened[name] = engine
        return opened[name]

    yield open_engine
    for engine in opened.values():
        engine.close()


@pytest.fixture(scope="session")
def runtimes(
    models: Callable[[str], Built], engines: Callable[[str], OnnxRuntimeEngine]
) -> Callable[[str], Runtime]:
    """Runtimes over the shared engines; a test that closes one loads its own."""

    @cache
    def open_runtime(name: str) -> Runtime:
        return Runtime(engines(name), TextCodec.load(models(name).engine))

    return open_runtime


@pytest.fixture(scope="session")
def references(models: Callable[[str], Built]) -> Callable[[str], ReferenceModel]:
    """transformers' model of the same checkpoint in float64, by name."""
    return cache(lambda name: load_reference(models(name).checkpoint))


@pytest.fixture(scope="session", params=FLOAT32)
def float32_model(request: pytest.FixtureRequest, models: Callable[[str], Built]) -> Built:
    """Each configuration whose bundle is float32."""
    return models(request.param)


@pytest.fixture(scope="session", params=SYNTHETIC)
def model_name(request: pytest.FixtureRequest) -> str:
    """The name of each synthetic configuration."""
    return str(request.param)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """An empty folder of this test."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder
