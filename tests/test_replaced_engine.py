"""A runtime whose engine directory becomes another one: no graph of the new one is ever opened."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from built import Built

from lacache_trt.errors import ArtifactError, InvalidRequestError
from lacache_trt.generation import GenerationConfig
from lacache_trt.runtime import Runtime

CONFIG = GenerationConfig(gen_length=8, block_length=4, steps=8)
UNCACHED = GenerationConfig(gen_length=8, block_length=4, steps=8, cache="none")
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def engine(models: Callable[[str], Built], tmp_path: Path) -> Path:
    """A copy of a built engine, free to be spoilt."""
    return Path(shutil.copytree(models("llada").engine, tmp_path / "engine"))


def replaced(directory: Path) -> None:
    """The same engine again, as a forced build puts it there: other files of the same sizes."""
    fresh = directory.with_name("fresh")
    shutil.copytree(directory, fresh)
    shutil.rmtree(directory)
    fresh.rename(directory)


def rewritten(directory: Path) -> None:
    weights = directory / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


@pytest.mark.parametrize("change", [replaced, rewritten, shutil.rmtree])
def test_graphs_of_a_changed_directory_are_not_opened(
    engine: Path, change: Callable[[Path], None]
) -> None:
    with Runtime.load(engine) as runtime:
        before = runtime.generate(PROMPT, CONFIG)
        change(engine)
        with pytest.raises(ArtifactError, match="replaced since it was loaded") as caught:
            runtime.generate(PROMPT, UNCACHED)
        assert caught.value.fix == "load it again"
        if change is not rewritten:  # what is open stays what it was
            assert runtime.generate(PROMPT, CONFIG).tokens == before.tokens


def test_a_graph_that_is_open_already_stays(engine: Path) -> None:
    with Runtime.load(engine) as runtime:
        before = runtime.generate(PROMPT, UNCACHED)
        replaced(engine)
        assert runtime.generate(PROMPT, UNCACHED).tokens == before.tokens


def test_the_working_directory_may_change(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(engine.parent)
    with Runtime.load(Path(engine.name)) as runtime:
        monkeypatch.chdir("/")
        assert runtime.generate(PROMPT, UNCACHED).tokens


@pytest.mark.parametrize("prompt", [{"prompt": "x"}, {"a", "b"}, frozenset({"a"})])
def test_what_has_no_order_is_no_batch(engine: Path, prompt: object) -> None:
    with Runtime.load(engine) as runtime, pytest.raises(InvalidRequestError, match="neither text"):
        runtime.generate(prompt, CONFIG)  # type: ignore[arg-type]
