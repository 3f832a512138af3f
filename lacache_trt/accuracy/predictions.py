"""Two candidates' predictions of the same block: divergence, agreement, noise per layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lacache_trt.accuracy.dataset import State
from lacache_trt.accuracy.statistics import Values


def divergence(baseline: Tensor, other: Tensor, mask_id: int) -> Tensor:
    """KL(softmax(baseline) || softmax(other)) of logits [..., V] without the mask id, in nats.

    In float64, so that tiny divergences are more than rounding.
    """
    first, second = (_without(logits.double(), mask_id) for logits in (baseline, other))
    first, second = first.log_softmax(dim=-1), second.log_softmax(dim=-1)
    return (first.exp() * (first - second)).sum(dim=-1)


def best_tokens(logits: Tensor, mask_id: int) -> Tensor:
    """The greedy token of logits [..., V], never the mask."""
    barred = torch.tensor([mask_id], device=logits.device)
    return logits.index_fill(-1, barred, -torch.inf).argmax(dim=-1)


def _without(logits: Tensor, mask_id: int) -> Tensor:
    return torch.cat([logits[..., :mask_id], logits[..., mask_id + 1 :]], dim=-1)


@dataclass
class PredictionTotals:
    """What the predictions of one case sum up to, for each problem.

    Attributes:
        divergence: float64 [n] sum of KL over masked positions.
        agreeing: float64 [n] masked positions with the baseline's token.
        positions: float64 [n] masked positions.
        signal: float64 [L + 1, n] energy of the baseline's residual rows after each layer, then
            of its logits; empty for engines.
        noise: float64 [L + 1, n] energy of the difference.
    """

    divergence: Values
    agreeing: Values
    positions: Values
    signal: Values
    noise: Values

    @classmethod
    def empty(cls, problems: int) -> PredictionTotals:
        """Nothing counted yet."""
        one, two, three = (np.zeros(problems) for _ in range(3))
        return cls(one, two, three, np.zeros((0, problems)), np.zeros((0, problems)))

    def add(
        self,
        state: State,
        baseline: tuple[Tensor, list[Tensor]],
        other: tuple[Tensor, list[Tensor]],
        mask_id: int,
    ) -> None:
        """Count the predictions of one state."""
        masked = torch.from_numpy(state.masked).to(baseline[0].device)
        first, second = baseline[0], other[0].to(baseline[0].device)
        found = divergence(first, second, mask_id).masked_fill(~masked, 0.0)
        same = (best_tokens(first, mask_id) == best_tokens(second, mask_id)) & masked
        self.divergence[state.members] += _host(found.sum(dim=1))
        self.agreeing[state.members] += _host(same.sum(dim=1))
        self.positions[state.members] += _host(masked.sum(dim=1))
        if not baseline[1] or not other[1]:
            return
        pairs = [*zip(baseline[1], other[1], strict=True), (first, second)]
        if not len(self.signal):
            shape = (len(pairs), len(self.positions))
            self.signal, self.noise = np.zeros(shape), np.zeros(shape)
        self.signal[:, state.members] += [_host(_energy(left)) for left, _ in pairs]
        self.noise[:, state.members] += [_host(_energy(right - left)) for left, right in pairs]


def _energy(values: Tensor) -> Tensor:
    """Sum of squares of each row's [rows, width], float64 [B]."""
    return values.double().square().sum(dim=(1, 2))


def _host(values: Tensor) -> NDArray[np.float64]:
    return np.asarray(values.double().cpu().numpy(), np.float64)
