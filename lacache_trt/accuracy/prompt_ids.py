"""Prompts that a model is watched on, as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lacache_trt.decoding.rows import check_prompt
from lacache_trt.errors import LaCacheError
from lacache_trt.model.config import ModelConfig


def prompt_ids(
    prompts: Sequence[str | list[int]],
    encode: Callable[[str], list[int]],
    config: ModelConfig,
    gen_length: int,
    places: Sequence[str] | None = None,
) -> list[tuple[int, ...]]:
    """The ids of prompts that leave room for an answer of `gen_length` tokens.

    Args:
        prompts: text or token ids.
        encode: from text to ids; not called if there is no text.
        config: of the model.
        gen_length: tokens of an answer.
        places: what an error calls each prompt; by default its number.

    Raises:
        InvalidRequestError: a prompt is empty or has an id that the model does not know.
        CapacityError: it is too long.
    """
    places = places or [f"prompt {number}" for number in range(1, len(prompts) + 1)]
    found = []
    for prompt, place in zip(prompts, places, strict=True):
        try:
            ids = encode(prompt) if isinstance(prompt, str) else prompt
            found.append(check_prompt(ids, config, gen_length))
        except LaCacheError as error:
            raise type(error)(
                f"{place}: {error.what}", got=error.got, expected=error.expected, fix=error.fix
            ) from error
    return found
