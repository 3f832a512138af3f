"""The command line `lacache-trt`: one verb a module, heavy imports only inside of the verbs."""

from __future__ import annotations

import inspect
import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated

import typer

from lacache_trt.cli.bench import generate as bench_generate
from lacache_trt.cli.bench import kernels as bench_kernels
from lacache_trt.cli.bench import step as bench_step
from lacache_trt.cli.bench_accuracy import accuracy as bench_accuracy
from lacache_trt.cli.bench_activations import activations as bench_activations
from lacache_trt.cli.bench_policies import policies as bench_policies
from lacache_trt.cli.build import build
from lacache_trt.cli.demo import demo
from lacache_trt.cli.doctor import doctor
from lacache_trt.cli.export import export
from lacache_trt.cli.generate import generate
from lacache_trt.cli.inspect import inspect as inspect_verb
from lacache_trt.cli.output import stop_unprinted
from lacache_trt.cli.plugins import build as build_plugins
from lacache_trt.cli.usage import VerbGroup
from lacache_trt.cli.verify import verify

EPILOG = (
    "Exit codes: 0 ok, 1 a check failed or a deadline passed, 2 usage, 3 environment or "
    "artefact, 130 interrupted, 143 stopped by SIGTERM. "
    "Results go to stdout, progress and errors to stderr; --json prints one document. "
    "--install-completion sets up your shell."
)
VERBS = (export, build, generate, demo, verify, inspect_verb, doctor)
BENCHES = (
    bench_generate,
    bench_step,
    bench_kernels,
    bench_policies,
    bench_accuracy,
    bench_activations,
)
INTERNAL_ERROR = 3
_REFUSING = ("strict", "surrogateescape")
"""Ways to encode text that raise; the C locale has the second one."""


def _completion_wanted() -> bool:
    """Typer's completion options make every call load pydantic, so they exist only when used."""
    asked = {"--install-completion", "--show-completion"} & set(sys.argv[1:2])
    return bool(asked) or "_LACACHE_TRT_COMPLETE" in os.environ


# Plain help: importing rich for it would triple the time that --help takes.
app = typer.Typer(
    name="lacache-trt",
    cls=VerbGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=_completion_wanted(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
plugins = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
benches = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


def _summary(function: Callable[..., None]) -> str:
    """First sentence of a verb's help."""
    text = inspect.cleandoc(function.__doc__ or "")
    return text.split("\n\n")[0].replace("\n", " ").rstrip(".")


for _verb in VERBS:
    app.command(short_help=_summary(_verb))(_verb)
for _verb in BENCHES:
    benches.command(short_help=_summary(_verb))(_verb)
app.add_typer(benches, name="bench", help="Measure an engine, or what a lower precision costs")
plugins.command(short_help=_summary(build_plugins))(build_plugins)
app.add_typer(plugins, name="plugins", help="The library of TensorRT plugins")


def _print_version(wanted: bool) -> None:
    if wanted:
        import lacache_trt

        print(f"lacache-trt {lacache_trt.__version__}", flush=True)
        raise typer.Exit


def _print_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        print(context.get_help(), flush=True)
        raise typer.Exit


# Typer's own help option of a group makes every call load pydantic; this one does not.
@app.callback(epilog=EPILOG, add_help_option=False)
def _root(
    wants_help: Annotated[
        bool,
        typer.Option(
            "--help", "-h", callback=_print_help, is_eager=True, help="Show this message and exit."
        ),
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Diffusion language models (LLaDA, Dream) from checkpoint to inference with exact caches."""


def _prepare_streams() -> None:
    """Standard streams that exist and that can print any text.

    A closed one becomes the null device, before an artefact's file gets its number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in _REFUSING:
        sys.stdout.reconfigure(errors="backslashreplace")


def main() -> None:
    """Entry point; whatever is not an expected error is a bug and is shown as one."""
    _prepare_streams()
    # ONNX Runtime would report its use, and warn where the home folder cannot be written.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        app()
    except OSError as error:  # verbs report theirs
        stop_unprinted(error)
    except Exception:
        traceback.print_exc()
        print("internal error: this is a bug, please report the lines above", file=sys.stderr)
        sys.exit(INTERNAL_ERROR)
