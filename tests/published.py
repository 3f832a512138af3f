"""A small published directory, and what stands hidden beside it."""

from __future__ import annotations

from pathlib import Path

from lacache_trt.publish import MANIFEST_NAME, publish_directory


def leftovers(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.name.startswith("."))


def put(out: Path, words: str) -> None:
    with publish_directory(out, overwrite=True) as directory:
        for name in (MANIFEST_NAME, "a", "b"):
            (directory / name).write_text(words)
