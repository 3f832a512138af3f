"""The parts of `benchmarks/tensorrt85/` that need neither TensorRT nor a GPU."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "tensorrt85"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def entry(kind: int, sm: int, content: bytes) -> bytes:
    """One version of a kernel, with a header of 64 bytes."""
    header = struct.pack("<HHIQ", kind, 1, 64, len(content))
    return header.ljust(28, b"\1") + struct.pack("<I", sm).ljust(36, b"\1") + content


def fat_binary(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_other_gpus_code_is_cleared_and_nothing_else(scripts: None, tmp_path: Path) -> None:
    import thin_library

    both = fat_binary(entry(2, 80, b"A" * 40), entry(2, 90, b"B" * 24), entry(1, 90, b"P" * 16))
    only_ptx = fat_binary(entry(2, 75, b"C" * 8), entry(1, 75, b"Q" * 32), entry(1, 100, b"R" * 8))
    data = b"start" + both + b"between" + only_ptx + b"end"
    path = tmp_path / "library.so"
    path.write_bytes(data)
    assert thin_library.thin(path, 90) == 40 + 16 + 8 + 8
    expected = data
    for doomed in (b"A" * 40, b"P" * 16, b"C" * 8, b"R" * 8):
        expected = expected.replace(doomed, bytes(len(doomed)))
    assert path.read_bytes() == expected


def test_the_builders_time_goes_to_what_was_timed(scripts: None, tmp_path: Path) -> None:
    import build_log

    path = tmp_path / "verbose.log"
    path.write_text(
        "0 Original: 40 layers\n"
        "1500 =============== Computing costs for \n"
        "2000 --------------- Timing Runner: {ForeignNode[a...b]} (Myelin)\n"
        "7000 Tactic: 0x0 Time: 0.1\n"
        "7500 --------------- Timing Runner: MatMul_3 (CublasLt)\n"
        "8000 Tactic: 0x1 Time: 0.2\n"
        "8250 Tactic: 0x2 Time: 0.3\n"
        "a line of something else\n"
        "8500 =============== Computing costs for \n"
        "9000 last\n"
    )
    text = build_log.summary(path)
    assert "9 messages in 9 s" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "5.5 s 1 tactics Myelin" in lines
    assert "1.0 s 2 tactics CublasLt" in lines
    assert "2.5 s 0 tactics no runner" in lines
    assert "5.5 s Myelin: {ForeignNode[a...b]}" in lines
    assert "5.0 s at 2: --------------- Timing Runner: {ForeignNode[a...b]} (Myelin)" in lines


def trace(**changes: Any) -> dict[str, Any]:
    """One row, three steps, mask 9; the best position leads by 0.3, its best token by 0.5."""
    found = {
        "block_tokens": np.array([[[9, 9, 9]], [[4, 9, 9]], [[4, 5, 9]]]),
        "token": np.array([[[4, 5, 6]]] * 3),
        "confidence": np.array([[[0.9, 0.6, 0.1]], [[0.0, 0.6, 0.1]], [[0.0, 0.0, 0.1]]]),
        "margin": np.full((3, 1, 3), 0.5),
        "tokens": np.array([[4, 5, 6]]),
    }
    return {**found, **changes}


def test_a_first_difference_is_a_near_tie_or_wrong(scripts: None) -> None:
    import traces

    same = traces.compare(trace(), trace(), 9, 0.01)
    assert (same.equal_rows, same.equal_tokens, same.decisions) == (1, 1.0, 3)
    other = trace(
        block_tokens=np.array([[[9, 9, 9]], [[9, 5, 9]], [[4, 5, 9]]]), tokens=np.array([[4, 5, 7]])
    )
    strict, lenient = (traces.compare(trace(), other, 9, bound) for bound in (0.29, 0.31))
    assert (strict.near_ties, lenient.near_ties) == (0, 1)
    assert strict.wrong == [{"row": 0, "step": 0, "token": 0.5, "position": pytest.approx(0.3)}]
    assert strict.decisions == 1
    assert strict.equal_tokens == pytest.approx(2 / 3)
