"""Checks of the approximate caches' steps on an engine that has them.

1. `reuse_kv` predicts what `reuse` predicts.
2. A window step right after it, on the same tokens, predicts the same again within the bound, for
   the block with the column before it and for everything from there on: K and V of the other
   columns are exact then, and so is the result but for rounding.
3. The same step once more gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lacache_trt.engines.base import Canvas, Engine, Int, Sampling, StepOutputs
from lacache_trt.verify_report import EXCUSED_FRACTION, Check, largest_difference

Batch = tuple[Canvas, Int, Sampling]
Distance = tuple[float, float, float, float]
_SCORES = ("confidence", "margin", "neg_entropy")


def window_checks(
    engine: Engine, batches: Iterable[Batch], bound: float, widest: int | None = None
) -> list[Check]:
    """The checks, or none if the engine has no approximate caches.

    Windows of more than `widest` columns are left out, and checks that none is left for.
    """
    if "dual" not in engine.capabilities.caches:
        return []
    kept: list[Distance] = []
    narrow: list[Distance] = []
    wide: list[Distance] = []
    differing = 0
    for canvas, columns, sampling in batches:
        tokens = np.take_along_axis(canvas.tokens, columns, axis=1)
        session = engine.session()
        try:
            session.fill(canvas, columns)
            step = session.reuse(tokens, sampling)
            kept.append(_distance(session.reuse_kv(tokens, sampling), step, bound))
            for found, to_the_end in ((narrow, False), (wide, True)):
                window = _window(canvas, columns, to_the_end)
                if widest is not None and window[0].shape[1] > widest:
                    continue
                first = session.window(*window, columns, sampling)
                again = session.window(*window, columns, sampling)
                found.append(_distance(first, step, bound))
                differing += _differing_bits(first, again)
        finally:
            session.close()
    ran = {
        "reuse_kv against reuse": kept,
        "an unchanged window, block alone, against reuse": narrow,
        "an unchanged window to the end, against reuse": wide,
    }
    checks = [_check(name, distances, bound) for name, distances in ran.items() if distances]
    if narrow or wide:
        figures = {"differing": float(differing)}
        checks.append(Check("window is bitwise repeatable", differing == 0, figures))
    return checks


def _window(canvas: Canvas, columns: Int, to_the_end: bool) -> tuple[Int, Int]:
    """Tokens and columns from the column before each row's block on; pads behind."""
    length = canvas.tokens.shape[1]
    starts = columns[:, :1] - 1
    stop = length if to_the_end else columns[:, -1:] + 1
    run = starts + np.arange(int((stop - starts).max()), dtype=np.int32)
    window: Int = np.where(run < stop, run, -1).astype(np.int32)
    tokens: Int = np.take_along_axis(canvas.tokens, np.maximum(window, 0), axis=1)
    return tokens, window


def _distance(found: StepOutputs, expected: StepOutputs, bound: float) -> Distance:
    """Worst relative difference of the scores; tokens that differ, excused as near ties, in all."""
    same = found.token == expected.token
    near = expected.margin <= bound
    worst = 0.0
    for name in _SCORES:
        figure = largest_difference(getattr(found, name), getattr(expected, name), same)
        worst = float(np.maximum(worst, figure))
    return worst, float((~same & ~near).sum()), float((~same & near).sum()), float(same.size)


def _differing_bits(one: StepOutputs, other: StepOutputs) -> int:
    return sum(
        int((getattr(one, name).view(np.int32) != getattr(other, name).view(np.int32)).sum())
        for name in ("token", *_SCORES)
    )


def _check(name: str, distances: list[Distance], bound: float) -> Check:
    worst = float(np.max([distance[0] for distance in distances]))
    differing, excused, total = (sum(distance[i] for distance in distances) for i in (1, 2, 3))
    figures = {"relative": worst, "tokens": total, "differing": differing, "excused": excused}
    few = excused <= max(1.0, EXCUSED_FRACTION * total)
    return Check(name, worst <= bound and differing == 0 and few, figures)
