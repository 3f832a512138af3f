"""Runs a script or a module straight from a checkout, with nothing installed.

    python3 benchmarks/run_from_checkout.py benchmarks/cuda_step.py --layers 4
    python3 benchmarks/run_from_checkout.py -m pytest -m gpu tests/test_cuda_engine.py

The folders `export/`, `engines/` and `plugins/` are parts of the package `lacache_trt`; an
installation maps them there. Without one, the root of the checkout joins the package's search
path, so that `lacache_trt.engines` is found as `engines/` beside the package.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def map_folders() -> None:
    """Make `lacache_trt` and its mapped folders importable from the checkout."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    import lacache_trt

    if str(ROOT) not in lacache_trt.__path__:
        lacache_trt.__path__.append(str(ROOT))


def main() -> None:
    """Run what the command line names as `__main__`."""
    arguments = sys.argv[1:]
    if not arguments or arguments in (["-h"], ["--help"], ["-m"]):
        sys.exit(__doc__)
    map_folders()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
