"""Bookkeeping of the semi-autoregressive loop: a batch of prompts as one left-padded canvas.

Every row ends at the same column N, so the generated part of every row is the last `gen_length`
columns and only the prompts' starts differ:

    row 0   pad pad  p   p   p  | M M M M | M M M M
    row 1    p   p   p   p   p  | M M M M | M M M M
                                  block 0   block 1

Rotary positions count from the row's first real column, so that a row is decoded alike alone and
in any batch (the LLaDA reference lets positions count the pads, which rotary embeddings only see
as rounding).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from lacache_trt.engines.base import Canvas
from lacache_trt.errors import CapacityError, InvalidRequestError
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.config import ModelConfig
from lacache_trt.validation import describe

Int = NDArray[np.int32]
Prompt = tuple[int, ...]

# `confidence_eos_eot_inf` of the LLaDA reference names <|eot_id|> by number. Checkpoints state
# only <|endoftext|> as their end token, so the number is needed where LLaDA's vocabulary is used.
LLADA_MASK_ID = 126336
LLADA_EOT_ID = 126348


def check_prompt(prompt: object, model: ModelConfig, gen_length: int) -> Prompt:
    """The token ids of one prompt as plain ints.

    Raises `InvalidRequestError` for an empty prompt, anything that is not a sequence of ints, an
    id outside the vocabulary and the mask id; `CapacityError` if prompt and answer together are
    longer than the model's context.
    """
    if isinstance(prompt, np.ndarray) and prompt.ndim == 1:
        prompt = prompt.tolist()
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Sequence):
        raise InvalidRequestError(
            "a prompt is not a sequence of token ids",
            got=describe(prompt),
            expected="a list of ints",
            fix="tokenize text first",
        )
    if not prompt:
        raise InvalidRequestError(
            "the prompt is empty",
            got="0 tokens",
            expected="at least one token",
            fix="write a prompt",
        )
    if len(prompt) + gen_length > model.max_length:
        raise CapacityError(
            "prompt and answer are longer than the model's context",
            got=f"{len(prompt)} prompt tokens + gen_length {gen_length}",
            expected=f"at most {model.max_length} together",
            fix=f"shorten the prompt or choose gen_length <= {model.max_length - len(prompt)}"
            if len(prompt) < model.max_length
            else f"shorten the prompt to at most {max(1, model.max_length - gen_length)} tokens",
        )
    return tuple(_check_token(index, token, model) for index, token in enumerate(prompt))


def _check_token(index: int, token: object, model: ModelConfig) -> int:
    if isinstance(token, bool) or not isinstance(token, Integral):
        raise InvalidRequestError(
            f"token {index} of the prompt is not an int",
            got=describe(token),
            expected="a list of ints",
            fix=_what_to_pass(token),
        )
    value = int(token)
    if not 0 <= value < model.vocab_size:
        raise InvalidRequestError(
            f"token {index} of the prompt is outside the vocabulary",
            got=describe(value),
            expected=f"0 to {model.vocab_size - 1}",
            fix="use the tokenizer of this checkpoint",
        )
    if value == model.mask_id:
        raise InvalidRequestError(
            f"token {index} of the prompt is the mask id",
            got=describe(value),
            expected="no mask in the prompt: the reference loop of LLaDA would treat the position "
            "as one more candidate, outside every block, and might overwrite it or not",
            fix="remove the token; filling gaps inside a prompt is not supported",
        )
    return value


def _what_to_pass(item: object) -> str:
    if isinstance(item, Mapping):
        return "pass runtime.codec.encode(runtime.codec.apply_chat_template(messages))"
    if isinstance(item, (str, Sequence)):
        return "pass token ids, or text as one string; a list of prompts only to generate"
    return "pass token ids, or text as one string"


def pad_left(
    prompts: Sequence[Prompt], gen_length: int, model: ModelConfig, length: int | None = None
) -> Canvas:
    """Checked prompts and their masked answers as one canvas of N columns.

    `length` sets N (an engine's bucket); by default the longest prompt + `gen_length`. Columns
    before a row's prompt hold the first end token, as LLaDA pads; nothing attends to them.
    """
    needed = max(len(prompt) for prompt in prompts) + gen_length
    columns = needed if length is None else length
    if columns < needed:
        raise CapacityError(
            "the canvas is too short for its prompts",
            got=f"{needed} columns needed",
            expected=f"at most {columns}",
            fix="choose a larger bucket, or shorten the prompts or gen_length",
        )
    pad = model.eos_ids[0] if model.eos_ids else 0
    tokens = np.full((len(prompts), columns), pad, np.int32)
    tokens[:, columns - gen_length :] = model.mask_id
    valid_from = np.empty(len(prompts), np.int32)
    for row, prompt in enumerate(prompts):
        valid_from[row] = columns - gen_length - len(prompt)
        tokens[row, valid_from[row] : columns - gen_length] = prompt
    valid_to = np.full(len(prompts), columns, np.int32)
    return Canvas(tokens, positions_from(valid_from, columns), valid_from, valid_to)


def positions_from(valid_from: Int, columns: int) -> Int:
    """Rotary positions max(0, n - valid_from[b]): int32 [B, N]."""
    offsets = np.arange(columns, dtype=np.int32)[None, :] - valid_from[:, None]
    positions: Int = np.maximum(offsets, 0).astype(np.int32)
    return positions


def columns_of_blocks(block: Int, columns: int, config: GenerationConfig) -> Int:
    """Canvas columns of each row's block: int32 [B] block indices -> int32 [B, Bk]."""
    start = columns - config.gen_length + block.astype(np.int32) * config.block_length
    return (start[:, None] + np.arange(config.block_length, dtype=np.int32)).astype(np.int32)


def unconditional_tokens(tokens: Int, gen_length: int, mask_id: int) -> Int:
    """The canvas without its prompts: int32 [B, N], every column before the answer masked."""
    masked = tokens.copy()
    masked[:, : tokens.shape[1] - gen_length] = mask_id
    return masked


def add_guidance_rows(canvas: Canvas, gen_length: int, mask_id: int) -> tuple[Canvas, Int]:
    """Append each row's unconditional twin: B rows -> 2 B rows and `guide_row` int32 [2 B].

    Row b is guided by row B + b, which guides itself (LLaDA's `cfg_scale`: the batch [x; x with
    the prompt masked]). Call it again when tokens were committed: the twins' answers follow.
    """
    rows = canvas.tokens.shape[0]
    twins = unconditional_tokens(canvas.tokens, gen_length, mask_id)
    doubled = Canvas(
        np.concatenate([canvas.tokens, twins]),
        np.concatenate([canvas.positions, canvas.positions]),
        np.concatenate([canvas.valid_from, canvas.valid_from]),
        np.concatenate([canvas.valid_to, canvas.valid_to]),
    )
    return doubled, np.tile(np.arange(rows, 2 * rows, dtype=np.int32), 2)


def mix_guidance(
    logits: NDArray[np.float32], guide_row: Int, cfg_scale: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Guided logits for policies that sample themselves: float32 [B, R, V] -> [B, R, V].

    guide + (cfg_scale + 1) (own - guide), LLaDA's rule; a row that guides itself is unchanged,
    bit for bit.
    """
    guided = logits.copy()
    for row in np.flatnonzero(guide_row != np.arange(len(guide_row))):
        guide = logits[guide_row[row]]
        guided[row] = guide + (cfg_scale[row] + np.float32(1)) * (logits[row] - guide)
    return guided


def suppressed_ids(config: GenerationConfig, model: ModelConfig) -> tuple[int, ...]:
    """Ids that are never predicted: the mask id, and the end token with `logits_eos_inf`."""
    ends = model.eos_ids[:1] if config.logits_eos_inf else ()
    return (model.mask_id, *ends)


def confidence_excluded_ids(config: GenerationConfig, model: ModelConfig) -> tuple[int, ...]:
    """Ids without confidence: every end token with `confidence_eos_eot_inf`, else none.

    The reference removes both end tokens at temperature 0, but above it only <|eot_id|> (an
    assignment meant for two arrays reaches one); here both are removed at any temperature.
    """
    if not config.confidence_eos_eot_inf:
        return ()
    turn_end = (LLADA_EOT_ID,) if model.mask_id == LLADA_MASK_ID else ()
    return tuple(dict.fromkeys((*model.eos_ids, *turn_end)))


def id_rows(ids: Sequence[int], rows: int) -> Int:
    """The same ids for every row: int32 [B, max(1, len(ids))], -1 where there is none."""
    return np.tile(np.array(tuple(ids) or (-1,), np.int32), (rows, 1))
