"""Text to token ids and back, and the chat template, from the files of a bundle.

Needs `tokenizers` and `jinja2` only, loaded when a codec is. Templates come from checkpoints, so
they run in Jinja's immutable sandbox, with the size of the template, of its output and of strings
built by `*` and `+` capped. A template that loops without output is not interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lacache_trt.errors import ArtifactError, InvalidRequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from lacache_trt.chat_template import ChatTemplate

TOKENIZER_FILE = "tokenizer.json"
TEXT_FILE = "text.json"
TEXT_VERSION = 1
MAX_TOKENIZER_BYTES = 256 * 2**20
MAX_TEXT_BYTES = 2**20
Message = Mapping[str, str]


@dataclass(frozen=True)
class TextCodec:
    """A bundle's tokenizer and chat template. Shared by threads; never changed after `load`.

    Attributes:
        special_tokens: `bos_token`, `eos_token` and so on by name, as templates refer to them.
        special_ids: ids that `decode` leaves out.
        template: source of the chat template, if the checkpoint has one.
    """

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    special_ids: tuple[int, ...] = ()
    template: str | None = None

    @classmethod
    def load(cls, directory: str | Path) -> TextCodec | None:
        """The codec of a bundle, or None if it was exported without tokenizer files.

        Errors: `ArtifactError` for incomplete or invalid files.
        """
        tokenizer_path = Path(directory) / TOKENIZER_FILE
        text_path = Path(directory) / TEXT_FILE
        if not tokenizer_path.exists() and not text_path.exists():
            return None
        tokenizer = parse_tokenizer(_read(tokenizer_path, MAX_TOKENIZER_BYTES))
        return cls(tokenizer, **_parse_text(_read(text_path, MAX_TEXT_BYTES)))

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be called."""
        return self.template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` and nothing else: no begin token is added, special tokens that are
        written out in the text become their ids. `InvalidRequestError` for other types and for
        text that is no valid Unicode.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(
                "a prompt is not text",
                got=type(text).__name__,
                expected="a str",
                fix="decode bytes first, or pass token ids to the runtime",
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                "a prompt is not valid Unicode",
                got=str(error)[:80],
                expected="no lone surrogates",
                fix="remove or replace them",
            ) from error
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids; bytes that form no character become U+FFFD.

        Ids that the tokenizer does not know (the padding of a model's vocabulary) give no text.
        Errors: `InvalidRequestError` for negative ids and other types.
        """
        tokens: list[int] = []
        for token in ids:
            try:
                tokens.append(token.__index__())
            except AttributeError as error:
                raise _invalid_id(token) from error
            if not 0 <= tokens[-1] < 2**31:
                raise _invalid_id(token)
        if skip_special:
            special = set(self.special_ids)
            tokens = [token for token in tokens if token not in special]
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=skip_special)
        return text

    def apply_chat_template(self, messages: str | Sequence[Message]) -> str:
        """The text that asks the model for an answer to these messages.

        Args:
            messages: a user's prompt, or messages with `role` and `content`.

        Errors: `InvalidRequestError` for malformed messages and for what the template itself
        refuses, `ArtifactError` if there is no template or it fails.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self._compiled.render(check_messages(messages), self.special_tokens)

    @cached_property
    def _compiled(self) -> ChatTemplate:
        from lacache_trt.chat_template import ChatTemplate

        if self.template is None:
            raise ArtifactError(
                "the checkpoint has no chat template",
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                fix="pass raw=True, or export a checkpoint that was tuned for chat",
            )
        return ChatTemplate(self.template)


def parse_tokenizer(data: bytes) -> Tokenizer:
    """The tokenizer that tokenizer.json describes; `ArtifactError` if it describes none."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the binding raises nothing more specific
        raise ArtifactError(
            f"{TOKENIZER_FILE} is not a tokenizer",
            got=str(error)[:200],
            expected="the JSON format of the tokenizers library",
            fix="download the checkpoint's tokenizer files again and export",
        ) from error
    # A saved maximum length would silently cut prompts, saved padding would lengthen them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_messages(messages: object) -> list[dict[str, str]]:
    """A copy of a non-empty list of messages with text in `role` and `content`."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise _invalid_messages(type(messages).__name__ if messages else "no message")
    copies: list[dict[str, str]] = []
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise _invalid_messages(str(message)[:120])
        copies.append({"role": role, "content": content})
    return copies


def _read(path: Path, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ArtifactError(
            f"cannot read {path.name}",
            got=f"{type(error).__name__}: {error.strerror or error}",
            expected=f"{TOKENIZER_FILE} and {TEXT_FILE}, or neither",
            fix="export the bundle again",
        ) from error
    if len(data) > limit:
        raise ArtifactError(f"{path.name} is too large", expected=f"at most {limit} bytes")
    return data


def _parse_text(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _invalid_text(str(error)[:120]) from error
    if not isinstance(value, dict) or value.get("version") != TEXT_VERSION:
        raise _invalid_text(str(value)[:120])
    special, ids = value.get("special_tokens"), value.get("special_ids")
    template = value.get("chat_template")
    well_formed = (
        isinstance(special, dict)
        and all(isinstance(text, str) for text in special.values())
        and isinstance(ids, list)
        and all(isinstance(token, int) for token in ids)
        and (template is None or isinstance(template, str))
    )
    if not well_formed:
        raise _invalid_text(f"keys {sorted(value)[:8]}")
    return {"special_tokens": special, "special_ids": tuple(ids or ()), "template": template}


def _invalid_text(got: str) -> ArtifactError:
    return ArtifactError(
        f"{TEXT_FILE} is not valid",
        got=got,
        expected=f"version {TEXT_VERSION} with special_tokens, special_ids and chat_template",
        fix="export the bundle again with this version",
    )


def _invalid_id(token: object) -> InvalidRequestError:
    return InvalidRequestError(
        "invalid token id", got=repr(token)[:80], expected="a non-negative integer"
    )


def _invalid_messages(got: str) -> InvalidRequestError:
    return InvalidRequestError(
        "invalid chat messages",
        got=got,
        expected='a non-empty list of {"role": text, "content": text}',
    )
