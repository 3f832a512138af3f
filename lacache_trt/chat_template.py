"""Chat templates of checkpoints, rendered in a sandbox the way transformers renders them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lacache_trt.errors import ArtifactError, InvalidRequestError

MAX_TEMPLATE_CHARACTERS = 256 * 2**10
MAX_OUTPUT_CHARACTERS = 4 * 2**20
_MAX_EXPONENT = 64
_MAX_BITS = 4096
# Loop rounds, calls, operators and filters of one rendering, each by the size of its values.
_MAX_WORK = 200_000
_WORK_CHARACTERS = 256
_ROUNDS = "counted_rounds"
_DIGITS = re.compile(r"[0-9]+")
# What opens an assistant's turn, by the marker that tells that a template writes such turns.
_ASSISTANT_HEADERS = {
    "<|start_header_id|>": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|im_start|>": "<|im_start|>assistant\n",
}


class ChatTemplate:
    """A compiled template.

    Errors: `ArtifactError` if the source is too large or is not a template.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ArtifactError(
                "the chat template is too large",
                got=f"{len(source)} characters",
                expected=f"at most {MAX_TEMPLATE_CHARACTERS}",
                fix="pass raw=True and write the prompt's format yourself",
            )
        try:
            self._template = _environment().from_string(source)
        except (TemplateError, RecursionError, MemoryError) as error:
            raise _failure(error) from error
        self._header = next(
            (header for marker, header in _ASSISTANT_HEADERS.items() if marker in source), None
        )

    def render(
        self, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, str]
    ) -> str:
        """The prompt text of a conversation, ending with one open assistant turn.

        Templates disagree about `add_generation_prompt`: LLaDA's stock template ignores it and
        always opens the assistant's turn, repaired copies open it only if asked, some templates
        never do. A missing header makes the model continue the user's turn, a doubled one
        makes it answer an empty turn. So the flag is passed, what the template left at the end
        is taken off, and the header of its turn format is put there once. A template of an
        unknown format is left as it renders.

        Errors: `InvalidRequestError` if the template refuses the messages (`raise_exception`),
        `ArtifactError` if it fails.
        """
        text = self._run(messages, special_tokens)
        if self._header is None:
            return text
        bare = self._header.rstrip()
        while (trimmed := text.rstrip()).endswith(bare):
            text = trimmed.removesuffix(bare)
        return text + self._header

    def _run(self, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, str]) -> str:
        variables = {
            **special_tokens,
            "messages": messages,
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        try:
            return _bounded_text(self._template, variables)
        except _RefusedError as error:
            raise InvalidRequestError(
                "the chat template refuses these messages",
                got=str(error)[:200],
                fix="order roles and contents as the model's template asks",
            ) from error
        except (
            TemplateError,
            TypeError,
            ValueError,
            AttributeError,
            LookupError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ) as error:
            raise _failure(error) from error


class _RefusedError(Exception):
    """Raised by a template's own `raise_exception`."""


class _Work:
    """What a rendering has done so far; loops that print nothing must end too."""

    def __init__(self) -> None:
        self._done = 0

    def add(self, *values: Any) -> None:
        """Count one piece of work on these values."""
        self._done += 1 + sum(map(_length, values)) // _WORK_CHARACTERS
        if self._done > _MAX_WORK:
            raise SecurityError("too much work for a chat template")

    def rounds(self, items: Any) -> Iterator[Any]:
        """The items of a loop, each counted."""
        for item in items:
            self.add()
            yield item


_work: ContextVar[_Work] = ContextVar("chat_template_work")


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, in which no operator builds a value of any size and no work goes on forever."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The template with every loop over counted items."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _ROUNDS, [], [], None, None)
        tree.set_environment(self)
        return tree

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not _small(right):
            raise SecurityError("exponent too large")
        if operator == "%" and isinstance(left, str):
            raise SecurityError("string formatting is not available")
        sizes = [_length(value) for value in (left, right)]
        if operator == "*":
            product = max(1, sizes[0]) * _factor(right), max(1, sizes[1]) * _factor(left)
            too_large = any(sizes) and max(product) > MAX_OUTPUT_CHARACTERS
            too_large = too_large or sum(_bits(value) for value in (left, right)) > _MAX_BITS
        else:
            too_large = sum(sizes) > MAX_OUTPUT_CHARACTERS
        if too_large:
            raise SecurityError("value too large")
        result = super().call_binop(context, operator, left, right)
        _work.get().add(result)
        return result

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        subject = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "")
        _work.get().add(subject, *args, *kwargs.values())
        _refuse_large_result(name, (subject, *args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.globals.pop("lipsum")
    environment.filters["tojson"] = _to_json
    for name, function in environment.filters.items():
        environment.filters[name] = _bounded_filter(name, function)
    environment.filters[_ROUNDS] = lambda items: _work.get().rounds(items)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _bounded_text(template: Template, variables: Mapping[str, Any]) -> str:
    parts: list[str] = []
    size = 0
    _work.set(_Work())
    for part in template.generate(variables):
        size += len(part)
        if size > MAX_OUTPUT_CHARACTERS:
            raise SecurityError(f"output of more than {MAX_OUTPUT_CHARACTERS} characters")
        parts.append(part)
    return "".join(parts)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, refused where its result would be too large; jinja's marks on it are kept."""

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _refuse_large_result(name, (*args, *kwargs.values()))
        result = function(*args, **kwargs)
        _work.get().add(*args, result)
        return result

    return bounded


def _refuse_large_result(name: str, values: Sequence[Any]) -> None:
    """Methods and filters that pad, repeat or join text, before they build it."""
    values = [value for value in values if isinstance(value, (str, int, list, tuple))]
    if any(isinstance(value, int) and abs(value) > MAX_OUTPUT_CHARACTERS for value in values):
        raise SecurityError("number too large")
    if _RESULT_SIZES.get(name, _no_text)(values) > MAX_OUTPUT_CHARACTERS:
        raise SecurityError("value too large")


def _no_text(values: Sequence[Any]) -> int:
    return 0


def _replaced_size(values: Sequence[Any]) -> int:
    if len(values) < 3 or not all(isinstance(value, str) for value in values[:3]):
        return 0
    text, old, new = map(str, values[:3])
    return len(text) + text.count(old) * len(new)


def _indented_size(values: Sequence[Any]) -> int:
    width = max((_length(value) or _factor(value) for value in values[1:]), default=0)
    return str(values[0]).count("\n") * width if values else 0


def _formatted_size(values: Sequence[Any]) -> int:
    """The largest width or precision that stands in the format."""
    text = values[0] if values and isinstance(values[0], str) else ""
    return max((int(digits[:20]) for digits in _DIGITS.findall(text)), default=0)


def _joined_size(values: Sequence[Any]) -> int:
    """Separator and parts stand in either order: a method of the one, a filter of the other."""
    parts = next((value for value in values if isinstance(value, (list, tuple))), ())
    separators = (value for value in values if isinstance(value, str))
    return sum(map(_length, parts)) + len(parts) * len(next(separators, ""))


_RESULT_SIZES: dict[str, Callable[[Sequence[Any]], int]] = {
    "replace": _replaced_size,
    "indent": _indented_size,
    "join": _joined_size,
    "format": _formatted_size,
    "format_map": _formatted_size,
}


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _factor(value: Any) -> int:
    return value if isinstance(value, int) else 1


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _small(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= _MAX_EXPONENT


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _failure(error: BaseException) -> ArtifactError:
    return ArtifactError(
        "the chat template fails",
        got=f"{type(error).__name__}: {str(error)[:200]}",
        expected="a template that renders user, assistant and system messages",
        fix="pass raw=True and write the prompt's format yourself",
    )
