"""LLaDA's schedule, greedy, over whole batches in torch: the tokens that `Runtime` gives.

One `plain` step at a time on whatever device the model lives: every row of a batch is at the same
step of the same block, so nothing waits for the host. Rows that an end token has finished leave
the batch between two blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lacache_trt.decoding import rows
from lacache_trt.engines.base import Canvas
from lacache_trt.errors import InvalidRequestError, NumericalError
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.config import ModelConfig
from lacache_trt.model.programs import PlainProgram
from lacache_trt.model.transformer import Transformer

Before = Callable[[int, int], None]


def equal_lengths(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Indices grouped by length, at most `most` at once: a group needs no pads.

    Without pads a rule that looks at a whole sequence sees what it would see in a batch of one.
    """
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    for length in sorted(by_length):
        members = by_length[length]
        for first in range(0, len(members), most):
            yield members[first : first + most]


def on_device(canvas: Canvas, device: torch.device) -> tuple[Tensor, ...]:
    """tokens, positions, valid_from and valid_to as tensors."""
    arrays = (canvas.tokens, canvas.positions, canvas.valid_from, canvas.valid_to)
    return tuple(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays)


def predict(
    model: Transformer, state: tuple[Tensor, ...], columns: Tensor, logits: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Greedy token int32 and confidence float32 [B, Bk] of a block, and its raw logits.

    Args:
        model: runs `PlainProgram`, so a prediction is what an engine's plain graph gives.
        state: as `on_device` gives it.
        columns: int32 [B, Bk], the block.
        logits: return float32 [B, Bk, V], else nothing [B, 0, V].
    """
    count, device = len(columns), columns.device
    zeros = torch.zeros(count, device=device)
    nothing = torch.zeros(count, dtype=torch.int32, device=device)
    rows_themselves = torch.arange(count, dtype=torch.int32, device=device)
    suppressed = torch.full((count, 1), model.config.mask_id, dtype=torch.int32, device=device)
    asked = columns if logits else columns[:, :0]
    sampling = (zeros, nothing, nothing, rows_themselves, zeros, suppressed, suppressed * 0 - 1)
    found = PlainProgram(model)(*state, columns, *sampling, asked)
    return found[0], found[1], found[4]


@torch.inference_mode()
def decode(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    device: torch.device,
    before_step: Before | None = None,
) -> np.ndarray:
    """The generated part of each prompt: int32 [B, gen_length].

    Args:
        model: on `device`.
        prompts: token ids; one length spares the pads.
        config: policy `schedule` with low-confidence remasking at temperature 0.
        device: where to compute.
        before_step: called with the block and the step in it before each forward.

    Raises:
        InvalidRequestError: the settings ask for another policy.
        NumericalError: the model produced NaN or infinite logits.
    """
    _check(config)
    facts = model.config
    checked = [tuple(prompt) for prompt in prompts]
    canvas = rows.pad_left(checked, config.gen_length, facts)
    state = on_device(canvas, device)
    answers = torch.full((len(checked), config.gen_length), _filler(facts), device=device)
    answers = answers.to(torch.int32)
    alive = torch.arange(len(checked), device=device)
    for block in range(config.num_blocks):
        found = _decode_block(model, state, block, config, before_step)
        columns = slice(block * config.block_length, (block + 1) * config.block_length)
        answers[alive, columns] = found
        if config.stop_at_eos:
            ends = torch.tensor(facts.eos_ids, device=device, dtype=found.dtype)
            going = ~torch.isin(found, ends).any(dim=1)
            alive, state = alive[going], tuple(part[going] for part in state)
        if not len(alive):
            break
    generated: np.ndarray = answers.cpu().numpy()
    return generated


def _decode_block(
    model: Transformer,
    state: tuple[Tensor, ...],
    block: int,
    config: GenerationConfig,
    before_step: Before | None,
) -> Tensor:
    """Denoise one block of every row in place; its tokens int32 [B, Bk]."""
    tokens, width = state[0], config.block_length
    start = tokens.shape[1] - config.gen_length + block * width
    columns = torch.arange(start, start + width, device=tokens.device, dtype=torch.int32)
    columns = columns.expand(len(tokens), -1).contiguous()
    current = tokens[:, start : start + width]
    finite = torch.ones((), dtype=torch.bool, device=tokens.device)
    left = width
    for step in range(config.steps_per_block):
        if left == 0:
            break
        if before_step is not None:
            before_step(block, step)
        token, confidence, _ = predict(model, state, columns)
        finite &= torch.isfinite(confidence).all()
        count = width // config.steps_per_block + (step < width % config.steps_per_block)
        ranked = confidence.masked_fill(current != model.config.mask_id, -torch.inf)
        chosen = ranked.sort(dim=1, descending=True, stable=True).indices[:, :count]
        current.scatter_(1, chosen, token.gather(1, chosen))
        left -= count
    if not bool(finite):
        raise NumericalError(
            "the model produced NaN or infinite logits",
            got=f"block {block} of a batch of {len(tokens)}",
            expected="finite confidences",
            fix="look at the activations of this scheme: `lacache-trt bench activations`",
        )
    return current.clone()


def _check(config: GenerationConfig) -> None:
    wanted = ("schedule", "low_confidence", 0.0, 0.0, False, False)
    got = (
        config.policy,
        config.remasking,
        config.temperature,
        config.cfg_scale,
        config.logits_eos_inf,
        config.confidence_eos_eot_inf,
    )
    if got != wanted:
        raise InvalidRequestError(
            "the batched loop has one policy",
            got=f"policy={got[0]}, remasking={got[1]}, temperature={got[2]}, cfg_scale={got[3]}",
            expected="policy schedule, remasking low_confidence, temperature 0, no guidance",
            fix="use lacache_trt.Runtime for anything else",
        )


def _filler(config: ModelConfig) -> int:
    """What stands after an early stop, as in `Batch`."""
    return (*config.eos_ids, 0)[0]
