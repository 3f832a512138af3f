"""The model that ships and how it is decoded."""

from __future__ import annotations

from pathlib import Path

from lacache_trt.generation import GenerationConfig

CHECKPOINT = Path(__file__).parent / "tiny-llada"
# The canvas that tiny-llada was trained for, in two blocks, one token per forward.
SETTINGS = GenerationConfig(gen_length=64, block_length=32, steps=64)
