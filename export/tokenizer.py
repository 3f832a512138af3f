"""Tokenizer files of a checkpoint → `tokenizer.json` and `text.json` of a bundle.

A tokenizer.json is taken as it is. Dream ships Qwen2's byte-level BPE as vocab.json and merges.txt
with a custom Python class; the same tokenizer is built here from these files, without running any
code of the checkpoint: NFC normalisation, Qwen2's splitting pattern, byte-level alphabet, merges,
added tokens with the ids that tokenizer_config.json gives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lacache_trt.errors import ArtifactError, CheckpointError, OutputError
from lacache_trt.model.checkpoint import checked_directory, contained_file, read_model_config
from lacache_trt.model.json_file import read_bounded, read_json_object
from lacache_trt.model.tokenizer_facts import MAX_ID_DIGITS, token_text
from lacache_trt.text import (
    MAX_TOKENIZER_BYTES,
    TEXT_FILE,
    TEXT_VERSION,
    TOKENIZER_FILE,
    parse_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# What GPT-4's tokenizer splits on, with single digits, as Qwen2 publishes it.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_CLASSES = ("DreamTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast")
MAX_TEMPLATE_BYTES = 2**20
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_OTHER_FORMATS = ("tokenizer.model", "spiece.model", "vocab.txt", "vocab.json", "merges.txt")
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token")


@dataclass(frozen=True)
class TokenizerFiles:
    """What was written into the bundle."""

    tokenizer: Path
    text: Path


def write_tokenizer(checkpoint_dir: str | Path, out_dir: str | Path) -> TokenizerFiles | None:
    """Write tokenizer.json and text.json; None and no file if the checkpoint has no tokenizer.

    Errors: `CheckpointError` for tokenizer files that are invalid, of a kind that is not known or
    whose ids do not fit into the model's vocabulary; `OutputError` if writing fails.
    """
    root = checked_directory(checkpoint_dir)
    config = _optional_json(root, _CONFIG)
    data = _tokenizer_bytes(root, config)
    if data is None:
        return None
    try:
        tokenizer = parse_tokenizer(data)
    except ArtifactError as error:
        raise CheckpointError(error.what, got=error.got, expected=error.expected) from error
    _check_ids(tokenizer, read_model_config(root).vocab_size)
    added = tokenizer.get_added_tokens_decoder()
    text = {
        "version": TEXT_VERSION,
        "special_tokens": _special_tokens(root, config),
        "special_ids": sorted(token for token, entry in added.items() if entry.special),
        "chat_template": _chat_template(root, config),
    }
    files = TokenizerFiles(Path(out_dir) / TOKENIZER_FILE, Path(out_dir) / TEXT_FILE)
    try:
        files.tokenizer.write_bytes(data)
        files.text.write_text(
            json.dumps(text, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
        )
    except OSError as error:
        raise OutputError(
            "cannot write the tokenizer",
            got=f"{type(error).__name__}: {error.strerror or error}",
            expected=f"a writable directory {out_dir}",
            fix="choose a directory that is writable and has room",
        ) from error
    return files


def build_qwen2_tokenizer(
    vocab: Mapping[str, int], merges: list[tuple[str, str]], added: Mapping[int, Mapping[str, Any]]
) -> Tokenizer:
    """Qwen2's tokenizer of a vocabulary, merges in order of rank, and added tokens by id.

    Errors: `CheckpointError` if the parts do not fit together.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as pre

    try:
        tokenizer = Tokenizer(models.BPE(vocab=dict(vocab), merges=merges))
    except Exception as error:  # the binding raises nothing more specific
        raise CheckpointError(
            "vocab.json and merges.txt do not fit together", got=str(error)[:200]
        ) from error
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.Sequence(
        [
            pre.Split(Regex(QWEN2_PATTERN), behavior="isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token_id in sorted(added):
        entry = added[token_id]
        options = {
            key: bool(entry.get(key, False))
            for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        content = str(entry["content"])
        tokenizer.add_tokens([AddedToken(content, **options)])
        if tokenizer.token_to_id(content) != token_id:
            raise CheckpointError(
                "an added token cannot have the id that the tokenizer files give it",
                got=f"{content!r} would get id {tokenizer.token_to_id(content)}",
                expected=f"id {token_id}: ids follow the vocabulary without gaps",
                fix="use vocab.json and tokenizer_config.json of one revision",
            )
    return tokenizer


def _tokenizer_bytes(root: Path, config: Mapping[str, Any]) -> bytes | None:
    if _present(root, TOKENIZER_FILE):
        return read_bounded(contained_file(root, TOKENIZER_FILE), MAX_TOKENIZER_BYTES)
    others = [name for name in _OTHER_FORMATS if _present(root, name)]
    if not others:
        return None
    kind = config.get("tokenizer_class")
    if not {"vocab.json", "merges.txt"} <= set(others) or kind not in QWEN2_CLASSES:
        raise CheckpointError(
            "the tokenizer cannot be built without the checkpoint's own code",
            got=f"{', '.join(others)}, tokenizer_class={str(kind)[:80]!r}",
            expected=f"{TOKENIZER_FILE}, or vocab.json and merges.txt of {QWEN2_CLASSES[0]}",
            fix=f"save the tokenizer as {TOKENIZER_FILE} with the tokenizers library, or remove "
            "the tokenizer files and work with token ids",
        )
    vocab = read_json_object(contained_file(root, "vocab.json"), MAX_TOKENIZER_BYTES)
    if not all(isinstance(token, int) and 0 <= token < 2**31 for token in vocab.values()):
        raise CheckpointError("vocab.json is invalid", expected="token texts with integer ids")
    merges = _merges(read_bounded(contained_file(root, "merges.txt"), MAX_TOKENIZER_BYTES))
    tokenizer = build_qwen2_tokenizer(vocab, merges, _added_entries(root, config))
    built: str = tokenizer.to_str()
    return built.encode("utf-8")


def _merges(data: bytes) -> list[tuple[str, str]]:
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise CheckpointError("merges.txt is not UTF-8", got=str(error)[:80]) from error
    if lines[0].startswith("#version"):
        lines = lines[1:]
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        pair = line.rstrip("\r").split(" ")
        if pair == [""]:
            continue
        if len(pair) != 2:
            raise CheckpointError(
                "merges.txt is invalid", got=f"rule {number}: {line[:60]!r}", expected="two pieces"
            )
        merges.append((pair[0], pair[1]))
    return merges


def _added_entries(root: Path, config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """`added_tokens_decoder`, or the older added_tokens.json whose tokens are all special."""
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        entries: dict[int, Mapping[str, Any]] = {
            int(token): entry
            for token, entry in decoder.items()
            if token.isdecimal()
            and len(token) <= MAX_ID_DIGITS
            and isinstance(entry, dict)
            and token_text(entry) is not None
        }
        if len(entries) == len(decoder):
            return entries
        raise CheckpointError(f"added_tokens_decoder of {_CONFIG} is invalid")
    older = _optional_json(root, "added_tokens.json")
    if not all(isinstance(token, int) for token in older.values()):
        raise CheckpointError("added_tokens.json is invalid", expected="token texts with ids")
    return {token: {"content": text, "special": True} for text, token in older.items()}


def _check_ids(tokenizer: Tokenizer, vocab_size: int) -> None:
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    beyond = sorted((token, text) for text, token in vocab.items() if token >= vocab_size)
    if beyond:
        raise CheckpointError(
            "the tokenizer has ids that the model has no embedding for",
            got=", ".join(f"{text!r}={token}" for token, text in beyond[:8]),
            expected=f"ids below {vocab_size}",
            fix="use the tokenizer and the weights of one revision",
        )


def _special_tokens(root: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens; tokenizer_config.json wins over special_tokens_map.json."""
    merged = {**_optional_json(root, "special_tokens_map.json"), **config}
    roles = (*_ROLES, "mask_token")
    return {role: text for role in roles if (text := token_text(merged.get(role))) is not None}


def _chat_template(root: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's; of named ones the one called default."""
    if _present(root, _TEMPLATE):
        data = read_bounded(contained_file(root, _TEMPLATE), MAX_TEMPLATE_BYTES)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{_TEMPLATE} is not UTF-8", got=str(error)[:80]) from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"chat_template of {_CONFIG} is invalid",
            got=type(template).__name__,
            expected="a string, or a list of named templates",
        )
    return template


def _optional_json(root: Path, name: str) -> dict[str, Any]:
    return read_json_object(contained_file(root, name)) if _present(root, name) else {}


def _present(root: Path, name: str) -> bool:
    return (root / name).is_symlink() or (root / name).exists()
