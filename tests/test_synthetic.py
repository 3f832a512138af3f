"""What other tests take for granted about the synthetic checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from reference_model import load_reference
from synthetic import make_dream, make_llada


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("make", [make_llada, make_dream])
def test_predictions_are_confident_and_differ_between_masks(
    tmp_path: Path, make: Callable[..., Path], tied: bool
) -> None:
    model = load_reference(make(tmp_path, tied=tied))
    tokens = np.random.default_rng(1).integers(0, 90, (4, 48))
    tokens[:, 24:40] = model.mask_id
    logits = model.raw_logits(tokens)
    logits[..., model.mask_id] = -np.inf
    top = np.exp(logits.max(-1) - np.logaddexp.reduce(logits, axis=-1))
    assert np.median(top) > 0.5
    assert all(len(set(row[24:40])) > 2 for row in logits.argmax(-1).tolist())


def test_a_seed_decides_every_byte(tmp_path: Path) -> None:
    first, second, other = (
        (make_llada(tmp_path / name, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert first == second
    assert first != other
