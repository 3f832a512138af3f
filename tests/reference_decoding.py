"""The independent truth for decoding: plain loops over one unpadded row at a time.

Written from the published rules of LLaDA's generate.py and Dream's generation_utils.py in plain
Python, with the toolkit's documented differences: the mask id is never predicted, ties go to the
lowest id and the lowest position, confidences are rounded to float32, noise is a seeded hash, a
block ends when it has no mask left, Dream counts each row's own masks. Shares no code with the
toolkit, not even the noise.

Each decision records how close it was to another outcome, so that a comparison can excuse what
rounding may turn: see `Trace.closest`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]
Predict = Callable[[list[int]], NDArray[np.float64]]
"""Tokens of one row -> the prediction of every position, [N, V], shifted where the family does."""

PRIME = 2147483647
KEYS = (374761393, 668265263, 1274126177, 1103515245, 12345 + 987654321)
RANDOM_ID, ORIGIN_ID, ALG_TEMP_ID = 1073741825, 1073741826, 1073741827


@dataclass(frozen=True)
class Options:
    """The settings of a request, named as in `GenerationConfig`."""

    gen_length: int
    block_length: int
    steps: int
    temperature: float = 0.0
    cfg_scale: float = 0.0
    remasking: str = "low_confidence"
    policy: str = "schedule"
    stop_at_eos: bool = True
    seed: int = 0
    top_p: float | None = None
    top_k: int | None = None
    alg_temp: float | None = None
    eps: float = 1e-3


@dataclass(frozen=True)
class Ids:
    """Token ids with a meaning.

    Attributes:
        mask: the undecoded position.
        ends: end tokens; the first fills what follows an early stop.
        suppressed: never predicted (the mask always is not).
        excluded: predicted, but without confidence.
    """

    mask: int
    ends: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    excluded: tuple[int, ...] = ()


@dataclass(frozen=True)
class Decision:
    """A choice that was made, and the distance to the next best one in the units of its kind."""

    kind: Literal["token", "rank", "nucleus", "count"]
    step: int
    gap: float


@dataclass
class Trace:
    """The generated part and how it came about."""

    tokens: list[int] = field(default_factory=list)
    forwards: int = 0
    stopped: bool = False
    decisions: list[Decision] = field(default_factory=list)
    committed: list[dict[int, int]] = field(default_factory=list)

    def closest(self) -> float:
        """The smallest gap of all decisions; a difference may be excused if it is tiny."""
        return min((decision.gap for decision in self.decisions), default=math.inf)


@dataclass(frozen=True)
class Candidate:
    """What one masked column would become, its score, and how close its token was to a tie."""

    column: int
    token: int
    score: float
    gap: float
    nucleus_gap: float = math.inf


def noise_bits(seed: int, step: int, position: int, identity: int) -> int:
    """23 bits of the hash, in Python integers."""
    state = 0
    for word, key in zip((seed, step, position, identity, 0), KEYS, strict=True):
        state = pow(state + word + key, 5, PRIME)
    return state >> 8


def noise(seed: int, step: int, position: int, identity: int) -> float:
    """Standard Gumbel noise."""
    uniform = (noise_bits(seed, step, position, identity) + 0.5) / 2**23
    return -math.log(-math.log(uniform))


def decode(predict: Predict, prompt: list[int], options: Options, ids: Ids) -> Trace:
    """Generate for one prompt; `predict` is the model."""
    x = prompt + [ids.mask] * options.gen_length
    blocks = options.gen_length // options.block_length
    per_block = options.steps // blocks
    trace = Trace()
    for block in range(blocks):
        start = len(prompt) + block * options.block_length
        columns = range(start, start + options.block_length)
        masks_at_start = sum(x[column] == ids.mask for column in columns)
        for step_in_block in range(per_block):
            masked = [column for column in columns if x[column] == ids.mask]
            if not masked:
                break
            logits = _guided(predict, x, len(prompt), options, ids)
            if options.policy == "schedule":
                count = masks_at_start // per_block
                count += step_in_block < masks_at_start % per_block
                chosen = _llada_step(logits, masked, count, options, ids, trace)
            else:
                chosen = _dream_step(logits, masked, step_in_block, options, ids, trace)
            trace.forwards += 1
            for candidate in chosen:
                x[candidate.column] = candidate.token
                trace.decisions.append(Decision("token", trace.forwards - 1, candidate.gap))
                if candidate.nucleus_gap < math.inf:
                    gap = Decision("nucleus", trace.forwards - 1, candidate.nucleus_gap)
                    trace.decisions.append(gap)
            trace.committed.append({c.column - len(prompt): c.token for c in chosen})
        if options.stop_at_eos and any(x[column] in ids.ends for column in columns):
            rest = len(x) - columns.stop
            x[columns.stop :] = [ids.ends[0]] * rest
            trace.stopped = True
            break
    trace.tokens = x[len(prompt) :]
    return trace


def _guided(
    predict: Predict, x: list[int], prompt_length: int, options: Options, ids: Ids
) -> NDArray[np.float64]:
    own = predict(x)
    if options.cfg_scale == 0:
        return own
    without = predict([ids.mask] * prompt_length + x[prompt_length:])
    return without + (options.cfg_scale + 1) * (own - without)


def _llada_step(
    logits: NDArray[np.float64],
    masked: list[int],
    count: int,
    options: Options,
    ids: Ids,
    trace: Trace,
) -> list[Candidate]:
    step = trace.forwards
    candidates = []
    for column in masked:
        row = logits[column].copy()
        row[[ids.mask, *ids.suppressed]] = -math.inf
        noisy = row.copy()
        if options.temperature > 0:
            for token in range(len(row)):
                noisy[token] += options.temperature * noise(options.seed, step, column, token)
        token, gap = _best(noisy)
        row[list(ids.excluded)] = -math.inf
        score = float(np.float32(_softmax(row)[token]))
        if options.remasking == "random":
            score = float(noise_bits(options.seed, step, column, RANDOM_ID))
        candidates.append(Candidate(column, token, score, gap))
    return _top(candidates, count, trace)


def _dream_step(
    logits: NDArray[np.float64],
    masked: list[int],
    step_in_block: int,
    options: Options,
    ids: Ids,
    trace: Trace,
) -> list[Candidate]:
    step = trace.forwards
    per_block = options.steps // (options.gen_length // options.block_length)
    time = 1 + (options.eps - 1) * step_in_block / per_block
    next_time = 1 + (options.eps - 1) * (step_in_block + 1) / per_block
    is_last = step_in_block == per_block - 1
    fraction = 1.0 if is_last else 1 - next_time / time
    candidates = [_dream_candidate(logits[c], c, step, options, ids) for c in masked]
    if options.policy == "origin":
        draws = [(noise_bits(options.seed, step, c, ORIGIN_ID) + 0.5) / 2**23 for c in masked]
        return [one for one, draw in zip(candidates, draws, strict=True) if draw < fraction]
    wanted = len(masked) * fraction
    if not is_last and round(wanted) > 0:
        trace.decisions.append(Decision("count", step, abs(wanted - round(wanted))))
    return _top(candidates, int(wanted), trace)


def _dream_candidate(logits: Row, column: int, step: int, options: Options, ids: Ids) -> Candidate:
    row = logits.copy()
    row[[ids.mask, *ids.suppressed]] = -math.inf
    if options.temperature > 0:
        row = row / options.temperature
    nucleus_gap = math.inf
    if options.top_p is not None and options.top_p < 1:
        nucleus_gap = _cut_nucleus(row, options.top_p)
    if options.top_k is not None:
        kept = sorted(row, reverse=True)[: options.top_k]
        row[row < kept[-1]] = -math.inf
    p = _softmax(row)
    noisy = row.copy()
    if options.temperature > 0:
        for token in range(len(row)):
            noisy[token] += noise(options.seed, step, column, token)
    token, gap = _best(noisy)
    first, second = sorted(p, reverse=True)[:2]
    score = {
        "origin": 0.0,
        "maskgit_plus": p[token],
        "topk_margin": first - second,
        "entropy": sum(value * math.log(value) for value in p if value > 0),
    }[options.policy]
    score = float(np.float32(score))
    if options.alg_temp:
        score = score / options.alg_temp + noise(options.seed, step, column, ALG_TEMP_ID)
    return Candidate(column, token, score, gap, nucleus_gap)


def _cut_nucleus(row: Row, top_p: float) -> float:
    """Remove ids outside the nucleus in place; returns how close the cut was to another one."""
    p = _softmax(row)
    order = sorted(range(len(row)), key=lambda token: (-p[token], token))
    total, closest, keep = 0.0, math.inf, True
    for token in order:
        if not keep:
            row[token] = -math.inf
            continue
        total += p[token]
        closest = min(closest, abs(total - top_p))
        # The id that crosses stays; everything after it goes.
        keep = total <= top_p
    return closest


def _softmax(row: Row) -> Row:
    weights = np.exp(row - row.max())
    p: Row = weights / weights.sum()
    return p


def _best(values: Row) -> tuple[int, float]:
    """The first index of the largest value, and the distance to the second largest."""
    best = int(np.argmax(values))
    others = np.delete(values, best)
    return best, float(values[best] - others.max())


def _top(candidates: list[Candidate], count: int, trace: Trace) -> list[Candidate]:
    """The `count` best candidates; ties go to the lower column."""
    ranked = sorted(candidates, key=lambda one: (-one.score, one.column))
    if 0 < count < len(ranked):
        gap = ranked[count - 1].score - ranked[count].score
        trace.decisions.append(Decision("rank", trace.forwards, gap))
    return ranked[:count]
