"""Turns a plain function into a verb of the command line.

A parameter annotated `Output` receives how to report; one annotated with a dataclass of options
receives an instance made from flags; all others are typer's own. Every verb gets `--json` and
`--debug`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from lacache_trt.cli.flags import FlagGroup
from lacache_trt.cli.output import Output, guarded
from lacache_trt.generation import GenerationConfig

JSON_HELP = "Print the result, or the error, as one JSON document on stdout."
DEBUG_HELP = "Show the traceback of an error (also LACACHE_TRT_DEBUG=1)."
CONFIG_HELP = "JSON or TOML file with the settings; flags override it."


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer sees it: flags in, exit code out."""
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters
    groups = {name: group for name in parameters if (group := _flag_group(hints[name])) is not None}
    reads_file = {name for name, group in groups.items() if group.cls is GenerationConfig}

    def command(**values: Any) -> None:
        output = Output(json=values.pop("json"), debug=values.pop("debug"))
        values = {name: _expanded(value) for name, value in values.items()}

        def action() -> None:
            base = _settings(values.pop("config", None) if reads_file else None)
            for name, group in groups.items():
                values[name] = group.build(values, base if name in reads_file else None)
            function(output=output, **values)

        guarded(output, action)

    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in parameters.items()
        if hints[name] is not Output and name not in groups
    ]
    flags = [parameter for group in groups.values() for parameter in group.parameters]
    config = [_CONFIG] if reads_file else []
    signature = inspect.Signature([*own, *config, *flags, *_COMMON])
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {
        name: parameter.annotation for name, parameter in signature.parameters.items()
    }
    return command


def _expanded(value: Any) -> Any:
    """Paths with a leading `~` replaced, which the shell leaves alone inside quotes."""
    if isinstance(value, list):
        return [_expanded(each) for each in value]
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value


@dataclass(frozen=True)
class WithoutFlags:
    """Marks fields that get no flag: `Annotated[GenerationConfig, WithoutFlags(("cache",))]`."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class PrefixedFlags:
    """Puts a prefix before every flag: `Annotated[Fp8Recipe, PrefixedFlags("fp8")]`."""

    prefix: str


def _flag_group(hint: Any) -> FlagGroup[Any] | None:
    """The flags of a parameter that is annotated with a dataclass of options, else None."""
    hidden: tuple[str, ...] = ()
    prefix = ""
    if get_origin(hint) is Annotated:
        hint, *marks = get_args(hint)
        hidden = next((mark.names for mark in marks if isinstance(mark, WithoutFlags)), ())
        prefix = "".join(mark.prefix + "_" for mark in marks if isinstance(mark, PrefixedFlags))
    if not (isinstance(hint, type) and is_dataclass(hint)) or hint is Output:
        return None
    return FlagGroup(hint, frozenset(hidden), prefix)


def _settings(path: Path | None) -> dict[str, object]:
    if path is None:
        return {}
    from lacache_trt.cli.settings_file import read_generation_settings

    return read_generation_settings(path)


def _parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


_CONFIG = _parameter(
    "config",
    Annotated[Path | None, typer.Option("--config", help=CONFIG_HELP, show_default=False)],
    None,
)
_COMMON = (
    _parameter(
        "json", Annotated[bool, typer.Option("--json", help=JSON_HELP, show_default=False)], False
    ),
    _parameter(
        "debug",
        Annotated[bool, typer.Option("--debug", help=DEBUG_HELP, show_default=False)],
        False,
    ),
)
