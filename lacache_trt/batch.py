"""The rows of one request batch while they are decoded.

A step's outputs become a policy's view, its commit becomes tokens, counters and events. A row that
ends keeps its place until the next `regroup`; from then on it takes no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lacache_trt.decoding import answers, rows
from lacache_trt.decoding.policy import Commit, StepView
from lacache_trt.engines.base import Canvas, Int, Sampling, StepOutputs
from lacache_trt.errors import EngineError
from lacache_trt.generation import FinishReason, GenerationResult, StepEvent
from lacache_trt.step_inputs import StepInputs

_PREDICTED = ("token", "confidence", "margin", "neg_entropy")


class Batch(StepInputs):
    """Decoding state of a batch of checked prompts."""

    leaving: Sequence[int] = ()
    """Rows whose policy has seen enough: their whole answers are predicted at once."""

    @property
    def active(self) -> bool:
        """Some row still has a mask to commit."""
        return not all(row.finished for row in self._rows)

    def look_ahead(self, outputs: StepOutputs) -> StepOutputs:
        """After a step that predicted whole answers: cut them, and go on with their blocks."""
        if not self.looks_ahead:
            return outputs
        guard = max(self.config.eos_guard, int(self.config.no_empty_answer))
        for place, row in enumerate(self._in_group()):
            reach = slice(self._answer_start, int(self._layout.length[place]))
            seen = self._layout.index[place, reach] - self._answer_start
            behind = seen >= max(row.block * self.config.block_length, guard)
            end = answers.first_end(
                outputs.token[place, : len(seen)][behind],
                outputs.confidence[place, : len(seen)][behind],
                seen[behind],
                self.model.eos_ids,
                self.config.eos_truncation or 0.0,
            )
            if end is not None:
                row.end = min(row.end, end // self.config.block_length + 1)
        # The caches of `exact` belong to the columns that were predicted, which now are others.
        self.needs_fill = self.config.cache == "exact"
        block = self._doubled(self._block_columns) - self._answer_start
        narrow = {n: np.take_along_axis(getattr(outputs, n), block, axis=1) for n in _PREDICTED}
        return replace(outputs, **narrow)

    def view(self, outputs: StepOutputs) -> StepView:
        """What the policy sees of a step: the rows themselves, without twins."""
        count = len(self._group)
        columns = self._block_columns
        tokens = self._tokens_of_canvas(columns)
        idle = np.array([row.idle for row in self._in_group()], np.bool_)
        logits = self._guided_logits(outputs)
        own = columns.shape[1] if self._policy.needs_logits else 0
        answer = own + len(self._policy.answer_columns)
        view = StepView(
            masked=(tokens == self.model.mask_id) & ~idle[:, None],
            token=outputs.token[:count],
            confidence=outputs.confidence[:count],
            margin=outputs.margin[:count],
            neg_entropy=outputs.neg_entropy[:count],
            logits=logits[:, :own] if own else None,
            positions=self._positions,
            seed=self._of_rows("seed").astype(np.int64),
            step=self._of_rows("forwards"),
            step_in_block=self._of_rows("step_in_block"),
            masked_at_start=np.full(count, self.config.block_length, np.int32),
            steps_per_block=self.config.steps_per_block,
            suppress_ids=self._suppressed,
            confidence_exclude_ids=self._excluded,
            answer_logits=logits[:, own:answer] if answer > own else None,
            memory=tuple(row.memory for row in self._in_group()),
        )
        guarded = self._guards_first()
        if not guarded.any():
            return view
        first = logits[:, 0] if own else logits[:, -1]
        return answers.without_empty(view, guarded, first, self.model.eos_ids, self._temperature)

    def apply(self, commit: Commit) -> list[StepEvent]:
        """Write the commits and count the step."""
        columns = self._block_columns
        self._steps_since_begin += 1
        leaving, events = [], []
        for place, index in enumerate(self._group):
            row = self._rows[index]
            if row.idle:
                continue
            chosen = columns[place, commit.selected[place]]
            tokens = commit.token[place, commit.selected[place]]
            self._canvas.tokens[index, chosen] = tokens
            row.memory = commit.memory[place] if commit.memory else None
            events.append(self._event(index, chosen, tokens))
            row.count_step(len(chosen))
            if commit.finished is not None and commit.finished[place]:
                leaving.append(index)
            else:
                self._check_bound(index)
        self.leaving = leaving
        return events

    def whole_answers(self) -> tuple[Canvas, Int, Sampling]:
        """Canvas, answer columns int32 [B, G] and sampling inputs of the rows in `leaving`."""
        canvas = self._picked(self.leaving)
        columns = np.arange(self._answer_start, canvas.tokens.shape[1], dtype=np.int32)
        return canvas, np.tile(columns, (len(canvas.tokens), 1)), self._sampling(self.leaving)

    def fill_in(self, outputs: StepOutputs) -> list[StepEvent]:
        """End the rows in `leaving`: every mask becomes what was predicted for it."""
        events = []
        for place, index in enumerate(self.leaving):
            generated, row = self.generated(index), self._rows[index]
            chosen = np.flatnonzero(generated == self.model.mask_id).astype(np.int32)
            generated[chosen] = outputs.token[place, chosen]
            events.append(self._event(index, chosen + self._answer_start, generated[chosen]))
            row.count_step(len(chosen))
            row.ended = bool(np.isin(generated, self.model.eos_ids).any())
            row.close_block(finished=True)
        return events

    def charge(self, fill_s: float, step_s: float) -> None:
        """Book the seconds of a fill and a step to the rows that take part."""
        for row in self._in_group():
            if not row.idle:
                row.fill_s += fill_s
                row.steps_s += step_s

    def advance(self) -> None:
        """Move rows whose block is complete to their next block, or end them."""
        for index in self._group:
            if not self._rows[index].idle:
                self._close_if_complete(index)
        unfinished = [row for row in self._rows if not row.finished]
        ready = [row for row in unfinished if row.waiting]
        refresh = self.config.refresh_every
        if ready and (not self._together or len(ready) == len(unfinished)):
            for row in ready:
                row.begin_block()
            self.needs_fill, self._steps_since_begin = True, 0
        elif refresh is not None and self._steps_since_begin % refresh == 0:
            self.needs_fill = True

    def generated(self, index: int) -> Int:
        """Tokens of the row's generated part, masks included."""
        return self._canvas.tokens[index, self._answer_start :]

    def answer(self, index: int) -> list[int]:
        """Tokens of the row's generated part up to the first end token, without masks."""
        kept: list[int] = []
        for token in self.generated(index).tolist():
            if token in self.model.eos_ids:
                break
            if token != self.model.mask_id:
                kept.append(token)
        return kept

    def result(self, index: int, text: str | None) -> GenerationResult:
        """The answer of a finished row."""
        tokens = tuple(int(token) for token in self.generated(index))
        row = self._rows[index]
        reason: FinishReason = "stop" if row.ended else "length"
        return GenerationResult(
            tokens=tokens,
            text=text,
            finish_reason=reason,
            forwards=row.forwards,
            tokens_per_forward=row.committed / row.forwards,
            blocks=tuple(row.timings),
        )

    def _guided_logits(self, outputs: StepOutputs) -> NDArray[np.float32]:
        """Logits float32 [B, R, V] of the rows themselves, guided by their twins."""
        if self.config.cfg_scale == 0 or not outputs.logits.shape[1]:
            return outputs.logits[: len(self._group)]
        sampling = self.sampling()
        guided = rows.mix_guidance(outputs.logits, sampling.guide_row, sampling.cfg_scale)
        return guided[: len(self._group)]

    def _block(self, index: int) -> Int:
        """Tokens of the row's block."""
        first = self._rows[index].block * self.config.block_length
        return self.generated(index)[first : first + self.config.block_length]

    def _close_if_complete(self, index: int) -> None:
        """End the row's block if nothing of it is left to decode, and the row if it was the last.

        What was not decoded becomes the first end token, as the accelerators' loops do.
        """
        row, tokens, config = self._rows[index], self._block(index), self.config
        mask_id, eos_ids = self.model.mask_id, self.model.eos_ids
        over = config.stop_in_block and answers.is_complete(tokens, mask_id, eos_ids)
        if not over and (tokens == mask_id).any():
            return
        ended = config.stop_at_eos and bool(np.isin(tokens, eos_ids).any())
        finished = over or ended or row.block + 1 == row.end
        row.close_block(finished=finished)
        if finished:
            generated = self.generated(index)
            row.ended = bool(np.isin(generated, eos_ids).any())
            generated[generated == mask_id] = (*eos_ids, 0)[0]

    def _event(self, index: int, columns: Int, tokens: Int) -> StepEvent:
        row = self._rows[index]
        return StepEvent(
            row=index,
            step=row.forwards,
            block=row.block,
            columns=tuple(int(column) - self._answer_start for column in columns),
            tokens=tuple(int(token) for token in tokens),
        )

    def _check_bound(self, index: int) -> None:
        """No policy may go on for ever."""
        row = self._rows[index]
        # One more than either rule needs: the step that commits a block's first position alone.
        bound = max(self.config.steps_per_block, self.config.block_length) + 1
        left = int((self._block(index) == self.model.mask_id).sum())
        if row.step_in_block >= bound and left:
            raise EngineError(
                f"policy {self.config.policy!r} left masks after its last step",
                got=f"{left} masks after {bound} steps in block {row.block}",
                expected="a block without masks",
                fix="this is a defect of the policy; please report it",
            )
