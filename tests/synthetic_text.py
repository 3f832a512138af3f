"""Tokenizer files of synthetic checkpoints, laid out as the two families ship them.

The vocabulary is byte-level: the commonest characters first, so that a small one cannot spell
everything; special tokens have the last ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLADA_TEMPLATE = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
DREAM_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n"
    "{%- else %}\n"
    "    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}\n"
    "{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message['role'] != 'system' or not loop.first %}\n"
    "        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)
LLADA_SPECIAL = (
    "<|startoftext|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|endoftext|>",
    "<|mdm_mask|>",
)
DREAM_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|mask|>")


def byte_characters() -> list[str]:
    """The 256 characters that stand for the bytes in byte-level vocabularies, by byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(extra)) for byte in range(256)]


def _base_vocabulary(size: int) -> list[str]:
    """The most useful byte characters first; a small vocabulary cannot spell everything."""
    table = byte_characters()
    text = " etaoinshrdlcumwfgypbvkjxqz0123456789.,?!\n'-+*/=:()"
    order = list(dict.fromkeys([*text.encode(), *range(32, 127), *range(256)]))
    return [table[byte] for byte in order[:size]]


def _added(first: int, texts: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {
            "id": first + index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, text in enumerate(texts)
    ]


def write_llada_tokenizer(path: Path, vocab: int) -> None:
    """tokenizer.json, tokenizer_config.json and special_tokens_map.json as LLaDA ships them."""
    base = vocab - len(LLADA_SPECIAL)
    pieces = _base_vocabulary(base)
    pieces += [f"<|reserved_{index}|>" for index in range(base - len(pieces))]
    added = _added(base, LLADA_SPECIAL)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": [],
        },
    }
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "added_tokens_decoder": {
            str(entry["id"]): {key: value for key, value in entry.items() if key != "id"}
            for entry in added
        },
        "bos_token": "<|startoftext|>",
        "chat_template": LLADA_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "trust_remote_code": True,
    }
    special = {
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (path / "special_tokens_map.json").write_text(json.dumps(special, indent=2))


def write_dream_tokenizer(path: Path, vocab: int, merges: tuple[str, ...] = ()) -> None:
    """vocab.json, merges.txt and tokenizer_config.json as Dream ships them (no tokenizer.json).

    `merges` are pairs such as `"h e"` of byte-level pieces that the vocabulary has room for.
    """
    base = vocab - len(DREAM_SPECIAL)
    pieces = _base_vocabulary(base - len(merges))
    pieces += [merge.replace(" ", "") for merge in merges]
    pieces += [f"<|reserved_{index}|>" for index in range(base - len(pieces))]
    added = _added(base, DREAM_SPECIAL)
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(entry["id"]): {key: value for key, value in entry.items() if key != "id"}
            for entry in added
        },
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|mask|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "bos_token": "<|endoftext|>",
        "chat_template": DREAM_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "errors": "replace",
        "mask_token": "<|mask|>",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "DreamTokenizer",
        "unk_token": None,
    }
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    (path / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
