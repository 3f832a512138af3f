"""Packs what the GPU tests of the plugin need, on a machine with a compiler and without a GPU.

    python tests/plugin_payload.py FOLDER

FOLDER gets the compiled library and every test program for sm_89 and sm_90, so that the machine
with the GPU runs cubins that were compiled elsewhere, as an engine does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from plugin_cases import OpCase, Sizes, every_case, packed

from lacache_trt.plugins.library import build_library

DTYPES = (torch.float16, torch.bfloat16)
SMS = (89, 90)


def program_name(case: OpCase, dtype: torch.dtype, sizes: Sizes, sm: int) -> str:
    """File name of a program."""
    label = str(dtype).removeprefix("torch.")
    return f"{case.name}.{label}.{sizes[case.width]}.sm{sm}.bin"


def write_payload(folder: Path) -> None:
    """Write the library and the programs."""
    folder.mkdir(parents=True, exist_ok=True)
    build_library(out=folder)
    for case, sizes in every_case():
        for dtype in DTYPES:
            for sm in SMS:
                path = folder / program_name(case, dtype, sizes, sm)
                path.write_bytes(packed(case, dtype, sizes, sm))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    write_payload(parser.parse_args().folder)
