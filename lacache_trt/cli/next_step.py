"""The command that a verb suggests for what it has written."""

from __future__ import annotations

from pathlib import Path

from lacache_trt.artifacts import Manifest, load_manifest
from lacache_trt.generation import GenerationConfig

_SHARE = 4
"""Most answers are short beside the canvas that a model was trained on: one part in so many."""


def generate_line(engine: Path) -> str:
    """`lacache-trt generate ...` with lengths that suit the engine in the directory `engine`."""
    gen_length, block_length = _lengths(load_manifest(engine, "engine", hashes="sizes"))
    words = [f'lacache-trt generate {engine} "your question" --gen-length {gen_length}']
    if block_length != GenerationConfig.block_length:
        words.append(f"--block-length {block_length}")
    return " ".join([*words, f"--steps {gen_length}"])


def _lengths(manifest: Manifest) -> tuple[int, int]:
    """Tokens of an answer, at most the default's and a quarter of the canvas, and of a block."""
    profiles = manifest.body.get("profiles")
    ranges: dict[str, list[int]] = profiles[0] if isinstance(profiles, list) and profiles else {}
    longest = min([manifest.model.max_length, *ranges.get("N", [])[-1:]])
    most = max(1, min(GenerationConfig.gen_length, longest // _SHARE))
    low, _, high = ranges.get("Bk", [1, most, most])
    block = max(low, min(high, most, GenerationConfig.block_length))
    return max(block, most // block * block), block
