"""Prompts from the command line or stdin.

Without PROMPT, or with `-`, stdin is read: one prompt a line, empty lines skipped; with `--jsonl`
each line is a JSON string, a list of token ids, or an object with the field `prompt`.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

from lacache_trt.cli.output import say
from lacache_trt.errors import InvalidRequestError
from lacache_trt.prompt_file import Prompt, parse_prompt

MAX_LINE = 16 * 2**20


def read_prompts(
    argument: str | None, *, tokens: bool, jsonl: bool, stdin: TextIO | None = None
) -> list[Prompt]:
    """All prompts of a call; `InvalidRequestError` if there are none."""
    if tokens and jsonl:
        raise InvalidRequestError(
            "prompts are token ids or JSON lines, not both",
            got="--tokens and --jsonl",
            fix="leave --tokens out: a JSON line may be a list of token ids",
        )
    if argument is not None and argument != "-":
        if os.path.isfile(argument):
            note = f"note: {argument!r} is taken as the question; to read that file: < {argument}"
            say(note)
        return [_parse(argument, 1, tokens, jsonl)]
    stream = sys.stdin if stdin is None else stdin
    if argument is None and stream.isatty():
        raise InvalidRequestError(
            "no prompt", fix='give one: generate ENGINES "your question", or pipe prompts in'
        )
    prompts = [
        _parse(line.rstrip("\r\n"), number, tokens, jsonl)
        for number, line in enumerate(_lines(stream), 1)
        if line.strip()
    ]
    if not prompts:
        raise InvalidRequestError("stdin holds no prompt", expected="one prompt a line")
    return prompts


def _lines(stream: TextIO) -> list[str]:
    lines = []
    try:
        while line := stream.readline(MAX_LINE + 1):
            if len(line) > MAX_LINE:
                raise InvalidRequestError(
                    "a line of stdin is too long", expected=f"at most {MAX_LINE} characters"
                )
            lines.append(line)
    except UnicodeDecodeError as error:
        raise InvalidRequestError("stdin is not UTF-8 text", got=str(error)) from error
    return lines


def _parse(text: str, number: int, tokens: bool, jsonl: bool) -> Prompt:
    if jsonl:
        return parse_prompt(text, f"line {number}", refuse_settings=True)
    if not tokens:
        return text
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise InvalidRequestError(
            f"prompt {number} is not a list of token ids",
            got=repr(text[:80]),
            expected="integers separated by spaces or commas",
        ) from error
