"""The sizes that an engine is checked at: those that its optimisation profile covers."""

from __future__ import annotations

from dataclasses import dataclass

from lacache_trt.artifacts import Manifest
from lacache_trt.engines.tensorrt.profiles import profiles_from_json

ROWS = 3
WIDTHS = (4, 8, 32)
MOST_BLOCKS = 4


@dataclass(frozen=True)
class Sizes:
    """Sizes that fit.

    Attributes:
        rows: rows of a batch.
        widths: block widths to check.
        columns: most columns of a canvas.
        window: most columns of a window; None for any number.
    """

    rows: int
    widths: tuple[int, ...]
    columns: int
    window: int | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> Sizes:
        """Those of the first profile; an engine without profiles takes any."""
        if "profiles" not in manifest.body:
            return cls(ROWS, WIDTHS, manifest.model.max_length)
        ranges = profiles_from_json(manifest.body["profiles"])[0].ranges
        rows, width, columns = ranges["B"], ranges["Bk"], ranges["N"].high
        widths = [each for each in WIDTHS if width.low <= each <= width.high and each < columns]
        return cls(
            rows=min(max(ROWS, rows.low), rows.high),
            widths=tuple(widths) or (width.tuned,),
            columns=columns,
            window=ranges["W"].high,
        )

    def blocks(self, width: int) -> int:
        """Blocks of an answer, at most `MOST_BLOCKS`, that leave room for a prompt."""
        return max(1, min(MOST_BLOCKS, (self.columns - 1) // width))

    def prompt_length(self, wanted: int, width: int) -> int:
        """Length of a prompt in front of such an answer."""
        return max(1, min(wanted, self.columns - width * self.blocks(width)))
