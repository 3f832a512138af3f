"""`cache="prefix"` and `"dual"` on the TensorRT engine, over a simulated TensorRT and GPU.

Truth is the ONNX Runtime engine, which runs the same graphs without lanes, pads and copies.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from built import Built
from canvases import Shape, block_tokens, bounded, greedy
from fake_device import FakeDevice
from hypothesis import given
from trt_engines import ALL, NAME, PROFILE, WIDE, fakes, open_engine, prompts, write_engine
from trt_windows import CASE, Engines, Pair, commit, kept_of, opened, prepared, run
from window_cases import WindowShape, windows

from lacache_trt.artifacts import Manifest
from lacache_trt.engines.tensorrt.engine import TensorRTEngine, load
from lacache_trt.errors import EngineError, InvalidRequestError
from lacache_trt.generation import GenerationConfig
from lacache_trt.verify import random_batch, verify_engine
from lacache_trt.verify_sizes import Sizes
from lacache_trt.verify_window import window_checks

STEPS = "B=1:2:4,N=16:64:192,Bk=1:8:32,W=1:8:192,S=1:1:16,E=1:1:16,R=0:0:32"


@pytest.fixture
def built(models: Callable[[str], Built]) -> Built:
    return models(NAME)


@pytest.fixture
def manifest(built: Built, tmp_path: Path) -> Manifest:
    return write_engine(built, tmp_path / "engine", WIDE, graphs=ALL)


@pytest.fixture(scope="module")
def shared(
    models: Callable[[str], Built], tmp_path_factory: pytest.TempPathFactory
) -> TensorRTEngine:
    """One engine for many random cases."""
    folder = tmp_path_factory.mktemp("windows") / "engine"
    return open_engine(models(NAME), write_engine(models(NAME), folder, STEPS, graphs=ALL))[0]


# --- whole generations ---


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"block_length": 4},
        {"block_length": 16},
        {"temperature": 0.8, "seed": 5},
        {"cfg_scale": 1.0},
        {"policy": "threshold", "threshold": 0.5, "suffix": "dpad", "suffix_window": 5},
        {"policy": "threshold", "threshold": 0.6, "refresh_every": 2},
        {"policy": "threshold", "threshold": 0.5, "eos_truncation": 0.01, "eos_guard": 8},
        {"policy": "maskgit_plus", "top_k": 5, "temperature": 0.7},
        {"name": "dream"},
    ],
    ids=["8", "4", "16", "noise", "guidance", "dpad", "refresh", "eos", "logits", "shifted"],
)
def test_generations_equal_the_onnxruntime_engine(
    models: Callable[[str], Built],
    engines: Engines,
    tmp_path: Path,
    cache: Any,
    settings: dict[str, Any],
) -> None:
    """Batches of rows of different lengths."""
    built = models(settings.get("name", NAME))
    manifest = write_engine(built, tmp_path / "engine", WIDE, graphs=ALL)
    engine, trt, device = open_engine(built, manifest)
    chosen: dict[str, Any] = {"block_length": 8, "steps": 16, "cache": cache, **settings}
    chosen.pop("name", None)
    config = GenerationConfig(gen_length=16, **chosen)
    batch = prompts(engine.config.vocab_size)[: 2 if config.cfg_scale > 0 else 3]
    assert run(engine, batch, config) == run(engines(built.name), batch, config)
    assert trt.engines["window"].contexts
    assert device.boxes > 0
    engine.close()
    assert (device.closed, device.pins) == (True, 0)


def test_verify_checks_windows(
    built: Built, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lacache_trt.verify as verify

    open_directory = verify.load_engine

    def load_any(found: Manifest) -> Any:
        own = found.body["engine"] == "tensorrt"
        return load(found, *fakes(built, found)) if own else open_directory(found)

    monkeypatch.setattr(verify, "load_engine", load_any)
    report = verify_engine(manifest.directory, bundle=built.bundle)
    assert report.passed
    assert sum("window" in check.name for check in report.checks) == 3


@pytest.mark.parametrize(("widest", "expected"), [(80, 3), (9, 2), (5, 0)])
def test_verify_leaves_out_windows_beyond_the_profile(
    built: Built, tmp_path: Path, widest: int, expected: int
) -> None:
    """Windows of 9 (the block and the column before it) and of more, to the end."""
    profile = f"{PROFILE},W=1:2:{widest}"
    manifest = write_engine(built, tmp_path / "e", profile, graphs=ALL)
    engine, _, _ = open_engine(built, manifest)
    sizes = Sizes.of(manifest)
    batches = [random_batch(engine.config, sizes, 8)]
    checks = window_checks(engine, batches, 1e-4, sizes.window)
    assert all(check.passed for check in checks)
    assert len([check for check in checks if "window" in check.name]) == expected
    engine.close()


# --- single steps ---


@bounded(15)
@given(case=windows())
def test_kept_caches_after_each_step(
    shared: TensorRTEngine, engines: Engines, case: WindowShape
) -> None:
    """Windows of any width, with pads, before and behind the block."""
    config, shape, block = shared.config, case.shape, case.shape.block_columns
    canvas, sampling = shape.canvas(config), greedy(shape.rows, config)
    pair = Pair(shared.session(), engines(NAME).session(), canvas, exact=False)
    rng = np.random.default_rng(shape.seed)
    for session in (pair.found, pair.expected):
        session.fill(canvas, block)
    pair.call("reuse_kv", block_tokens(canvas, block), sampling, block)
    for _ in range(2):
        commit(canvas, block, rng, config.mask_id)
        pair.call("window", case.tokens(canvas), case.columns, block, sampling, block)
    for session in (pair.found, pair.expected):
        session.close()


def test_without_pads_the_bits_are_the_same(shared: TensorRTEngine, engines: Engines) -> None:
    """A canvas of 64 columns and windows of the block's width: the same shapes as there."""
    shape = Shape(64, 8, (16, 24, 40), (0, 3, 9), (64, 60, 64), 3)
    config, block = shared.config, shape.block_columns
    canvas, sampling = shape.canvas(config), greedy(3, config)
    pair = Pair(shared.session(), engines(NAME).session(), canvas, exact=True)
    for session in (pair.found, pair.expected):
        session.fill(canvas, block)
    pair.call("reuse_kv", block_tokens(canvas, block), sampling, block)
    for seed in range(3):
        commit(canvas, block, np.random.default_rng(seed), config.mask_id)
        pair.call("window", block_tokens(canvas, block), block, block, sampling, block)
    before = kept_of(pair.found)
    pair.call("reuse_kv", block_tokens(canvas, block), sampling, block)
    assert (kept_of(pair.found)["keys"] != before["keys"]).any()
    pair.found.close()


