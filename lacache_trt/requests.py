"""Checks of what a caller hands to `Runtime`, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lacache_trt.decoding.policy import Policy
from lacache_trt.engines.base import Engine
from lacache_trt.errors import CapacityError, InvalidRequestError
from lacache_trt.generation import MAX_LENGTH, GenerationConfig
from lacache_trt.validation import Interval, check_flag, check_integer, describe

PromptLike = str | Sequence[int]


@dataclass(frozen=True)
class Limits:
    """What one call may ask for; None leaves it to the engine and the model.

    Attributes:
        max_batch: most prompts of one call.
        max_length: most columns, prompt and generated part together.
    """

    max_batch: int | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.max_batch is not None:
            check_integer("max_batch", self.max_batch, Interval(1, 2**31 - 1))
        if self.max_length is not None:
            check_integer("max_length", self.max_length, Interval(1, MAX_LENGTH))

    def check_batch(self, rows: int, engine: Engine) -> None:
        """Refuse an empty batch, and one larger than the limit or the engine's own."""
        if rows == 0:
            raise InvalidRequestError(
                "no prompt was given",
                got="an empty list",
                expected="at least one prompt",
                fix="leave the call out, or pass a prompt",
            )
        limits = (self.max_batch, engine.capabilities.max_batch)
        most = min((limit for limit in limits if limit is not None), default=rows)
        if rows > most:
            raise CapacityError(
                "too many prompts in one call",
                got=rows,
                expected=f"at most {most}",
                fix="split the batch, or load with a larger max_batch",
            )

    def check_length(self, columns: int) -> None:
        """Refuse a canvas longer than the limit."""
        if self.max_length is not None and columns > self.max_length:
            raise CapacityError(
                "prompt and generated part are longer than this runtime allows",
                got=f"{columns} columns",
                expected=f"at most {self.max_length}",
                fix="shorten the prompt or gen_length, or load with a larger max_length",
            )


def engine_directory(directory: object) -> Path:
    """The path that `Runtime.load` was given."""
    if not isinstance(directory, (str, Path)):
        raise InvalidRequestError(
            "the engine directory is not a path",
            got=describe(directory),
            expected="a str or a pathlib.Path",
            fix="pass the directory that `lacache-trt build` wrote",
        )
    return Path(directory)


def check_arguments(config: object, raw: object, cancel: object, engine: Engine) -> None:
    """Types of a call's settings, and that the engine has the cache asked for."""
    if not isinstance(config, GenerationConfig):
        raise InvalidRequestError(
            "config is not a GenerationConfig",
            got=describe(config),
            expected="a GenerationConfig, or None for the defaults",
            fix="GenerationConfig(gen_length=..., block_length=..., steps=...)",
        )
    check_flag("raw", raw)
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise InvalidRequestError(
            "cancel is not an event",
            got=describe(cancel),
            expected="a threading.Event, or None",
            fix="pass an event and set it to stop the call",
        )
    if config.cache not in engine.capabilities.caches:
        raise _missing_cache(config, engine)


def _missing_cache(config: GenerationConfig, engine: Engine) -> InvalidRequestError:
    """The error of a cache that this engine lacks, though its kind may have it."""
    what, fix = f"the {engine.name} engine has no cache={config.cache!r}", "choose one of these"
    if config.has_window and engine.capabilities.window_fix is not None:
        what = f"this {engine.name} engine was built without the graphs of cache={config.cache!r}"
        fix = f"choose one of these, or {engine.capabilities.window_fix}"
    return InvalidRequestError(
        what,
        got=f"cache={config.cache!r}",
        expected=", ".join(sorted(engine.capabilities.caches)),
        fix=fix,
    )


def check_logits(config: GenerationConfig, policy: Policy, engine: Engine) -> None:
    """Refuse what needs logits on the host if the engine returns none."""
    needed = policy.needs_logits or policy.answer_columns or config.no_empty_answer
    if needed and not engine.capabilities.logits:
        raise InvalidRequestError(
            f"these settings read logits, and this {engine.name} engine returns none",
            got=f"policy={config.policy!r}",
            expected="settings that need only tokens and confidences",
            fix="use policy='schedule' or 'threshold', or build an engine that returns logits",
        )


def as_prompts(prompt: object) -> tuple[list[PromptLike], bool]:
    """The prompts of a call, and whether it was one prompt and not a list of them."""
    if isinstance(prompt, str) or _is_token_list(prompt):
        return [prompt], True  # type: ignore[list-item]
    unordered = isinstance(prompt, (Mapping, Set))
    if unordered or not isinstance(prompt, Iterable) or getattr(prompt, "ndim", 1) == 0:
        raise InvalidRequestError(
            "a prompt is neither text nor token ids",
            got=describe(prompt),
            expected="a string, a list of ints, or a list of either",
            fix="pass text, or token ids as a list",
        )
    return list(prompt), False


def one_prompt(prompt: PromptLike) -> list[PromptLike]:
    """The only prompt of a call; a list of prompts is refused, which only `generate` takes."""
    if isinstance(prompt, (list, tuple)) and prompt and _is_prompt(prompt[0]):
        raise InvalidRequestError(
            "stream takes one prompt, not a list of them",
            got=f"a list of {len(prompt)}",
            expected="one text, or the token ids of one prompt",
            fix="stream each prompt by itself, or pass the list to generate",
        )
    return [prompt]


def _is_token_list(prompt: object) -> bool:
    """A list of token ids rather than a list of prompts; an empty list is an empty batch."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and prompt.dtype.kind != "U"
    return isinstance(prompt, Sequence) and bool(prompt) and not _is_prompt(prompt[0])


def _is_prompt(item: object) -> bool:
    if isinstance(item, (str, np.ndarray)):
        return True
    return isinstance(item, Sequence) and not isinstance(item, bytes)
