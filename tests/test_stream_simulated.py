"""The stream benchmark: its script, its eager accelerators, and the whole of it at toy size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import benchmark_path
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("triton")

from llada_shape import random_weights
from reference_llada import build_reference
from stream_script import EagerStream, Script

from lacache_trt.generation import GenerationConfig
from lacache_trt.model.config import ModelConfig

SMALL_LLADA = ModelConfig(
    family="llada",
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    vocab_size=97,
    rope_theta=1e4,
    norm_eps=1e-5,
    max_length=256,
    qkv_bias=False,
    tied_head=False,
    logit_shift=False,
    mask_id=96,
    eos_ids=(95,),
    dtype="float32",
)
MASK, EOS = SMALL_LLADA.mask_id, SMALL_LLADA.eos_ids[0]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rate=st.floats(1.0, 9.0),
    block=st.integers(1, 32),
    blocks=st.integers(1, 6),
    answer=st.integers(0, 200),
)
def test_the_script_keeps_its_pace(rate: float, block: int, blocks: int, answer: int) -> None:
    """Never faster than promised, every block ends, the end tokens are where they are due."""
    script = Script(SMALL_LLADA, rate, answer)
    script.begin()
    for index in range(blocks):
        tokens = np.full(block, MASK, np.int32)
        places = np.arange(index * block, (index + 1) * block, dtype=np.int32)
        while (tokens == MASK).any():
            chosen, predicted = script.choose(tokens, places)
            assert len(chosen) >= 1
            assert (tokens[chosen] == MASK).all()
            assert script.committed <= max(rate * script.forwards, script.forwards) + 1e-6
            tokens[chosen] = predicted[chosen]
        assert ((tokens == EOS) == (places >= answer)).all()
    assert script.committed == block * blocks


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return build_reference(SMALL_LLADA, random_weights(SMALL_LLADA, "cpu", dtype=torch.float32))


def test_the_eager_forward_is_the_network(network: nn.Module) -> None:
    """A full forward equals transformers'; a window of unchanged tokens equals the full one."""
    stream = EagerStream(network, SMALL_LLADA)
    tokens = torch.randint(0, EOS, (1, 40), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(40)[None]
    with torch.no_grad():
        expected = network(input_ids=tokens).logits
        whole = stream._forward(tokens, positions, None)
        window = stream._forward(tokens[:, 12:20], positions[:, 12:20], 12)
        changed = tokens.clone()
        changed[0, 15] = (changed[0, 15] + 1) % EOS
        other = stream._forward(changed[:, 12:20], positions[:, 12:20], 12)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(window, expected[:, 12:20], rtol=1e-4, atol=1e-4)
    assert (other - window).abs().max() > 1e-2


def test_the_eager_answer_ends_where_the_script_says(network: nn.Module) -> None:
    given_settings = GenerationConfig(
        gen_length=96, block_length=16, steps=96, policy="threshold", cache="dual", suffix="dpad"
    )
    stream = EagerStream(network, SMALL_LLADA)
    script = Script(SMALL_LLADA, 4.0, 20)
    assert stream.run([1, 2, 3], given_settings, script) == 8  # two blocks of 16, 4 a forward
    assert stream.run([1, 2, 3], replace(given_settings, stop_at_eos=False), script) == 24


def test_the_benchmark_at_toy_size(tmp_path: Path) -> None:
    """Every part runs through the real runtime and says that its acceptance is simulated."""
    script = ["benchmarks/run_from_checkout.py", "benchmarks/stream_simulated.py", "--toy"]
    done = subprocess.run(
        [sys.executable, *script, "--steps", "2", "--budget", "500"],
        cwd=benchmark_path.BENCHMARKS.parent,
        env=os.environ | {"OUT": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "stream_simulated_toy.json").read_text())
    details = result["details"]
    assert details["simulated_acceptance"]
    assert not details["left_out"]
    for key, forwards in (("tpf1", 64), ("tpf3_3", 20)):
        rows = details[f"short {key}"]
        assert rows["eager"]["forwards"] == rows["bf16"]["forwards"] == forwards
    parts = details["long"]
    assert parts["all"]["forwards"] == parts["eager"]["forwards"] == 20
    assert parts["one_token_per_forward"]["forwards"] == 64
    assert parts["without_eos_stop"]["forwards"] == 49  # 160 tokens at 3.3 a forward
    lines = [line for line in done.stdout.splitlines() if "tok/s" in line]
    assert lines
    assert all(line.startswith("[simulated acceptance]") for line in lines)