def test_repeated_rows_are_not_copied(built: Built, tmp_path: Path, engines: Engines) -> None:
    """A batch of 2 where the profile has 4: two copies a row and step, and the same K and V."""
    profile = WIDE.replace("B=1:2:4", "B=4")
    written = write_engine(built, tmp_path / "e", profile, graphs=ALL)
    engine, _, device = open_engine(built, written)
    canvas, block, sampling = prepared(engine)
    pair = Pair(engine.session(), engines(NAME).session(), canvas, exact=False)
    for session in (pair.found, pair.expected):
        session.fill(canvas, block)
    pair.call("reuse_kv", block_tokens(canvas, block), sampling)
    commit(canvas, block, np.random.default_rng(0), engine.config.mask_id)
    pair.call("window", CASE.tokens(canvas), CASE.columns, block, sampling)
    assert device.boxes == 2 * 2
    assert kept_of(pair.found)["keys"].shape[1] == 4


# --- errors ---


def test_misuse_is_refused(built: Built, manifest: Manifest) -> None:
    engine, trt, _ = open_engine(built, manifest)
    canvas, block, sampling = prepared(engine)
    session, columns, tokens = engine.session(), CASE.columns, CASE.tokens(canvas)
    with pytest.raises(EngineError, match="reuse_kv was called before fill"):
        session.reuse_kv(block_tokens(canvas, block), sampling)
    with pytest.raises(EngineError, match="window was called before fill"):
        session.window(tokens, columns, block, sampling)
    session.fill(canvas, block)
    with pytest.raises(EngineError, match="before reuse_kv"):
        session.window(tokens, columns, block, sampling)
    session.reuse_kv(block_tokens(canvas, block), sampling)
    assert {"keys", "values"} <= set(session.cache_arrays())
    holed = columns.copy()
    holed[0, 1] += 1
    with pytest.raises(InvalidRequestError, match="row 0 are not a run"):
        session.window(tokens, holed, block, sampling)
    with pytest.raises(InvalidRequestError, match="row 1 are not a run"):
        session.window(tokens, np.where(columns < 0, columns, columns + 12), block, sampling)
    with pytest.raises(InvalidRequestError, match="block_columns of row 1"):
        session.window(tokens, columns, block + np.array([[0], [20]], np.int32), sampling)
    with pytest.raises(InvalidRequestError, match="logit_columns of row 0"):
        session.window(tokens, columns, block, sampling, block - 3)
    with pytest.raises(InvalidRequestError, match="differ"):
        session.window(tokens[:, :-1], columns, block, sampling)
    with pytest.raises(InvalidRequestError, match="differ"):
        session.window(tokens[0], columns[0], block, sampling)
    one = greedy(1, engine.config)
    with pytest.raises(EngineError, match="another number of rows"):
        session.window(tokens[:1], columns[:1], block[:1], one)
    trt.failures["window"] = True
    with pytest.raises(EngineError, match="words of TensorRT"):
        session.window(tokens, columns, block, sampling)
    session.window(tokens, columns, block, sampling)
    trt.failures["reuse-kv"] = True
    session.fill(canvas, block)
    assert "keys" not in session.cache_arrays()
    with pytest.raises(EngineError, match="before reuse_kv"):
        session.window(tokens, columns, block, sampling)


