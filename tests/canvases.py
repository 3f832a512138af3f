"""Random canvases, blocks and sampling inputs, and how results are compared.

Every property test here is derandomised, so that a run of the suite is reproducible;
LACACHE_TRT_TEST_EXAMPLES=N runs N times as many examples with fresh seeds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from lacache_trt.engines.base import Canvas, Int, Sampling
from lacache_trt.model.config import ModelConfig

_FACTOR = int(os.environ.get("LACACHE_TRT_TEST_EXAMPLES", "1"))


def bounded(examples: int) -> settings:
    """Hypothesis settings of a test that costs milliseconds per example."""
    return settings(
        max_examples=examples * _FACTOR,
        deadline=None,
        derandomize=_FACTOR == 1,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@dataclass(frozen=True)
class Shape:
    """What a canvas looks like; the tokens follow from `seed`.

    Attributes:
        length: N.
        width: Bk.
        starts: first block column of each row.
        valid_from: first real column of each row.
        valid_to: one past the last.
        seed: of the tokens.
    """

    length: int
    width: int
    starts: tuple[int, ...]
    valid_from: tuple[int, ...]
    valid_to: tuple[int, ...]
    seed: int

    @property
    def rows(self) -> int:
        """B."""
        return len(self.starts)

    @property
    def block_columns(self) -> Int:
        """int32 [B, Bk]."""
        columns = np.array(self.starts)[:, None] + np.arange(self.width)
        return columns.astype(np.int32)

    def canvas(self, config: ModelConfig, masked: float = 0.5) -> Canvas:
        """Random tokens; this share of each block's columns, and all that follows, is masked."""
        rng = np.random.default_rng(self.seed)
        tokens = rng.integers(0, config.vocab_size, (self.rows, self.length)).astype(np.int32)
        columns = np.arange(self.length, dtype=np.int32)
        block = self.block_columns
        after = columns >= block[:, :1] + self.width
        tokens[after] = config.mask_id
        inside = (columns >= block[:, :1]) & ~after
        tokens[inside & (rng.random(tokens.shape) < masked)] = config.mask_id
        valid_from = np.array(self.valid_from, np.int32)
        positions = np.maximum(columns - valid_from[:, None], 0).astype(np.int32)
        return Canvas(tokens, positions, valid_from, np.array(self.valid_to, np.int32))


@st.composite
def shapes(draw: st.DrawFn, max_rows: int = 3, max_prompt: int = 40) -> Shape:
    """Rows of different lengths at different blocks of 1 to 64 columns, with or without prompt."""
    width = draw(st.integers(1, 64))
    before, after = draw(st.integers(0, max_prompt)), draw(st.integers(0, max_prompt))
    length = before + width + after
    starts, valid_from, valid_to = [], [], []
    for _ in range(draw(st.integers(1, max_rows))):
        start = draw(st.integers(0, length - width))
        starts.append(start)
        valid_from.append(draw(st.integers(0, start)))
        valid_to.append(draw(st.integers(start + width, length)))
    seed = draw(st.integers(0, 2**31 - 1))
    return Shape(length, width, tuple(starts), tuple(valid_from), tuple(valid_to), seed)


def random_shape(seed: int, max_rows: int = 3, max_prompt: int = 40) -> Shape:
    """One of `shapes`, from a seed alone."""
    rng = np.random.default_rng(seed)
    width = int(rng.integers(1, 65))
    length = width + int(rng.integers(0, 2 * max_prompt))
    starts = rng.integers(0, length - width + 1, rng.integers(1, max_rows + 1))
    valid_from = [int(rng.integers(0, start + 1)) for start in starts]
    valid_to = [int(rng.integers(start + width, length + 1)) for start in starts]
    picked = tuple(int(start) for start in starts)
    return Shape(length, width, picked, tuple(valid_from), tuple(valid_to), seed)


def greedy(rows: int, config: ModelConfig) -> Sampling:
    """No noise, no guidance; the mask id is suppressed."""
    return Sampling(
        temperature=np.zeros(rows, np.float32),
        seed=np.zeros(rows, np.int32),
        step=np.zeros(rows, np.int32),
        guide_row=np.arange(rows, dtype=np.int32),
        cfg_scale=np.zeros(rows, np.float32),
        suppress_ids=np.full((rows, 1), config.mask_id, np.int32),
        confidence_exclude_ids=np.full((rows, 1), -1, np.int32),
    )


def block_tokens(canvas: Canvas, block_columns: Int) -> Int:
    """What stands in the block: int32 [B, Bk]."""
    return np.take_along_axis(canvas.tokens, block_columns, axis=1)


def relative_error(found: ArrayLike, expected: ArrayLike) -> float:
    """max|a - b| / max|b|."""
    a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


def ulps(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """max|a - b| in float32 ulps of max|b|."""
    difference = np.abs(found.astype(np.float64) - expected.astype(np.float64)).max()
    return float(difference / np.spacing(np.float32(np.abs(expected).max())))


def arrays(record: object) -> dict[str, NDArray[np.generic]]:
    """Fields of a dataclass of arrays, by name."""
    return {field.name: getattr(record, field.name) for field in fields(record)}
