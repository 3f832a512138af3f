"""`lacache-trt plugins build`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lacache_trt.cli.command import verb
from lacache_trt.cli.output import Output

INCLUDE_HELP = "Folder with TensorRT's headers; by default where TensorRT usually puts them."
OUT_HELP = "File or folder to copy the library to, for trtexec, C++ and other machines."


@verb
def build(
    output: Output,
    include: Annotated[Path | None, typer.Option("--include", help=INCLUDE_HELP)] = None,
    out: Annotated[Path | None, typer.Option("--out", help=OUT_HELP)] = None,
) -> None:
    """Compile the library of TensorRT plugins.

    It needs a C++17 compiler and TensorRT's headers, and neither TensorRT nor CUDA. Building a
    TensorRT engine does this by itself; do it here to see why it fails, for other headers, or to
    take the library elsewhere (LACACHE_TRT_PLUGIN_LIBRARY names one to use).
    """
    from lacache_trt.plugins.abi import abi_text
    from lacache_trt.plugins.library import build_library, find_compiler, find_headers

    headers = find_headers(include)
    library = build_library(include, out)
    data = {
        "library": str(library),
        "headers": str(headers.folder),
        "tensorrt_major": headers.major,
        "compiler": find_compiler(),
        "plugin_abi": abi_text(),
    }

    def render() -> None:
        from lacache_trt.cli.tables import key_values

        key_values(f"plugin library {library}", {name: data[name] for name in list(data)[1:]})

    output.result(data, render)
