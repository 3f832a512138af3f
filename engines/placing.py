"""Files of a bundle that an engine directory needs as they are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lacache_trt.artifacts import Manifest


def place_file(bundle: Manifest, name: str, directory: Path) -> None:
    """Put a file of the bundle into the engine directory.

    A copy, since the bundle may change or go; from a bundle inside of the directory, which comes
    and goes with it, a second name of the same data where the file system knows that.
    """
    source, target = bundle.path(name), directory / name
    if bundle.directory.is_relative_to(directory):
        try:
            os.link(source, target)
            return
        except OSError:  # a file system without links
            target.unlink(missing_ok=True)
    shutil.copyfile(source, target)
