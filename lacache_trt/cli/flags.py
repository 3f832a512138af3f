"""Command-line flags from a dataclass, so that each default and each description exists once.

A field becomes `--field-name`; its help is the first sentence of the field's entry in the class's
`Attributes:` section, with a capital unless it begins with something that is typed as it stands: a
choice of the field, or words in backticks. Flags that are not given stay out of the result, so the
value comes from the settings file if there is one, else from the dataclass.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

import typer

from lacache_trt.errors import InvalidRequestError

Options = TypeVar("Options")
_OWN_NAMES = {"overwrite": "--force", "max_length": "--max-seq-len", "profiles": "--profile"}
_ENTRY = re.compile(r"^ {4}(\w+): (.*(?:\n {8,}\S.*)*)", re.MULTILINE)
_SENTENCE = re.compile(r"(?<=[^A-Z])\. |[.:]?$")


@dataclass(frozen=True)
class _Flag:
    """How a field looks on the command line and how its text becomes a value."""

    kind: Any
    metavar: str | None = None
    convert: Callable[[Any], object] | None = None
    choices: tuple[str, ...] = ()


class FlagGroup(Generic[Options]):
    """The flags of one dataclass; `prefix` stands before their names, as in `--fp8-scope`."""

    def __init__(
        self, cls: type[Options], hidden: frozenset[str] = frozenset(), prefix: str = ""
    ) -> None:
        self.cls = cls
        self.prefix = prefix
        help_texts = field_descriptions(cls)
        hints = inspect.get_annotations(cls, eval_str=True)
        self._fields = [field for field in fields(cls) if field.name not in hidden]  # type: ignore[arg-type]
        self._flags = {field.name: _flag(hints[field.name]) for field in self._fields}
        self.parameters = tuple(
            self._parameter(field, help_texts.get(field.name, "")) for field in self._fields
        )

    def build(self, values: dict[str, Any], base: Mapping[str, object] | None = None) -> Options:
        """Take this group's flags out of `values`; those that were given override `base`."""
        chosen = dict(base or {})
        for name, flag in self._flags.items():
            value = values.pop(self.prefix + name)
            if value is not None and value != []:
                chosen[name] = flag.convert(value) if flag.convert else value
        return self.cls(**chosen)

    def _parameter(self, field: Field[Any], text: str) -> inspect.Parameter:
        flag = self._flags[field.name]
        own = (self.prefix + field.name).replace("_", "-")
        name = _OWN_NAMES.get(field.name, "--" + own)
        if flag.kind is bool and name != "--force":
            name = f"{name}/--{own.removeprefix('no-') if own.startswith('no-') else 'no-' + own}"
        default = field.metadata.get("default", field.default)
        shown = "" if default in (None, False, ()) else f" [default: {_spelling(default)}]"
        sentence = _capitalised(text, flag.choices)
        option = typer.Option(name, help=sentence + shown, metavar=flag.metavar, show_default=False)
        return inspect.Parameter(
            self.prefix + field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[Union[flag.kind, None], option],  # noqa: UP007
        )


def field_descriptions(cls: type) -> dict[str, str]:
    """First sentence of each entry of a class's `Attributes:` section, as it is written there."""
    _, _, section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    return {name: _first_sentence(text) for name, text in _ENTRY.findall(section)}


def _first_sentence(text: str) -> str:
    flat = " ".join(text.split())
    match = _SENTENCE.search(flat)
    return flat[: match.start()] if match else flat


def _capitalised(sentence: str, choices: tuple[str, ...]) -> str:
    """The sentence as help shows it: what is typed as it stands keeps its spelling."""
    plain = sentence.replace("`", "")
    literal = sentence.startswith("`") or re.split(r"[ ,:;]", plain, maxsplit=1)[0] in choices
    return plain if literal else plain[:1].upper() + plain[1:]


def _spelling(value: object) -> object:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "yes" if value is True else value


def _flag(hint: Any) -> _Flag:
    members = [member for member in _members(hint) if member is not type(None)]
    if get_origin(hint) is Literal or get_origin(members[0]) is Literal:
        choices = tuple(map(str, get_args(members[0])))
        return _Flag(str, "|".join(choices), choices=choices)
    if get_args(members[0]) == (str, ...):
        return _Flag(list[str], "TEXT", tuple)
    if int in members and any(get_origin(member) is tuple for member in members):
        return _Flag(str, "INTEGER[,...]", _integers)
    return _Flag(members[0])


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _integers(text: str) -> int | tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidRequestError(
            "not an integer or a list of integers", got=repr(text), expected="for example 7 or 1,2"
        ) from error
    return numbers[0] if len(numbers) == 1 else numbers
