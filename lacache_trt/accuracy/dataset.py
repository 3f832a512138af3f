"""Word problems as token ids, and partly masked answers on which predictions are compared.

A state of a problem is its prompt, the worked answer up to a block, the block with some of its
tokens masked, and masks after it: what the model was trained to complete. Four shares of the block
are masked, nested and at seeded positions. The same states are given to every candidate, so the
predictions on them can be compared pair by pair, whoever computes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lacache_trt.decoding import rows
from lacache_trt.demo.problems import Problem, Split, is_correct, problem
from lacache_trt.demo.shipped import SETTINGS
from lacache_trt.engines.base import Canvas, Int
from lacache_trt.errors import CheckpointError
from lacache_trt.model.config import ModelConfig
from lacache_trt.text import TOKENIZER_FILE, parse_tokenizer

MASKED_SHARES = (1.0, 0.75, 0.5, 0.25)


@dataclass(frozen=True)
class State:
    """One block of some problems, partly masked.

    Attributes:
        members: indices of the problems [B].
        canvas: all of one prompt length, so without pads.
        columns: int32 [B, Bk] the block.
        masked: bool [B, Bk] positions to predict.
    """

    members: list[int]
    canvas: Canvas
    columns: Int
    masked: NDArray[np.bool_]


class Problems:
    """The first problems of a split, tokenized for a checkpoint."""

    def __init__(self, directory: Path, model: ModelConfig, split: Split, count: int) -> None:
        path = directory / TOKENIZER_FILE
        if not path.is_file():
            raise CheckpointError(
                "the checkpoint has no tokenizer",
                got=f"no {TOKENIZER_FILE} in {directory}",
                expected="tiny-llada or a model trained on the same problems",
                fix="train one: examples/train_tiny.py",
            )
        self._tokenizer = parse_tokenizer(path.read_bytes())
        self._model = model
        self.items: list[Problem] = [problem(split, index) for index in range(count)]
        self.prompts = self._ids([item.question for item in self.items])

    def __len__(self) -> int:
        return len(self.items)

    @cached_property
    def answers(self) -> Int:
        """The worked answers, filled up with the end token: int32 [n, gen_length]."""
        filled = np.full((len(self), SETTINGS.gen_length), self._model.eos_ids[0], np.int32)
        for row, ids in enumerate(self._ids([item.answer_text for item in self.items])):
            filled[row, : len(ids)] = ids[: SETTINGS.gen_length]
        return filled

    def correct(self, generated: Int) -> NDArray[np.bool_]:
        """Whether each generated answer int32 [n, gen_length] ends in the right number."""
        texts = self._tokenizer.decode_batch(
            [self._until_end(row.tolist()) for row in generated], skip_special_tokens=True
        )
        pairs = zip(self.items, texts, strict=True)
        return np.array([is_correct(item, text) for item, text in pairs], np.bool_)

    def states(self, members: list[int], seed: int) -> Iterator[State]:
        """Every block at every masked share of problems with one prompt length."""
        config = SETTINGS
        prompts = [tuple(self.prompts[index]) for index in members]
        base = rows.pad_left(prompts, config.gen_length, self._model)
        orders = self._orders(members, seed)
        for block in range(config.num_blocks):
            first = block * config.block_length
            last = first + config.block_length
            columns = rows.columns_of_blocks(
                np.full(len(members), block, np.int32), base.tokens.shape[1], config
            )
            for share in MASKED_SHARES:
                masked = orders[:, block] < round(share * config.block_length)
                answer = np.full((len(members), config.gen_length), self._model.mask_id, np.int32)
                answer[:, :last] = self.answers[members, :last]
                answer[:, first:last][masked] = self._model.mask_id
                tokens = base.tokens.copy()
                tokens[:, -config.gen_length :] = answer
                canvas = Canvas(tokens, base.positions, base.valid_from, base.valid_to)
                yield State(members, canvas, columns, masked)

    def _orders(self, members: Sequence[int], seed: int) -> NDArray[np.int64]:
        """Rank of each position in the order of masking: int64 [B, blocks, Bk]."""
        shape = (SETTINGS.num_blocks, SETTINGS.block_length)
        drawn = [np.random.default_rng((seed, index)).random(shape) for index in members]
        return np.argsort(np.argsort(np.stack(drawn), axis=-1), axis=-1)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [list(row.ids) for row in encoded]

    def _until_end(self, ids: list[int]) -> list[int]:
        ends = [place for place, token in enumerate(ids) if token in self._model.eos_ids]
        kept = ids[: ends[0]] if ends else ids
        return [token for token in kept if token != self._model.mask_id]
