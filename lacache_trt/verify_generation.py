"""Whole generations of an engine against the plain graph, decision by decision.

A single near tie changes everything that is generated after it, so final answers cannot tell a
wrong engine from rounding. The reference decodes; at each of its steps the engine, with caches
filled once a block, predicts the same canvas.

1. Where the reference commits a position, the engine has the same token. A differing one is
   excused, and counted, where the reference's own two best probabilities are closer than the bound
   of the engine's dtype; nothing that the engine says goes into the excuse.
2. At most 0.1% of the decisions, or one, are excused.
3. A position that the engine would have committed before the reference's is less confident there
   by at most the bound.
4. Left alone, the engine's runtime gives the reference's answer in every row in which the engine
   decided alike at every step.
5. A confidence of the engine or of the reference that is NaN or infinite ends the check, failed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lacache_trt.decoding import rows
from lacache_trt.decoding.selection import require_finite, take_best
from lacache_trt.engines.base import Engine, Sampling, StepOutputs
from lacache_trt.errors import EngineError, NumericalError
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.config import ModelConfig
from lacache_trt.runtime import Runtime
from lacache_trt.verify_report import EXCUSED_FRACTION, Check

_STEPS_PER_BLOCK = 8

Bools = NDArray[np.bool_]


@dataclass
class Decisions:
    """What was compared, by row where it matters.

    Attributes:
        alike: bool [B]; the engine decided as the reference at every step so far.
        total: positions that the reference committed.
        differing: tokens and orders that differ by more than the bound allows.
        excused: differing tokens at near ties.
        swapped: rows and steps with another order within the bound.
        reference_s: seconds that the reference took.
    """

    alike: Bools
    total: int = 0
    differing: int = 0
    excused: int = 0
    swapped: int = 0
    reference_s: float = 0.0

    def add(
        self, got: StepOutputs, expected: StepOutputs, masked: Bools, count: int, bound: float
    ) -> Bools:
        """Compare one step; returns what the reference commits, bool [B, Bk]."""
        counts = np.full(masked.shape[0], count, np.int64)
        chosen = take_best(expected.confidence, masked, counts)
        own = take_best(got.confidence, masked, counts)
        wrong = chosen & (got.token != expected.token)
        near = expected.margin <= bound
        lost = np.where(chosen & ~own, expected.confidence, -np.inf).max(axis=1)
        won = np.where(own & ~chosen, expected.confidence, np.inf).min(axis=1)
        swapped = np.isfinite(lost)
        within = swapped & (lost - won <= bound)
        self.total += int(chosen.sum())
        self.differing += int((wrong & ~near).sum()) + int((swapped & ~within).sum())
        self.excused += int((wrong & near).sum())
        self.swapped += int(within.sum())
        self.alike &= ~swapped & ~wrong.any(axis=1)
        return chosen


def settings_for(width: int, blocks: int) -> GenerationConfig:
    """Greedy decoding in which every step commits as many positions as any other."""
    count = -(-width // _STEPS_PER_BLOCK)
    while width % count:
        count += 1
    return GenerationConfig(
        gen_length=width * blocks,
        block_length=width,
        steps=width * blocks // count,
        stop_at_eos=False,
    )


def greedy(model: ModelConfig, count: int) -> Sampling:
    """Sampling inputs of a greedy step that suppresses the mask alone."""
    return Sampling(
        temperature=np.zeros(count, np.float32),
        seed=np.zeros(count, np.int32),
        step=np.zeros(count, np.int32),
        guide_row=np.arange(count, dtype=np.int32),
        cfg_scale=np.zeros(count, np.float32),
        suppress_ids=rows.id_rows((model.mask_id,), count),
        confidence_exclude_ids=rows.id_rows((), count),
    )


def generations_agree(
    name: str,
    engine: Engine,
    reference: Engine,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    bound: float,
) -> Check:
    """The check of one batch of prompts, with exact caches against none."""
    try:
        answers, found = _walk(engine, reference, prompts, config, bound)
        own, exact_ms = _timed_generation(Runtime(engine), prompts, config)
    except NumericalError as error:
        return Check(name, False, {"rows": float(len(prompts))}, f"{error.what}: {error.got}")
    equal = np.array([a == b for a, b in zip(own, answers, strict=True)])
    most = max(1.0, EXCUSED_FRACTION * found.total)
    unexplained = int((found.alike & ~equal).sum())
    figures = {
        "decisions": float(found.total),
        "differing": float(found.differing),
        "excused": float(found.excused),
        "swapped": float(found.swapped),
        "rows": float(len(prompts)),
        "equal_rows": float(equal.sum()),
        "unexplained_rows": float(unexplained),
        "exact_ms_per_step": exact_ms,
        "reference_ms_per_step": 1e3 * found.reference_s / config.steps,
    }
    held = found.differing == 0 and found.excused <= most and unexplained == 0
    return Check(name, held, figures)


def _walk(
    engine: Engine,
    reference: Engine,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    bound: float,
) -> tuple[list[list[int]], Decisions]:
    """Decode with the reference; the engine predicts every canvas on the way."""
    model, count = engine.config, config.gen_length // config.steps
    canvas = rows.pad_left([tuple(each) for each in prompts], config.gen_length, model)
    length, sampling = canvas.tokens.shape[1], greedy(model, len(prompts))
    found = Decisions(alike=np.ones(len(prompts), np.bool_))
    session, plain = engine.session(), reference.session()
    try:
        for block in range(config.gen_length // config.block_length):
            numbers = np.full(len(prompts), block, np.int32)
            columns = rows.columns_of_blocks(numbers, length, config)
            session.fill(canvas, columns)
            for _ in range(config.block_length // count):
                tokens = np.take_along_axis(canvas.tokens, columns, axis=1)
                got = session.reuse(tokens, sampling)
                started = time.perf_counter()
                expected = plain.plain(canvas, columns, sampling)
                found.reference_s += time.perf_counter() - started
                for outputs in (got, expected):
                    require_finite(outputs)
                chosen = found.add(got, expected, tokens == model.mask_id, count, bound)
                tokens = np.where(chosen, expected.token, tokens)
                np.put_along_axis(canvas.tokens, columns, tokens, axis=1)
    finally:
        session.close()
        plain.close()
    return canvas.tokens[:, length - config.gen_length :].tolist(), found


def _timed_generation(
    runtime: Runtime, prompts: Sequence[Sequence[int]], config: GenerationConfig
) -> tuple[list[list[int]], float]:
    """Answers, and milliseconds per step of the second run."""
    batch = [list(prompt) for prompt in prompts]
    runtime.generate(batch, config)
    started = time.perf_counter()
    results = runtime.generate(batch, config)
    seconds = time.perf_counter() - started
    if not isinstance(results, list):
        raise EngineError("a batch gave a single result", got=type(results).__name__)
    steps = max(result.forwards for result in results)
    return [list(result.tokens) for result in results], seconds * 1e3 / steps
