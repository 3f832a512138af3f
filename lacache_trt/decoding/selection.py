"""What every policy shares: ranking positions, and checks of what an engine said."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lacache_trt.decoding.policy import Commit, StepView
from lacache_trt.engines.base import StepOutputs
from lacache_trt.errors import EngineError, NumericalError


def take_best(
    scores: NDArray[np.floating] | NDArray[np.int64],
    masked: NDArray[np.bool_],
    counts: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """The `counts[b]` best masked positions of each row; bool [B, Bk].

    Ties: the lower position. Asking for more than there are masks takes all masks. Scores must
    not be NaN; -inf is allowed. LLaDA leaves ties to torch.topk, which does not define them.
    """
    order = np.lexsort((-scores, ~masked), axis=-1)
    chosen_first = np.arange(scores.shape[1])[None, :] < counts[:, None]
    selected = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(selected, order, chosen_first, axis=-1)
    return selected & masked


def probabilities(
    logits: NDArray[np.float32], suppress_ids: tuple[int, ...]
) -> NDArray[np.float64]:
    """Softmax in float64 without the suppressed ids: float32 [..., V] -> float64 [..., V]."""
    kept = logits.astype(np.float64)
    kept[..., list(suppress_ids)] = -np.inf
    weights = np.exp(kept - kept.max(axis=-1, keepdims=True))
    p: NDArray[np.float64] = weights / weights.sum(axis=-1, keepdims=True)
    return p


def checked_commit(
    view: StepView,
    selected: NDArray[np.bool_],
    token: NDArray[np.int32],
    memory: tuple[object, ...] = (),
    finished: NDArray[np.bool_] | None = None,
) -> Commit:
    """The commit, after making sure that no suppressed id (the mask id) becomes final."""
    wrong = np.zeros_like(selected)
    for suppressed in view.suppress_ids:
        wrong |= selected & (token == suppressed)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise EngineError(
            "the engine predicted a token that it was told to suppress",
            got=f"id {token[row, column]} in row {row}, block column {column}",
            expected=f"any id but {view.suppress_ids}",
            fix="run `lacache-trt verify`; build the engine again",
        )
    return Commit(selected, token, memory, finished)


def require_finite(outputs: StepOutputs, active: NDArray[np.bool_] | None = None) -> None:
    """Raise `NumericalError` if a confidence is NaN or infinite, which a NaN logit makes it.

    `active`, bool [B], limits the check to rows that are still decoding.
    """
    broken = ~np.isfinite(outputs.confidence)
    if active is not None:
        broken &= active[:, None]
    if broken.any():
        row, column = np.argwhere(broken)[0]
        raise NumericalError(
            "the model produced NaN or infinite logits",
            got=f"confidence {outputs.confidence[row, column]} in row {row}, block column "
            f"{column} ({int(broken.sum())} of {broken.size} positions)",
            expected="finite confidences",
            fix="run `lacache-trt verify`; with float16, try bfloat16 or float32",
        )
