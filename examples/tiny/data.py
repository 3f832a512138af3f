"""Problems as token arrays: prompts left-padded to one length, answers filled up with EOS.

Every prompt is padded on the left to ``PROMPT_LENGTH``, so the answer canvas begins at one column
in all rows. Pad keys are masked out of attention, and positions count from a row's first real
token: ``positions[b, n] = max(0, n − valid_from[b])``.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lacache_trt.demo.problems import Problem, Split, problem
from tiny.vocabulary import EOS, build_tokenizer

PROMPT_LENGTH = 64
GEN_LENGTH = 64
_CHUNK = 5000


@dataclass(frozen=True)
class Dataset:
    """Token ids as uint8: prompts [M, PROMPT_LENGTH], answers [M, GEN_LENGTH], and real lengths."""

    prompts: Tensor
    answers: Tensor
    prompt_lengths: Tensor
    answer_lengths: Tensor

    def __len__(self) -> int:
        return self.prompts.shape[0]

    def to(self, device: torch.device) -> Dataset:
        """The same rows on another device."""
        return Dataset(
            self.prompts.to(device),
            self.answers.to(device),
            self.prompt_lengths.to(device),
            self.answer_lengths.to(device),
        )


@dataclass(frozen=True)
class Inputs:
    """What the model reads besides tokens: positions [B, N] and a key mask [B, 1, N, N]."""

    positions: Tensor
    attention_mask: Tensor


def load(split: Split, count: int, seed: int, workers: int) -> Dataset:
    """Generate and tokenize the first ``count`` problems of a split on several processes."""
    jobs = [(split, first, min(first + _CHUNK, count), seed) for first in range(0, count, _CHUNK)]
    if workers <= 1:
        parts = [_encode(*job) for job in jobs]
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            parts = list(pool.map(_encode, *zip(*jobs, strict=True)))
    prompts, answers, prompt_lengths, answer_lengths = (
        torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True)
    )
    return Dataset(prompts, answers, prompt_lengths, answer_lengths)


def problems_of(split: Split, count: int, seed: int) -> list[Problem]:
    """The first problems of a split as text, for scoring."""
    return [problem(split, index, seed) for index in range(count)]


def model_inputs(prompt_lengths: Tensor, dtype: torch.dtype) -> Inputs:
    """Positions and an additive mask for rows of ``PROMPT_LENGTH + GEN_LENGTH`` columns."""
    columns = torch.arange(PROMPT_LENGTH + GEN_LENGTH, device=prompt_lengths.device)
    valid_from = (PROMPT_LENGTH - prompt_lengths.long())[:, None]
    positions = (columns - valid_from).clamp(min=0)
    pads = (columns < valid_from)[:, None, None, :]
    mask = torch.zeros(pads.shape, dtype=dtype, device=pads.device)
    mask = mask.masked_fill(pads, torch.finfo(dtype).min)
    return Inputs(positions, mask.expand(-1, 1, len(columns), -1).contiguous())


def _encode(
    split: Split, first: int, last: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = build_tokenizer()
    eos = tokenizer.token_to_id(EOS)
    chosen = [problem(split, index, seed) for index in range(first, last)]
    questions = [row.ids for row in tokenizer.encode_batch([item.question for item in chosen])]
    worked = [row.ids for row in tokenizer.encode_batch([item.answer_text for item in chosen])]
    prompts = np.full((len(chosen), PROMPT_LENGTH), eos, np.uint8)
    answers = np.full((len(chosen), GEN_LENGTH), eos, np.uint8)
    for row, (question, answer) in enumerate(zip(questions, worked, strict=True)):
        prompts[row, PROMPT_LENGTH - len(question) :] = question
        answers[row, : len(answer)] = answer
    prompt_lengths = np.array([len(ids) for ids in questions], np.int16)
    answer_lengths = np.array([len(ids) for ids in worked], np.int16)
    return prompts, answers, prompt_lengths, answer_lengths
