"""Prompts from a file, one JSON value a line; empty lines are skipped."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path

from lacache_trt.errors import InvalidRequestError
from lacache_trt.generation import GenerationConfig
from lacache_trt.strict_json import read_bounded

Prompt = str | list[int]
MAX_BYTES = 2**30
_LINES = 'a JSON line for each prompt: a string, token ids, or {"prompt": ...}'
_MAKE = 'write one line a prompt into a text file, such as "What is 12 + 30?", quotes included'
_ONE = 'a string, a list of token ids, or {"prompt": ...}'
_BOM = "\ufeff"


@dataclass(frozen=True)
class PromptFile:
    """What a file holds.

    Attributes:
        prompts: in the order of the file.
        places: where each stands, as `line 3 of prompts.jsonl`.
        sha256: of the file.
    """

    prompts: tuple[Prompt, ...]
    places: tuple[str, ...]
    sha256: str


def read_prompt_file(path: Path) -> PromptFile:
    """The prompts of a JSONL file.

    Raises:
        InvalidRequestError: it cannot be read, holds no prompt, or a line is not one; says which.
    """
    data = read_bounded(
        path,
        MAX_BYTES,
        failure=InvalidRequestError,
        follow_link=True,
        expected=f"a text file with {_LINES}",
        fix=_MAKE,
    )
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{path.name} is not UTF-8 text",
            got=str(error),
            expected=_LINES,
            fix="save the file as UTF-8",
        ) from error
    places = [f"line {number} of {path.name}" for number in range(1, len(lines) + 1)]
    found = {place: line for place, line in zip(places, lines, strict=True) if line.strip()}
    if not found:
        raise InvalidRequestError(
            f"{path.name} holds no prompt",
            got="an empty file" if not data else "empty lines only",
            expected=_LINES,
            fix=_MAKE,
        )
    prompts = tuple(parse_prompt(line, place) for place, line in found.items())
    return PromptFile(prompts, tuple(found), hashlib.sha256(data).hexdigest())


def parse_prompt(text: str, place: str, *, refuse_settings: bool = False) -> Prompt:
    """The prompt of a JSON line: a string, a list of token ids, or an object with one of them.

    Other fields are left out, but for a call that generates no setting that it would ignore.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{place} is not JSON",
            got=f"{text[:80]!r}: {error}",
            expected=_ONE,
            fix="save the file as UTF-8 without a byte order mark (BOM)"
            if text.startswith(_BOM)
            else 'put text in double quotes: "What is 12 + 30?"',
        ) from error
    if isinstance(value, dict):
        if refuse_settings:
            _refuse_settings(value, place)
        value = value.get("prompt")
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise InvalidRequestError(
        f"{place} holds no prompt",
        got=repr(text[:80]),
        expected=_ONE,
        fix='write a string or token ids, under the key "prompt" if it is an object',
    )


def _refuse_settings(line: dict[str, object], place: str) -> None:
    settings = sorted(line.keys() & {field.name for field in fields(GenerationConfig)})
    if settings:
        raise InvalidRequestError(
            f"{place} has settings of its own",
            got=", ".join(settings),
            expected="the same settings for all prompts of a call",
            fix="give them as flags or with --config",
        )
