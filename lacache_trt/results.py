"""What comes back from a generation: an event per step, the answer, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class StepEvent:
    """What one denoising step committed in one row.

    Attributes:
        row: index of the prompt in the request.
        step: 0 at the row's first forward.
        block: index of the row's block.
        columns: committed columns, ascending; 0 is the first generated token.
        tokens: their token ids.
        text: the answer so far without masks, or None without a tokenizer.
    """

    row: int
    step: int
    block: int
    columns: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True)
class BlockTiming:
    """Where the time of one block of one row went; a batch's rows share their steps' time.

    Attributes:
        block: index of the block.
        forwards: denoising steps that the block took.
        fill_s: seconds to compute the caches; 0 with `cache="none"`.
        steps_s: seconds of the denoising steps, policy included.
    """

    block: int
    forwards: int
    fill_s: float
    steps_s: float


@dataclass(frozen=True)
class GenerationResult:
    """The answer to one prompt.

    Attributes:
        tokens: the generated part, `gen_length` ids; after an early stop the first end id fills
            what was not decoded.
        text: its text up to the first end token, or None without a tokenizer.
        finish_reason: `stop` if an end token was generated, else `length`.
        forwards: model steps of this row.
        tokens_per_forward: tokens that the model committed, per forward.
        blocks: timings of the blocks that were decoded.
    """

    tokens: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    forwards: int
    tokens_per_forward: float
    blocks: tuple[BlockTiming, ...]
