"""The few facts that tokenizer files add to config.json: ids of special tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lacache_trt.model.families import TokenizerFacts
from lacache_trt.model.json_file import read_json_object

MAX_ID_DIGITS = 10


def read_tokenizer_facts(root: Path, contained_file: Callable[[Path, str], Path]) -> TokenizerFacts:
    """Special tokens of tokenizer_config.json, added_tokens.json and tokenizer.json.

    Args:
        root: the checkpoint directory; it may have none of these files.
        contained_file: resolves a file name inside of it.

    Errors: `CheckpointError` for files that are not JSON.
    """

    def read(name: str) -> dict[str, Any]:
        return read_json_object(contained_file(root, name)) if (root / name).exists() else {}

    config = read("tokenizer_config.json")
    ids: dict[str, int] = {}
    for source in (
        _from_tokenizer_json(read("tokenizer.json")),
        read("added_tokens.json"),
        added_tokens(config),
    ):
        ids.update((text, token) for text, token in source.items() if isinstance(token, int))
    return TokenizerFacts(ids, token_text(config.get("mask_token")))


def added_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, int]:
    """Id of each token in `added_tokens_decoder`, by its text."""
    decoder = tokenizer_config.get("added_tokens_decoder")
    if not isinstance(decoder, dict):
        return {}
    return {
        text: int(token)
        for token, entry in decoder.items()
        if token.isdecimal()
        and len(token) <= MAX_ID_DIGITS
        and (text := token_text(entry)) is not None
    }


def token_text(value: object) -> str | None:
    """Text of a special token, written either as a string or as an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _from_tokenizer_json(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    entries = tokenizer.get("added_tokens")
    if not isinstance(entries, list):
        return {}
    return {
        text: entry.get("id")
        for entry in entries
        if isinstance(entry, dict) and (text := token_text(entry)) is not None
    }
