"""The atlas of activations against hooks of its own, its suggestions, its picture, the command."""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from lacache_trt.accuracy.activations import Atlas, LinearFacts, Recorder, record, suggest
from lacache_trt.accuracy.models import Case, build_model
from lacache_trt.accuracy.outliers import MODEL, planted_weights
from lacache_trt.accuracy.settings import ActivationSettings
from lacache_trt.cli.main import app
from lacache_trt.demo.shipped import CHECKPOINT
from lacache_trt.errors import InvalidRequestError, NumericalError

SMALL = ActivationSettings(gen_length=32, block_length=16, steps=4)


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    return record(SMALL, prompts=["Tom has 45 pens.", [5, 6, 7]])


def test_every_step_of_every_block_is_there(atlas: Atlas) -> None:
    assert atlas.steps == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert set(atlas.amax) == {
        f"layers.{layer}.{kind}" for layer in range(6) for kind in ("gate_up", "down")
    }
    assert atlas.amax["layers.3.gate_up"].shape == (4, 256)
    assert atlas.amax["layers.3.down"].shape == (4, 768)
    for row in atlas.linears:
        assert row.largest == atlas.amax[row.linear].max()
        assert row.sqnr_db is not None
        assert 15 < row.sqnr_db < 60


def test_amax_and_noise_are_the_definitions() -> None:
    """Two inputs of one linear, in float64."""
    model, _ = build_model(MODEL, planted_weights(0, 64.0), Case("bf16"), {})
    recorder = Recorder(model)
    rng = np.random.default_rng(0)
    inputs = [torch.from_numpy(rng.standard_normal((2, 3, 256))).bfloat16() for _ in range(2)]
    for x in inputs:
        recorder.begin(0, 5)
        recorder.watch("layers.1.gate_up", x)
        recorder.watch("layers.1.qkv", x)
    both = torch.cat(inputs).double().flatten(0, 1)
    assert set(recorder.steps) == {(0, 5)}
    assert set(recorder.steps[0, 5]) == {"layers.1.gate_up"}
    assert torch.equal(recorder.steps[0, 5]["layers.1.gate_up"].double(), both.abs().amax(0))
    weight = model.weight("layers.1.gate_up.weight").double()
    from test_accuracy_schemes import expected_activations, expected_weights

    reduced = expected_activations("group", both[None].numpy(), np.ones(256))[0]
    noise = reduced @ expected_weights("group", weight.numpy().T).T - (both @ weight).numpy()
    signal, found = recorder.energies["layers.1.gate_up"].tolist()
    assert signal == pytest.approx(float((both @ weight).square().sum()), rel=1e-5)
    assert found == pytest.approx(float((noise**2).sum()), rel=1e-4)


def facts(levels: list[float | None]) -> list[LinearFacts]:
    return [
        LinearFacts(f"layers.{layer}.{kind}", 1.0, 1.0, 1.0, 0, level if kind == "down" else 30.0)
        for layer, level in enumerate(levels)
        for kind in ("gate_up", "down")
    ]


def test_suggestions_follow_the_rule() -> None:
    assert suggest(facts([30.0, 30.5, 31.0, 29.0]), MODEL) == ()
    assert suggest(facts([24.0, 30.0, 30.0, 30.0]), MODEL) == (0,)
    assert suggest(facts([24.1, 30.0, 30.0, 12.0]), MODEL) == (3,)
    assert suggest(facts([None, None, None, None]), MODEL) == ()


def test_a_spoiled_layer_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outliers planted in one layer of tiny-llada, function unchanged: the atlas finds it."""
    from lacache_trt.accuracy import activations

    original = activations.load_weights

    def spoiled(*arguments: object) -> dict[str, torch.Tensor]:
        weights = original(*arguments)  # type: ignore[arg-type]
        channels = slice(None, None, 32)
        weights["layers.2.ffn_norm.weight"][channels] *= 2.0**18
        weights["layers.2.gate_up.weight"][channels] /= 2.0**18
        return weights

    monkeypatch.setattr(activations, "load_weights", spoiled)
    found = record(SMALL, prompts=["Tom has 45 pens."])
    assert found.suggested == (2,)
    rows = {row.linear: row for row in found.linears}
    assert rows["layers.2.gate_up"].outlier_channels >= 8


def test_what_is_not_finite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from lacache_trt.accuracy import activations

    with pytest.raises(NumericalError, match="NaN or infinite"):
        activations._facts("layers.1.down", np.array([[1.0, np.inf]], np.float32), None)


def test_picture(atlas: Atlas, tmp_path: Path) -> None:
    from lacache_trt.accuracy.plots import draw

    path = tmp_path / "atlas.png"
    draw(atlas, path)
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    assert width > 800
    assert height > 600
    flat = {name: np.zeros_like(values) for name, values in atlas.amax.items()}
    draw(replace(atlas, amax=flat), path)
    with pytest.raises(InvalidRequestError, match="PNG"):
        draw(atlas, tmp_path / "atlas.gif")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "activations", *map(str, arguments)])


SHORT = ("--gen-length", 8, "--block-length", 4, "--steps", 4)


def test_command_line(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"Tom has 45 pens."\n{"prompt": [1, 2, 3]}\n')
    plot = tmp_path / "a.png"
    arguments = (*SHORT, "--calibration", prompts, "--plot", plot)
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["workload"]["prompts"] == 2
    assert plot.stat().st_size > 10_000
    assert len(report["channel_amax"]["layers.5.down"]) == 768
    assert isinstance(report["suggested_exclusions"], list)
    shown = invoke(CHECKPOINT, *SHORT, "--calibration", prompts).stdout
    assert "layers to leave in 16 bits" in shown
    assert "layers.5.down" in shown


def test_what_the_command_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(CHECKPOINT, *SHORT).exit_code == 2
    assert invoke("--gen-length", 7, "--block-length", 4).exit_code == 2
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("[1, 99999]\n")
    assert invoke(*SHORT, "--calibration", prompts).exit_code == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "lacache_trt.accuracy.plots", raising=False)
    result = invoke(*SHORT, "--plot", tmp_path / "a.png", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["error"]["type"] == "MissingDependencyError"
    assert "lacache-trt[plots]" in json.loads(result.stdout)["error"]["fix"]
