"""The layout that the plugin library and the packed programs agree on."""

from __future__ import annotations

import hashlib
from pathlib import Path

NATIVE = Path(__file__).parent / "native"


def abi_hash() -> int:
    """First 8 bytes of the SHA-256 of `native/format.h`, little-endian."""
    digest = hashlib.sha256((NATIVE / "format.h").read_bytes()).digest()
    return int.from_bytes(digest[:8], "little")


def abi_text() -> str:
    """The hash as manifests spell it."""
    return f"{abi_hash():016x}"
