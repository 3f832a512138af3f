"""Two paths of a reduced-precision engine over the same canvases: which tokens may differ, and why.

Let a prediction's gap be the distance of the two best logits in float64 (the mask id left out). A
path whose logits are off by at most E changes the token only where the gap is at most 2 E. E is not
taken from the paths themselves, or every difference would excuse itself: it is the largest error,
at the two best logits, of the same module run with plain torch operators in the engine's dtype.
So a differing token with a gap above 2 E means that the engine is worse than its dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from canvases import Shape, block_tokens, greedy
from gpu_models import DEVICE, DeviceSession
from numpy.typing import NDArray
from torch import Tensor

from lacache_trt.engines.base import StepOutputs
from lacache_trt.engines.cuda.engine import CudaEngine

Floats = NDArray[np.float64]
PATHS = ("exact", "plain", "module")


@dataclass
class Predictions:
    """One entry per masked position and step."""

    eps: float
    gap: list[Floats] = field(default_factory=list)
    scale: list[Floats] = field(default_factory=list)
    top1: list[Floats] = field(default_factory=list)
    errors: dict[str, list[Floats]] = field(default_factory=lambda: {name: [] for name in PATHS})
    tokens: dict[str, list[Floats]] = field(default_factory=lambda: {name: [] for name in PATHS})

    def add(
        self, truth: StepOutputs, steps: dict[str, StepOutputs], masked: Tensor, mask_id: int
    ) -> None:
        """Compare one step of a single row; `masked` selects the places that are predicted."""
        exact = _logits(truth, masked)
        exact[:, mask_id] = -torch.inf
        best = exact.topk(2)
        self.gap.append(_array(best.values[:, 0] - best.values[:, 1]))
        self.top1.append(_array(torch.softmax(exact, -1).amax(-1)))
        self.scale.append(_array(best.values.abs().amax(-1)))
        places = masked.cpu().numpy()
        for name, step in steps.items():
            found = _logits(step, masked).gather(-1, best.indices)
            self.errors[name].append(_array((found - best.values).abs().amax(-1)))
            self.tokens[name].append(step.token[0][places].astype(np.float64))

    def figures(self) -> dict[str, float]:
        """Counts, and errors in ulps of the dtype at the largest of the best logits."""
        gap, ulp = np.concatenate(self.gap), self.ulp
        tokens = {name: np.concatenate(values) for name, values in self.tokens.items()}
        worst = {name: float(np.max(np.concatenate(v))) for name, v in self.errors.items()}
        bound = 2 * worst["module"]
        differs = tokens["exact"] != tokens["plain"]
        largest = float(gap[differs].max()) if differs.any() else 0.0
        return {
            "predictions": float(len(gap)),
            "differing": float(differs.sum()),
            "not_excused": float((differs & (gap > bound)).sum()),
            "bound_ulps": bound / ulp,
            "largest_differing_gap_ulps": largest / ulp,
            "closer_than_bound": float((gap <= bound).sum()),
            "module_differs_from_plain": float((tokens["module"] != tokens["plain"]).sum()),
            "median_top1": float(np.median(np.concatenate(self.top1))),
            **{f"{name}_error_ulps": value / ulp for name, value in worst.items()},
        }

    @property
    def ulp(self) -> float:
        """Spacing of the dtype at the largest of the best logits."""
        largest = float(np.max(np.concatenate(self.scale)))
        return float(2.0 ** np.floor(np.log2(largest)) * self.eps)


def _logits(step: StepOutputs, masked: Tensor) -> Tensor:
    return torch.from_numpy(step.logits[0]).to(masked.device)[masked].double()


def _array(values: Tensor) -> Floats:
    return values.double().cpu().numpy()


def walk_block(
    engine: CudaEngine,
    references: tuple[DeviceSession, DeviceSession],
    shape: Shape,
    steps: int,
    found: Predictions,
) -> None:
    """Decode one row's block with `exact`, and predict each of its canvases in every other way.

    `references` are the module in float64 and in the engine's dtype.
    """
    config, columns, sampling = engine.config, shape.block_columns, greedy(1, engine.config)
    canvas = shape.canvas(config, masked=1.0)
    session = engine.session()
    session.fill(canvas, columns)
    for _ in range(steps):
        tokens = block_tokens(canvas, columns)
        exact = session.reuse(tokens, sampling, columns)
        truth, module = (each.plain(canvas, columns, sampling, columns) for each in references)
        plain = session.plain(canvas, columns, sampling, columns)
        places = tokens[0] == config.mask_id
        paths = dict(zip(PATHS, (exact, plain, module), strict=True))
        found.add(truth, paths, torch.from_numpy(places).to(DEVICE), config.mask_id)
        count = -(-shape.width // steps)
        order = np.argsort(-np.where(places, exact.confidence[0], -1))[:count]
        canvas.tokens[0, columns[0, order]] = exact.token[0, order]
    session.close()