@pytest.mark.parametrize("graphs", [("fill", "reuse"), ("fill", "reuse", "window")])
def test_an_engine_without_the_plans(built: Built, tmp_path: Path, graphs: tuple[str, ...]) -> None:
    manifest = write_engine(built, tmp_path / "e", WIDE, graphs=graphs)
    engine, trt, _ = open_engine(built, manifest)
    assert engine.capabilities.caches == {"exact"}
    assert set(trt.engines) == {"fill", "reuse"}
    session, canvas, block, sampling = opened(engine)
    with pytest.raises(InvalidRequestError, match=r"build \.\.\. --cache exact,kv"):
        session.reuse_kv(block_tokens(canvas, block), sampling)
    with pytest.raises(InvalidRequestError, match="no graphs for approximate caches"):
        session.window(CASE.tokens(canvas), CASE.columns, block, sampling)
    config = GenerationConfig(gen_length=8, block_length=8, steps=8, cache="dual")
    with pytest.raises(
        InvalidRequestError, match="built without the graphs of cache='dual'"
    ) as caught:
        run(engine, [[5]], config)
    assert "lacache-trt export ... --cache exact,kv" in str(caught.value.fix)
    assert "lacache-trt build ... --cache exact,kv" in str(caught.value.fix)
    none = GenerationConfig(gen_length=8, block_length=8, steps=8, cache="none")
    with pytest.raises(InvalidRequestError, match="no cache='none'"):
        run(engine, [[5]], none)


def test_the_plans_are_there(built: Built, manifest: Manifest) -> None:
    engine, trt, device = open_engine(built, manifest)
    assert isinstance(device, FakeDevice)
    assert engine.capabilities.caches == {"exact", "prefix", "dual"}
    assert set(trt.engines) == set(ALL)
