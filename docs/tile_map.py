"""Draws docs/tile_map.svg: the (query tile, key tile) pairs that layer 0's kernels visit.

    python docs/tile_map.py [OUT.svg]

The rules are the kernels' own (`plugins/attention_fill/kernel.py`, `attention_reuse/kernel.py`,
`attention/stream.py`, `attention/split.py`); tile sizes and chunks are imported from them. Whole
tiles of a run of keys come first; what is left of the runs before and behind the block, drawn where
it lies, is gathered together. One row of a batch, one of 32 heads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from lacache_trt.plugins.attention.split import chunk_size
from lacache_trt.plugins.attention_fill.kernel import TILES as FILL_TILES
from lacache_trt.plugins.attention_reuse.kernel import BLOCK_ROWS, chunks_for
from lacache_trt.plugins.attention_reuse.kernel import TILES as REUSE_TILES

SM = 90
HEADS = 32
BLOCK_KEYS = 64  # keys a tile of the block's rows, `launch` of attention_reuse
COLORS = {"fill": "#4c72b0", "reuse": "#dd8452", "block": "#55a868", "skipped": "#ececec"}


@dataclass(frozen=True)
class Canvas:
    """One row: real columns [low, high) of `length`, the block at [start, start + block)."""

    length: int = 512
    low: int = 44
    high: int = 512
    start: int = 320
    block: int = 32


@dataclass(frozen=True)
class Visit:
    """A rectangle of scores that is computed: query rows and keys, half open."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    kind: str

    @property
    def area(self) -> int:
        """Pairs of a query row and a key."""
        return (self.rows[1] - self.rows[0]) * (self.keys[1] - self.keys[0])


def tiles(low: int, high: int, size: int) -> Iterator[tuple[int, int]]:
    """[low, high) in pieces of `size`; the last may be shorter."""
    for first in range(low, high, size):
        yield first, min(first + size, high)


def fill_visits(canvas: Canvas) -> list[Visit]:
    """Every query tile streams the valid keys outside the block."""
    shape = FILL_TILES[SM]
    runs = ((canvas.low, canvas.start), (canvas.start + canvas.block, canvas.high))
    return [
        Visit(rows, keys, "fill")
        for rows in tiles(0, canvas.length, shape.rows)
        for run in runs
        for keys in tiles(*run, shape.keys)
    ]


def reuse_visits(canvas: Canvas) -> list[Visit]:
    """Query tiles continue over the block's keys; the block's rows stream all keys, in chunks."""
    shape, end = REUSE_TILES[SM], canvas.start + canvas.block
    outer = [
        Visit(rows, keys, "reuse")
        for rows in tiles(0, canvas.length, shape.rows)
        for keys in tiles(canvas.start, end, shape.keys)
    ]
    chunks = chunks_for(canvas.length, canvas.block, HEADS, HEADS, BLOCK_ROWS)
    runs = [(canvas.start, end)]
    for low, high in tiles(0, canvas.length, chunk_size(canvas.length, chunks)):
        low, high = max(low, canvas.low), min(high, canvas.high)
        runs += [(low, min(canvas.start, high)), (max(end, low), high)]
    own = [
        Visit(rows, keys, "block")
        for rows in tiles(canvas.start, end, BLOCK_ROWS)
        for run in runs
        for keys in tiles(*run, BLOCK_KEYS)
    ]
    return [*outer, *own]


def draw(axes: Axes, canvas: Canvas, visits: list[Visit], title: str) -> None:
    """One panel."""
    whole = canvas.length * (canvas.high - canvas.low)
    done = sum(visit.area for visit in visits)
    axes.add_patch(
        Rectangle((canvas.low, 0), canvas.high - canvas.low, canvas.length, fc=COLORS["skipped"])
    )
    for visit in visits:
        corner = visit.keys[0], visit.rows[0]
        width, height = visit.keys[1] - visit.keys[0], visit.rows[1] - visit.rows[0]
        axes.add_patch(Rectangle(corner, width, height, fc=COLORS[visit.kind], ec="white", lw=0.8))
    axes.set(xlim=(0, canvas.length), ylim=(canvas.length, 0), aspect="equal", xlabel="key column")
    axes.set_title(f"{title}\n{done / whole:.0%} of the query-key pairs", fontsize=10)
    axes.set_xticks([0, canvas.low, canvas.start, canvas.start + canvas.block, canvas.length])
    axes.set_yticks([0, canvas.start, canvas.start + canvas.block, canvas.length])
    axes.tick_params(labelsize=8)
    shifts = ("center", "left", "right", "left", "right")
    for label, shift in zip(axes.get_xticklabels(), shifts, strict=True):
        label.set_ha(shift)


def main(out: Path) -> None:
    """Write the picture."""
    canvas = Canvas()
    figure = Figure(figsize=(9.2, 5.4))
    left, right = figure.subplots(1, 2)
    draw(left, canvas, fill_visits(canvas), "AttentionFill: once per block")
    draw(right, canvas, reuse_visits(canvas), "AttentionReuse: every denoising step")
    left.set_ylabel("query row")
    names = {
        "fill": "streamed into the saved state",
        "reuse": "continued from the saved state",
        "block": "the block's own rows",
        "skipped": "skipped",
    }
    patches = [Patch(fc=COLORS[kind], label=name) for kind, name in names.items()]
    figure.legend(handles=patches, loc="lower center", ncol=4, frameon=False, fontsize=9)
    figure.suptitle(
        f"{canvas.length} columns, {canvas.low} pads, block of {canvas.block} at {canvas.start}, "
        f"tiles of sm_{SM}",
        fontsize=10,
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    matplotlib.rcParams["svg.hashsalt"] = "tile_map"
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
