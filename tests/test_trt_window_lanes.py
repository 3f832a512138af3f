"""What the steps of approximate caches take: contexts, captures, widths, memory; simulated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from built import Built
from canvases import block_tokens
from fake_tensorrt import FakeTrt
from trt_engines import ALL, NAME, PROFILE, WIDE, open_engine, write_engine
from trt_windows import CASE, Engines, Pair, commit, kept_of, opened, prepared, run

from lacache_trt.artifacts import Manifest
from lacache_trt.errors import CapacityError, EngineError
from lacache_trt.generation import GenerationConfig


@pytest.fixture
def built(models: Callable[[str], Built]) -> Built:
    return models(NAME)


@pytest.fixture
def manifest(built: Built, tmp_path: Path) -> Manifest:
    return write_engine(built, tmp_path / "engine", WIDE, graphs=ALL)


def widths(trt: FakeTrt) -> list[int]:
    return [each.shapes["window_tokens"][1] for each in trt.engines["window"].contexts]


def test_a_context_and_a_capture_per_width_and_logit_columns(
    built: Built, manifest: Manifest
) -> None:
    engine, trt, device = open_engine(built, manifest)
    session, canvas, block, sampling = opened(engine)
    tokens = block_tokens(canvas, block)
    session.reuse_kv(tokens, sampling)
    assert device.captures == 2
    for _ in range(3):
        session.window(tokens, block, block, sampling)
        session.window(CASE.tokens(canvas), CASE.columns, block, sampling)
        session.window(tokens, block, block, sampling, block)
    assert widths(trt) == [6, 64, 6]
    assert [each.shapes["logit_columns"][1] for each in trt.engines["window"].contexts] == [0, 0, 6]
    assert device.captures == 2 + 3
    assert device.replays == 2 * 3
    assert device.boxes == 9 * 2 * 2
    moved = block + 2  # replayed, yet put at other columns
    before = kept_of(session)["keys"]
    session.window(block_tokens(canvas, moved), moved, moved, sampling)
    assert device.captures == 5
    changed = (kept_of(session)["keys"] != before).any(axis=(0, 2, 4))
    for row, columns in enumerate(moved):
        pads = changed.shape[1] - canvas.tokens.shape[1]
        assert set(np.flatnonzero(changed[row])) <= set((columns + pads).tolist())
        assert changed[row].any()


def test_a_block_narrower_than_that_of_the_fill(
    built: Built, manifest: Manifest, engines: Engines
) -> None:
    """As `eos_truncation` calls it: the whole answer first, then blocks of it."""
    engine, trt, _ = open_engine(built, manifest)
    canvas, answer, sampling = prepared(engine)
    pair = Pair(engine.session(), engines(NAME).session(), canvas, exact=False)
    for session in (pair.found, pair.expected):
        session.fill(canvas, answer)
    pair.call("reuse_kv", block_tokens(canvas, answer), sampling)
    for block in (answer[:, :4], answer[:, 2:], answer):
        commit(canvas, block, np.random.default_rng(0), engine.config.mask_id)
        outputs = pair.call("window", block_tokens(canvas, block), block, block, sampling)
        assert outputs.token.shape == block.shape
    pair.call("window", CASE.tokens(canvas), CASE.columns, answer[:, :4], sampling)
    shapes = [each.shapes for each in trt.engines["window"].contexts]
    assert [each["window_tokens"][1] for each in shapes] == [4, 6, 64]
    assert [each["block_columns"][1] for each in shapes] == [4, 6, 4]


def test_plans_share_the_kept_caches(built: Built, manifest: Manifest) -> None:
    engine, trt, _ = open_engine(built, manifest)
    session, canvas, block, sampling = opened(engine)
    tokens = block_tokens(canvas, block)
    session.reuse_kv(tokens, sampling)
    session.window(tokens, block, block, sampling)
    reuse, window = (trt.engines[name].contexts[0] for name in ("reuse-kv", "window"))
    for name in ("keys", "values"):
        assert reuse.addresses[name] == window.addresses[name] != window.addresses[f"window_{name}"]
    assert reuse.scratch == window.scratch


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [("1:8:192", (6, 64)), ("1:8:50", (6, 50)), ("16:16:192", (16, 64)), ("48", (48, 48))],
)
def test_widths_stay_in_the_profile(
    built: Built, tmp_path: Path, engines: Engines, sizes: str, expected: tuple[int, int]
) -> None:
    written = write_engine(built, tmp_path / "e", f"{PROFILE},W={sizes}", graphs=ALL)
    engine, trt, _ = open_engine(built, written)
    canvas, block, sampling = prepared(engine)
    pair = Pair(engine.session(), engines(NAME).session(), canvas, exact=False)
    for session in (pair.found, pair.expected):
        session.fill(canvas, block)
    tokens = block_tokens(canvas, block)
    pair.call("reuse_kv", tokens, sampling)
    pair.call("window", tokens, block, block, sampling)
    pair.call("window", CASE.tokens(canvas), CASE.columns, block, sampling)
    assert widths(trt) == list(dict.fromkeys(expected))


def test_a_window_wider_than_the_profile(built: Built, tmp_path: Path) -> None:
    """Refused with the `--profile` that helps; with such a profile behind the first it runs."""
    narrow = f"{PROFILE},W=1:6:8"
    engine, _, _ = open_engine(built, write_engine(built, tmp_path / "e", narrow, graphs=ALL))
    session, canvas, block, sampling = opened(engine)
    session.reuse_kv(block_tokens(canvas, block), sampling)
    session.window(block_tokens(canvas, block), block, block, sampling)
    width = CASE.columns.shape[1]
    with pytest.raises(CapacityError, match=rf"W={width}, Bk=6(.|\n)*W=1 to 8(.|\n)*--profile"):
        session.window(CASE.tokens(canvas), CASE.columns, block, sampling)
    session.window(block_tokens(canvas, block), block, block, sampling)
    two = f"{PROFILE},W=9:32:192"
    none = two.replace("R=0:0:16", "R=0")
    assert none != two
    written = write_engine(built, tmp_path / "two", narrow, none, two, graphs=ALL)
    engine, trt, _ = open_engine(built, written)
    session, canvas, block, sampling = opened(engine)
    session.reuse_kv(block_tokens(canvas, block), sampling)
    session.window(CASE.tokens(canvas), CASE.columns, block, sampling)
    session.window(CASE.tokens(canvas), CASE.columns, block, sampling, block)
    assert [each.profile for each in trt.engines["window"].contexts] == [1, 2]
    assert {each.profile for each in trt.engines["reuse-kv"].contexts} == {0}
    columns = np.repeat(block[:, :1], 17, axis=1)
    with pytest.raises(CapacityError, match="logit columns"):
        session.window(CASE.tokens(canvas), CASE.columns, block, sampling, columns)


def test_memory_is_given_back(built: Built, manifest: Manifest) -> None:
    """Kept caches go with their lane, at the latest when another lane needs the memory."""
    engine, _, device = open_engine(built, manifest)
    before = device.free_bytes()
    config = GenerationConfig(gen_length=16, block_length=8, steps=4, cache="prefix")
    run(engine, [[5] * 60], config)
    device.memory -= device.free_bytes() - 1000
    memory = device.memory
    run(engine, [[5]], config)
    used = memory - device.free_bytes()
    engine.close()
    assert device.memory - device.free_bytes() == (1 << 30) - before
    assert device.pins == 0
    other, _, alone = open_engine(built, manifest)
    run(other, [[5]], config)
    assert used == alone.memory - alone.free_bytes()
    other.close()


def test_no_room_for_keys_and_values(built: Built, manifest: Manifest) -> None:
    """Refused with the bytes; the exact caches of the session go on."""
    engine, _, device = open_engine(built, manifest)
    session, canvas, block, sampling = opened(engine)
    tokens = block_tokens(canvas, block)
    expected = session.reuse(tokens, sampling)
    all_memory, used = device.memory, device.memory - device.free_bytes()
    device.memory = used + 100
    live = set(device.live)
    words = r"2 rows and 40 columns \(run as 64\)(.|\n)*100 bytes free(.|\n)*[0-9,]+ bytes\n"
    with pytest.raises(CapacityError, match=words):
        session.reuse_kv(tokens, sampling)
    assert set(device.live) == live
    np.testing.assert_array_equal(session.reuse(tokens, sampling).token, expected.token)
    with pytest.raises(EngineError, match="before reuse_kv"):
        session.window(tokens, block, block, sampling)
    device.memory = all_memory
    held = session.cache_bytes()
    session.reuse_kv(tokens, sampling)
    model = engine.config
    size = 2 * model.num_layers * 2 * model.num_kv_heads * 64 * model.head_dim * 4
    assert session.cache_bytes() == held + size
    device.memory = device.memory - device.free_bytes() + 100
    live = set(device.live)
    with pytest.raises(CapacityError, match="100 bytes free"):
        session.window(tokens, block, block, sampling)
    assert set(device.live) == live
    device.memory = all_memory
    session.window(tokens, block, block, sampling)
