"""The rows of one request batch while they are decoded: tokens, blocks, counters, timings.

Rows advance independently: each has its own block and step. A row that ends keeps its place until
the next `regroup`, when the caches are computed anew; from then on it takes no part.
With guidance every row has an unconditional twin below it, whose prompt is masked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from lacache_trt.decoding import rows
from lacache_trt.decoding.policy import Commit, StepView
from lacache_trt.engines.base import Canvas, Int, Sampling, StepOutputs
from lacache_trt.errors import EngineError
from lacache_trt.generation import (
    BlockTiming,
    FinishReason,
    GenerationConfig,
    GenerationResult,
    StepEvent,
)
from lacache_trt.model.config import ModelConfig


class Batch:
    """Decoding state of a batch of checked prompts."""

    def __init__(
        self,
        prompts: Sequence[rows.Prompt],
        config: GenerationConfig,
        model: ModelConfig,
        engine_samples: bool,
    ) -> None:
        count = len(prompts)
        self.config = config
        self.model = model
        self._canvas = rows.pad_left(prompts, config.gen_length, model)
        self._seeds = np.array(config.row_seeds(count), np.int32)
        self._temperature = config.temperature if engine_samples else 0.0
        self._suppressed = rows.suppressed_ids(config, model)
        self._excluded = rows.confidence_excluded_ids(config, model)
        self._block = np.zeros(count, np.int32)
        self._step_in_block = np.zeros(count, np.int32)
        self._forwards = np.zeros(count, np.int32)
        self._committed = np.zeros(count, np.int32)
        self._finished = np.zeros(count, bool)
        self._group = np.arange(count)
        self._timings: list[list[BlockTiming]] = [[] for _ in range(count)]
        self._fill_s = np.zeros(count)
        self._steps_s = np.zeros(count)
        self.needs_fill = True

    @property
    def active(self) -> bool:
        """Some row still has a mask to commit."""
        return not self._finished.all()

    def regroup(self) -> tuple[Canvas, Int]:
        """Leave finished rows out; the canvas and block columns int32 [B, Bk] to fill from."""
        self._group = np.flatnonzero(~self._finished)
        self.needs_fill = False
        picked = Canvas(*(values[self._group] for values in vars(self._canvas).values()))
        if self.config.cfg_scale > 0:
            picked, _ = rows.add_guidance_rows(picked, self.config.gen_length, self.model.mask_id)
        return picked, self._doubled(self._block_columns())

    def block_tokens(self) -> Int:
        """Current tokens int32 [B, Bk] of the blocks, twins included."""
        tokens = np.take_along_axis(self._group_tokens(), self._block_columns(), axis=1)
        return self._doubled(tokens)

    def sampling(self) -> Sampling:
        """Sampling inputs of the next step, twins included."""
        count = len(self._group)
        total = 2 * count if self.config.cfg_scale > 0 else count
        guide = np.arange(total, dtype=np.int32)
        guide[:count] += total - count
        return Sampling(
            temperature=np.full(total, self._temperature, np.float32),
            seed=self._doubled(self._seeds[self._group]),
            step=self._doubled(self._forwards[self._group]),
            guide_row=guide,
            cfg_scale=np.full(total, self.config.cfg_scale, np.float32),
            suppress_ids=rows.id_rows(self._suppressed, total),
            confidence_exclude_ids=rows.id_rows(self._excluded, total),
        )

    def logit_columns(self) -> Int:
        """Columns whose logits a sampling policy needs: the blocks, twins included."""
        return self._doubled(self._block_columns())

    def view(self, outputs: StepOutputs) -> StepView:
        """What the policy sees of a step: the rows themselves, without twins."""
        count = len(self._group)
        columns = self._block_columns()
        tokens = np.take_along_axis(self._group_tokens(), columns, axis=1)
        logits = None
        if outputs.logits.shape[1]:
            sampling = self.sampling()
            guided = rows.mix_guidance(outputs.logits, sampling.guide_row, sampling.cfg_scale)
            logits = guided[:count]
        return StepView(
            masked=(tokens == self.model.mask_id) & ~self._finished[self._group, None],
            token=outputs.token[:count],
            confidence=outputs.confidence[:count],
            margin=outputs.margin[:count],
            neg_entropy=outputs.neg_entropy[:count],
            logits=logits,
            positions=np.take_along_axis(self._canvas.positions[self._group], columns, axis=1),
            seed=self._seeds[self._group].astype(np.int64),
            step=self._forwards[self._group],
            step_in_block=self._step_in_block[self._group],
            masked_at_start=np.full(count, self.config.block_length, np.int32),
            steps_per_block=self.config.steps_per_block,
            suppress_ids=self._suppressed,
        )

    def apply(self, commit: Commit) -> list[StepEvent]:
        """Write the commits, count the step, advance rows whose block is complete."""
        columns = self._block_columns()
        events = []
        for place, row in enumerate(self._group):
            if self._finished[row]:
                continue
            chosen = np.flatnonzero(commit.selected[place]).astype(np.int32)
            tokens = commit.token[place, chosen]
            self._canvas.tokens[row, columns[place, chosen]] = tokens
            self._committed[row] += len(chosen)
            events.append(self._event(int(row), chosen, tokens))
            self._count_step(int(row))
        return events

    def charge(self, fill_s: float, step_s: float) -> None:
        """Book the seconds of a fill and a step to the rows that take part."""
        running = self._group[~self._finished[self._group]]
        self._fill_s[running] += fill_s
        self._steps_s[running] += step_s

    def generated(self, row: int) -> Int:
        """Tokens of the row's generated part, masks included."""
        return self._canvas.tokens[row, -self.config.gen_length :]

    def advance(self) -> None:
        """Move rows whose block has no mask left to their next block, or end them."""
        columns = self._block_columns()
        for place, row in enumerate(self._group):
            tokens = self._canvas.tokens[row, columns[place]]
            if self._finished[row] or (tokens == self.model.mask_id).any():
                continue
            self._close_block(int(row))
            ended = self.config.stop_at_eos and np.isin(tokens, self.model.eos_ids).any()
            self._block[row] += 1
            if ended or self._block[row] == self.config.num_blocks:
                self._finish(int(row))
            else:
                self.needs_fill = True

    def result(self, row: int, text: str | None) -> GenerationResult:
        """The answer of a finished row."""
        tokens = tuple(int(token) for token in self.generated(row))
        forwards = int(self._forwards[row])
        reason: FinishReason = "stop" if set(tokens) & set(self.model.eos_ids) else "length"
        return GenerationResult(
            tokens=tokens,
            text=text,
            finish_reason=reason,
            forwards=forwards,
            tokens_per_forward=int(self._committed[row]) / forwards,
            blocks=tuple(self._timings[row]),
        )

    def _group_tokens(self) -> Int:
        return self._canvas.tokens[self._group]

    def _block_columns(self) -> Int:
        last = np.minimum(self._block[self._group], self.config.num_blocks - 1)
        return rows.columns_of_blocks(last, self._canvas.tokens.shape[1], self.config)

    def _doubled(self, values: Int) -> Int:
        return np.concatenate([values, values]) if self.config.cfg_scale > 0 else values

    def _event(self, row: int, chosen: Int, tokens: Int) -> StepEvent:
        first = int(self._block[row]) * self.config.block_length
        return StepEvent(
            row=row,
            step=int(self._forwards[row]),
            block=int(self._block[row]),
            columns=tuple(first + int(place) for place in chosen),
            tokens=tuple(int(token) for token in tokens),
        )

    def _count_step(self, row: int) -> None:
        self._forwards[row] += 1
        self._step_in_block[row] += 1
        bound = max(self.config.steps_per_block, self.config.block_length)
        block = self.generated(row)[int(self._block[row]) * self.config.block_length :]
        left = block[: self.config.block_length] == self.model.mask_id
        if self._step_in_block[row] >= bound and left.any():
            raise EngineError(
                f"policy {self.config.policy!r} left masks after its last step",
                got=f"{int(left.sum())} masks after {bound} steps in block {self._block[row]}",
                expected="a block without masks",
                fix="this is a defect of the policy; please report it",
            )

    def _close_block(self, row: int) -> None:
        timing = BlockTiming(
            block=int(self._block[row]),
            forwards=int(self._step_in_block[row]),
            fill_s=float(self._fill_s[row]),
            steps_s=float(self._steps_s[row]),
        )
        self._timings[row].append(timing)
        self._step_in_block[row] = 0
        self._fill_s[row] = self._steps_s[row] = 0.0

    def _finish(self, row: int) -> None:
        """What was not decoded becomes the first end token, as the accelerators' loops do."""
        self._finished[row] = True
        generated = self.generated(row)
        generated[generated == self.model.mask_id] = (*self.model.eos_ids, 0)[0]


class Deadline:
    """When a request must be over; `GenerationConfig.deadline_s` from its start."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """The time is over."""
        return self._end is not None and time.monotonic() >= self._end
