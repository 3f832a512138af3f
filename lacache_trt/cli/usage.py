"""Usage errors under `--json`: on stdout as one JSON document, as all other errors are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import typer
from typer.core import TyperGroup

from lacache_trt.cli.output import Output, print_error_json
from lacache_trt.errors import InvalidRequestError

USAGE = 2
_WANTED = "lacache_trt.json"
# Typer carries click along in new versions and depends on it in old ones; this is either's.
_UsageError: Any = typer.BadParameter.__bases__[0]


class VerbGroup(TyperGroup):
    """The verbs; what click says about an error goes to stderr as ever."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: Any = None,
        **extra: Any,
    ) -> Any:
        """Remember whether JSON is wanted: a verb whose flags are wrong never learns it."""
        wanted = "--json" in args[: args.index("--")] if "--" in args else "--json" in args
        with _reported(wanted):
            context = super().make_context(info_name, args, parent, **extra)
        context.meta[_WANTED] = wanted
        return context

    def invoke(self, ctx: Any) -> Any:
        """Run a verb."""
        with _reported(bool(ctx.meta.get(_WANTED))):
            return super().invoke(ctx)


@contextmanager
def _reported(wanted: bool) -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "lacache-trt"
        described = InvalidRequestError(error.format_message(), fix=f"{command} --help")
        print_error_json(Output(json=wanted), described, USAGE)
        with suppress(OSError):
            error.show()
        raise typer.Exit(USAGE) from None
