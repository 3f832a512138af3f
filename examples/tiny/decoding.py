"""LLaDA's semi-autoregressive decoding in plain torch, to score a model while it trains.

The rule is that of https://github.com/ML-GSAI/LLaDA (generate.py) at temperature 0 with
low-confidence remasking, with three fixed points: the mask id is never chosen, confidences are
float32, and ties go to the lower position.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from lacache_trt.demo.problems import Problem, is_correct
from tiny.data import GEN_LENGTH, PROMPT_LENGTH, Dataset, model_inputs
from tiny.vocabulary import EOS, MASK, build_tokenizer


@torch.inference_mode()
def decode(
    model: LlamaForCausalLM, data: Dataset, steps: int, block_length: int, bf16: bool
) -> Tensor:
    """Generate a canvas [M, GEN_LENGTH] for every prompt, every row on the same schedule."""
    mask_id = build_tokenizer().token_to_id(MASK)
    device = data.prompts.device
    canvas = torch.full((len(data), GEN_LENGTH), mask_id, device=device)
    tokens = torch.cat([data.prompts.long(), canvas], dim=1)
    inputs = model_inputs(data.prompt_lengths, torch.bfloat16 if bf16 else torch.float32)
    columns = torch.arange(tokens.shape[1], device=device)
    block_steps = steps * block_length // GEN_LENGTH
    for start in range(PROMPT_LENGTH, tokens.shape[1], block_length):
        inside = (columns >= start) & (columns < start + block_length)
        for step in range(block_steps):
            count = block_length // block_steps + (step < block_length % block_steps)
            with _precision(device, bf16):
                logits = model(
                    input_ids=tokens,
                    position_ids=inputs.positions,
                    attention_mask=inputs.attention_mask,
                ).logits.float()
            logits[..., mask_id] = -torch.inf
            confidence, best = logits.softmax(dim=-1).max(dim=-1)
            confidence = confidence.masked_fill(~(inside & (tokens == mask_id)), -torch.inf)
            order = confidence.sort(dim=1, descending=True, stable=True).indices[:, :count]
            tokens.scatter_(1, order, best.gather(1, order))
    return tokens[:, PROMPT_LENGTH:]


def accuracy(
    model: LlamaForCausalLM,
    data: Dataset,
    problems: Sequence[Problem],
    *,
    steps: int,
    block_length: int,
    bf16: bool,
) -> float:
    """Share of problems whose text up to the first EOS ends in exactly the right number."""
    tokenizer = build_tokenizer()
    eos = tokenizer.token_to_id(EOS)
    canvas = decode(model, data, steps, block_length, bf16)
    canvas = canvas.masked_fill((canvas == eos).cumsum(dim=1) > 0, eos)
    texts = tokenizer.decode_batch(canvas.tolist(), skip_special_tokens=True)
    pairs = zip(problems, texts, strict=True)
    return sum(is_correct(item, text) for item, text in pairs) / len(problems)


def _precision(device: torch.device, bf16: bool) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()
