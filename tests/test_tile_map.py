"""The picture in docs/tensorrt.md: its rectangles are exactly the scores that the ops need."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

SCRIPT = Path(__file__).parent.parent / "docs" / "tile_map.py"


@pytest.fixture(scope="module")
def tile_map() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tile_map", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tile_map"] = module
    spec.loader.exec_module(module)
    return module


def counts(length: int, visits: list[object], kinds: set[str]) -> NDArray[np.int64]:
    grid = np.zeros((length, length), np.int64)
    for visit in visits:
        if visit.kind in kinds:  # type: ignore[attr-defined]
            rows, keys = visit.rows, visit.keys  # type: ignore[attr-defined]
            grid[slice(*rows), slice(*keys)] += 1
    return grid


@pytest.mark.parametrize(
    ("low", "high", "start", "block"),
    [(44, 512, 320, 32), (0, 512, 0, 32), (100, 500, 100, 64), (7, 512, 480, 32), (0, 512, 33, 1)],
)
def test_every_needed_score_is_visited_once(
    tile_map: ModuleType, low: int, high: int, start: int, block: int
) -> None:
    canvas = tile_map.Canvas(512, low, high, start, block)
    key = np.arange(512)
    valid = (key >= low) & (key < high)
    inside = (key >= start) & (key < start + block)
    fill = counts(512, tile_map.fill_visits(canvas), {"fill"})
    assert (fill == (valid & ~inside)).all()
    visits = tile_map.reuse_visits(canvas)
    assert (counts(512, visits, {"reuse"}) == inside).all()
    assert (counts(512, visits, {"block"}) == np.outer(inside, valid)).all()


def test_the_picture_is_drawn(tile_map: ModuleType, tmp_path: Path) -> None:
    tile_map.main(tmp_path / "map.svg")
    assert "skipped" in (SCRIPT.with_suffix(".svg")).read_text()
    assert (tmp_path / "map.svg").stat().st_size > 10_000
