"""What the engine gets of a batch: canvases, block columns, windows, sampling inputs.

Rows advance independently: each has its own block and step. Only where the step that begins a
block is special do rows begin their blocks together, and a row whose block is complete waits for
the others: with `prefix` and `dual`, whose full forward must not refresh a row in the middle of
its block, and with `eos_truncation`. With guidance every row has an unconditional twin below it,
whose prompt is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lacache_trt.decoding import rows
from lacache_trt.decoding.layout import Layout, lay_out
from lacache_trt.decoding.policy import Policy
from lacache_trt.decoding.registry import POLICIES
from lacache_trt.engines.base import Canvas, Int, Sampling
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.config import ModelConfig
from lacache_trt.row import Row


class StepInputs:
    """The rows of a request batch, and the inputs of their next step."""

    def __init__(
        self,
        prompts: Sequence[rows.Prompt],
        config: GenerationConfig,
        model: ModelConfig,
        policy: Policy,
    ) -> None:
        self.config = config
        self.model = model
        self._policy = policy
        self._canvas = rows.pad_left(prompts, config.gen_length, model)
        self._rows = [Row(seed, config.num_blocks) for seed in config.row_seeds(len(prompts))]
        self._answer_start = self._canvas.tokens.shape[1] - config.gen_length
        self._temperature = 0.0 if POLICIES[config.policy].draws_tokens else config.temperature
        self._suppressed = rows.suppressed_ids(config, model)
        self._excluded = rows.confidence_excluded_ids(config, model)
        self._together = config.has_window or config.eos_truncation is not None
        self._steps_since_begin = 0
        self._group: list[int] = []
        self._group_rows: NDArray[np.int64]
        self._window: tuple[Int, Int, Int] | None = None
        self._layout: Layout
        self._block_columns: Int
        self._positions: Int
        self._constants: dict[int, dict[str, NDArray[Any]]] = {}
        self.needs_fill = True

    @property
    def looks_ahead(self) -> bool:
        """The next step predicts whole answers, to find out where they end."""
        return self.config.eos_truncation is not None and self._steps_since_begin == 0

    def regroup(self) -> tuple[Canvas, Int]:
        """Leave finished rows out; the canvas and block columns int32 [B, Bk] to fill from."""
        self._group = [index for index, row in enumerate(self._rows) if not row.finished]
        self._group_rows, self._window = np.array(self._group, np.int64)[:, None], None
        columns = self._canvas.tokens.shape[1]
        self._block_columns = rows.columns_of_blocks(self._of_rows("block"), columns, self.config)
        self._positions = self._canvas.positions[self._group_rows, self._block_columns]
        self._layout = lay_out(
            self._doubled(self._of_rows("block")),
            self._doubled(self._of_rows("end")),
            columns,
            self.config,
            block_aligned=self._together,
        )
        self.needs_fill = False
        return self._layout.pick(self._picked(self._group)), self._step_columns()

    def block_tokens(self) -> Int:
        """Current tokens int32 [B, Bk] of the columns that the step predicts, twins included."""
        return self._tokens_at(self._step_columns())

    def window(self) -> tuple[Int, Int, Int]:
        """Tokens and columns int32 [B, W] of the rows to run, and the block columns in them.

        `dual` runs the block, `prefix` the block and what follows it; a row whose answer was cut
        has pads of -1 behind.
        """
        if self._window is None:
            self._window = self._place_window()
        places, columns, block = self._window
        return self._doubled(self._tokens_of_canvas(places)), columns, block

    def sampling(self) -> Sampling:
        """Sampling inputs of the next step, twins included."""
        return self._sampling(self._group)

    def logit_columns(self) -> Int | None:
        """Columns whose logits are read on the host, twins included; None if there are none.

        The policy's (its block, then its answer columns), then the first one if it has to be
        kept from being an end token.
        """
        policy = self._policy
        if not (policy.needs_logits or policy.answer_columns or self.config.no_empty_answer):
            return None
        offset = self._layout.offset[:, None]
        answer = np.array(policy.answer_columns, np.int32) + self._answer_start
        parts = [answer + offset]
        if policy.needs_logits:
            parts.insert(0, self._doubled(self._block_columns) + offset)
        elif self._guards_first().any():
            parts.append(self._answer_start + offset)
        columns = np.concatenate(parts, axis=1).astype(np.int32)
        return columns if columns.shape[1] else None

    def _sampling(self, group: Sequence[int]) -> Sampling:
        count = len(group)
        if count not in self._constants:
            self._constants[count] = self._constant_sampling(count)
        return Sampling(
            seed=self._doubled(self._of_rows("seed", group)),
            step=self._doubled(self._of_rows("forwards", group)),
            **self._constants[count],
        )

    def _constant_sampling(self, count: int) -> dict[str, NDArray[Any]]:
        """Sampling inputs of a group of this size that no step changes."""
        total = 2 * count if self.config.cfg_scale > 0 else count
        guide = np.arange(total, dtype=np.int32)
        guide[:count] += total - count
        return {
            "temperature": np.full(total, self._temperature, np.float32),
            "guide_row": guide,
            "cfg_scale": np.full(total, self.config.cfg_scale, np.float32),
            "suppress_ids": rows.id_rows(self._suppressed, total),
            "confidence_exclude_ids": rows.id_rows(self._excluded, total),
        }

    def _place_window(self) -> tuple[Int, Int, Int]:
        """Canvas columns without twins, the engine's columns and its block columns: of a group."""
        block = self._step_columns()
        width = block.shape[1]
        if self.config.cache == "prefix":
            width = self._layout.index.shape[1] - int(block[0, 0])
        columns = (block[:, :1] + np.arange(width, dtype=np.int32)).astype(np.int32)
        places = self._places(columns)
        columns[columns >= self._layout.length[:, None]] = -1
        return places, columns, block

    def _in_group(self) -> list[Row]:
        return [self._rows[index] for index in self._group]

    def _of_rows(self, name: str, group: Sequence[int] | None = None) -> Int:
        chosen = self._group if group is None else group
        return np.array([getattr(self._rows[index], name) for index in chosen], np.int32)

    def _picked(self, group: Sequence[int]) -> Canvas:
        """The canvas's rows of a group, twins included."""
        picked = Canvas(*(values[list(group)] for values in vars(self._canvas).values()))
        if self.config.cfg_scale > 0:
            picked, _ = rows.add_guidance_rows(picked, self.config.gen_length, self.model.mask_id)
        return picked

    def _tokens_of_canvas(self, columns: Int) -> Int:
        """Current tokens int32 [B, M] of canvas columns, without twins."""
        tokens: Int = self._canvas.tokens[self._group_rows, columns]
        return tokens

    def _step_columns(self) -> Int:
        """What the step predicts, as the engine sees it, twins included.

        The blocks, or all of the answers: one width for every block, so that an engine that
        captures its graphs captures it once.
        """
        if self.looks_ahead:
            answer = np.arange(self._answer_start, self._layout.index.shape[1], dtype=np.int32)
            return np.tile(answer, (len(self._layout.index), 1))
        return self._doubled(self._block_columns) + self._layout.offset[:, None]

    def _tokens_at(self, columns: Int) -> Int:
        """Current tokens of columns of the answers, given as the engine sees them."""
        return self._doubled(self._tokens_of_canvas(self._places(columns)))

    def _places(self, columns: Int) -> Int:
        """Canvas columns int32 [B, M], without twins, of columns as the engine sees them."""
        count = len(self._group)
        places: Int = np.take_along_axis(self._layout.index[:count], columns[:count], axis=1)
        return places

    def _guards_first(self) -> NDArray[np.bool_]:
        """Rows whose next commit might make an empty answer: bool [B]."""
        if not self.config.no_empty_answer:
            return np.zeros(len(self._group), np.bool_)
        undecided = self._canvas.tokens[self._group, self._answer_start] == self.model.mask_id
        first_block = self._of_rows("block") == 0
        guarded: NDArray[np.bool_] = undecided & first_block
        return guarded

    def _doubled(self, values: Int) -> Int:
        return np.concatenate([values, values]) if self.config.cfg_scale > 0 else values
