"""What a policy sees of a step, and what it answers.

Everything is on the host and pure: the same inputs give the same commits on every engine. What a
policy wants to remember of a row goes out in its answer and comes back in the row's next view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class StepView:
    """One denoising step of a batch, for the rows' current blocks (B rows, Bk columns).

    Attributes:
        masked: bool [B, Bk]; positions that may be committed.
        token: int32 [B, Bk]; the engine's prediction.
        confidence: float [B, Bk]; its probability, in float32 from the engine.
        margin: float32 [B, Bk]; best minus second best probability.
        neg_entropy: float32 [B, Bk]; sum of p log p.
        logits: float32 [B, Bk, V] raw logits of the block's rows, or None unless the policy asked.
        positions: int32 [B, Bk]; rotary positions, which key the seeded noise.
        seed: int64 [B].
        step: int32 [B]; forwards of the row so far, keys the noise.
        step_in_block: int32 [B]; 0 at the block's first step.
        masked_at_start: int32 [B]; masks of the row when its block began.
        steps_per_block: steps / number of blocks.
        suppress_ids: token ids that are never predicted (always the mask id).
        confidence_exclude_ids: token ids that are predicted without confidence.
        answer_logits: float32 [B, A, V] raw logits of the policy's `answer_columns`, or None.
        memory: per row what the policy returned at the row's last step; None when a block begins.
    """

    masked: NDArray[np.bool_]
    token: NDArray[np.int32]
    confidence: NDArray[np.floating[Any]]
    margin: NDArray[np.float32]
    neg_entropy: NDArray[np.float32]
    logits: NDArray[np.float32] | None
    positions: NDArray[np.int32]
    seed: NDArray[np.int64]
    step: NDArray[np.int32]
    step_in_block: NDArray[np.int32]
    masked_at_start: NDArray[np.int32]
    steps_per_block: int
    suppress_ids: tuple[int, ...]
    confidence_exclude_ids: tuple[int, ...] = ()
    answer_logits: NDArray[np.float32] | None = None
    memory: tuple[object, ...] = ()

    def remembered(self, row: int) -> object:
        """The row's memory; None where there is none."""
        return self.memory[row] if self.memory else None


@dataclass(frozen=True)
class Commit:
    """Which positions become final, and with which tokens.

    Attributes:
        selected: bool [B, Bk]; a subset of the masked positions.
        token: int32 [B, Bk]; read only where `selected`.
        memory: per row what the policy wants to see again; empty if it remembers nothing.
        finished: bool [B]; rows whose whole answer is to be filled in at once, or None.
    """

    selected: NDArray[np.bool_]
    token: NDArray[np.int32]
    memory: tuple[object, ...] = ()
    finished: NDArray[np.bool_] | None = None


class Policy(Protocol):
    """Chooses what a step commits.

    Attributes:
        needs_logits: it reads the logits of the block.
        answer_columns: columns of the generated part whose logits it reads at every step.
    """

    needs_logits: bool
    answer_columns: tuple[int, ...]

    def __call__(self, view: StepView) -> Commit:
        """Pure; may select nothing for a row, never an unmasked position."""
