"""Runs Python from a checkout with nothing installed, here and in every process it starts.

    python3 benchmarks/run_from_checkout.py benchmarks/cuda_step.py --layers 4
    python3 benchmarks/run_from_checkout.py -m pytest -m gpu tests/test_cuda_engine.py

The folders `export/`, `engines/` and `plugins/` are parts of the package `lacache_trt`; an
installation maps them there. Here a temporary folder of links does, put on PYTHONPATH, while the
working directory is kept off it (PYTHONSAFEPATH, Python 3.11 or newer).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("export", "engines", "plugins")


def link_package(folder: Path) -> None:
    """Make `folder`/lacache_trt look like the installed package."""
    package = folder / "lacache_trt"
    package.mkdir()
    entries = [entry for entry in (ROOT / "lacache_trt").iterdir() if entry.name != "__pycache__"]
    for entry in (*entries, *(ROOT / name for name in MAPPED)):
        (package / entry.name).symlink_to(entry)


def main() -> int:
    """Run the rest of the command line with this interpreter; returns its exit code."""
    if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        link_package(Path(folder))
        script = Path(sys.argv[1])
        beside = [str(script.resolve().parent)] if script.is_file() else []
        path = [folder, *beside, *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
        environment = os.environ | settings
        return subprocess.run([sys.executable, *sys.argv[1:]], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
