"""The masked-diffusion objective: which answer tokens a training row hides, and their weight.

LLaDA fine-tuning (https://arxiv.org/abs/2502.09992, algorithm 2) draws t ~ U(0, 1), hides each
answer token with probability t and minimises

    −1/(t·L) Σ_{i hidden} log p(x_i | prompt, visible tokens).

Here exactly m = ⌈t·L⌉ tokens are hidden, which has the same expectation and less variance (as
in the paper's likelihood estimate), with t stratified over the batch.

Semi-autoregressive decoding shows the model other states: all before the current block is clean,
all after it is hidden. ``SAR_SHARE`` of the rows therefore get a block of 8, 16, 32 tokens or the
whole canvas, take the loss inside it, and hide everything behind it. As decoding tends to run from
left to right, half of these rows prefer to hide the later tokens of the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

SAR_SHARE = 0.6
ANY_BLOCK_SHARE = 0.15
BLOCK_LENGTHS = (8, 16, 32)
STEEPEST = 8.0


@dataclass(frozen=True)
class Hidden:
    """Canvas positions [B, G] that are replaced by the mask token, and their loss weights."""

    hidden: Tensor
    weight: Tensor


def draw_hidden(answer_lengths: Tensor, gen_length: int, generator: torch.Generator) -> Hidden:
    """Draw what each row hides; see the module's docstring."""
    rows, device = len(answer_lengths), answer_lengths.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, generator=generator)

    sar = uniform(rows) < SAR_SHARE
    lengths = torch.tensor([*BLOCK_LENGTHS, gen_length], device=device)
    choice = (uniform(rows) * len(lengths)).long()
    block = torch.where(sar, lengths[choice], gen_length)
    useful = (answer_lengths.long() + block) // block  # blocks up to the first EOS
    blocks = torch.where(uniform(rows) < ANY_BLOCK_SHARE, gen_length // block, useful)
    blocks = blocks.clamp(max=gen_length // block)
    start = (uniform(rows) * blocks).long() * block
    slope = torch.where(sar, STEEPEST * (uniform(rows) - 0.5).clamp(min=0), 0.0)
    strata = torch.randperm(rows, device=device, generator=generator)
    time = (strata + uniform(rows)) / rows
    count = (time * block).ceil().long().clamp(min=1)

    offset = torch.arange(gen_length, device=device) - start[:, None]
    inside = (offset >= 0) & (offset < block[:, None])
    score = uniform(rows, gen_length) + slope[:, None] * offset / block[:, None]
    score = score.masked_fill(~inside, -torch.inf)
    order = score.argsort(dim=1, descending=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(gen_length, device=device).expand(rows, -1)
    )
    scored = rank < count[:, None]
    return Hidden(scored | (offset >= block[:, None]), scored / count[:, None])


def masked_loss(logits: Tensor, answers: Tensor, weight: Tensor) -> Tensor:
    """Mean over rows of the weighted cross-entropy of the hidden tokens, in float32."""
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), answers.flatten(), reduction="none"
    )
    return (losses * weight.flatten()).sum() / len(answers)
