"""What FP8 per channel refuses: engines, options, prompts, weights; nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_models import make_bundle, make_checkpoint
from safetensors.torch import load_file, save_file
from test_fp8_channel import CHANNEL, FACTS, write
from test_fp8_quantise import CONFIG
from test_fp8_weights import write_directory
from typer.testing import CliRunner

from lacache_trt.artifacts import load_manifest, publish_directory, write_manifest
from lacache_trt.cli.main import app
from lacache_trt.engines import builder
from lacache_trt.engines.builder import build_engine, load_engine
from lacache_trt.engines.cuda.fp8 import require_per_group
from lacache_trt.engines.fp8_recipes import check_recipe
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.errors import (
    ArtifactError,
    CapacityError,
    InvalidRequestError,
    LaCacheError,
    NumericalError,
    QuantisationError,
)
from lacache_trt.export import calibrate
from lacache_trt.fp8_weights import checked_fp8_linears
from lacache_trt.inspection import inspect_path
from lacache_trt.model.fp8 import Fp8Recipe, fp8_section, select_linears

WEIGHTS = "weights.safetensors"
FILE = Path("prompts.jsonl")
NO_PLUGINS, LEGACY = TensorRTOptions(plugins=False), TensorRTOptions(trt_version="8.5")


def test_options_without_a_calibration_or_for_the_wrong_engine_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="needs a calibration") as caught:
        BuildOptions(fp8=CHANNEL)
    assert "--calibration FILE.jsonl" in str(caught.value)
    for fp8 in (None, Fp8Recipe()):
        with pytest.raises(InvalidRequestError, match="nothing here needs a calibration"):
            BuildOptions(fp8=fp8, calibration=FILE)
    with pytest.raises(InvalidRequestError, match="needs the plugins") as caught:
        BuildOptions(fp8=Fp8Recipe(), tensorrt=NO_PLUGINS)
    assert "--fp8-recipe per-channel" in str(caught.value)
    for engine, tensorrt in (("cuda", TensorRTOptions()), ("tensorrt", LEGACY)):
        with pytest.raises(InvalidRequestError, match="ONNX Runtime") as caught:
            BuildOptions(engine=engine, tensorrt=tensorrt, fp8=CHANNEL, calibration=FILE)
        assert "--fp8-recipe per-group" in str(caught.value)
    for engine in ("auto", "tensorrt", "tensorrt-rtx", "onnxruntime"):
        BuildOptions(engine=engine, fp8=CHANNEL, calibration=FILE)
        check_recipe("per-channel", engine, NO_PLUGINS)


def channel_directory(out: Path, change: Any = None, kind: Any = "engine") -> Path:
    """A per-channel directory without graphs, its tensors changed and its hashes right."""
    with publish_directory(out) as directory:
        _, _, scales, _ = write(directory / WEIGHTS)
        (directory / f"{WEIGHTS}.in").unlink()
        facts = {name: {"input_amax": 448 * scale} for name, scale in scales.items()}
        if change is not None:
            tensors = load_file(directory / WEIGHTS)
            change(tensors)
            save_file(tensors, directory / WEIGHTS)
        section = fp8_section(CHANNEL, select_linears(CONFIG, CHANNEL), facts, FACTS)
        model = {"model": CONFIG.to_json(), "engine": "onnxruntime", "dtype": "bfloat16"}
        write_manifest(directory, kind, {**model, "fp8": section})
    return out


def test_a_good_directory_is_accepted_and_described(tmp_path: Path) -> None:
    manifest = load_manifest(channel_directory(tmp_path / "good"))
    assert checked_fp8_linears(manifest) == set(manifest.body["fp8"]["linears"])  # type: ignore[index]
    found: Any = inspect_path(tmp_path / "good")
    assert found["fp8"]["calibration"] == FACTS
    shown = CliRunner().invoke(app, ["inspect", str(manifest.directory)]).stdout
    assert "per-channel, scales max (builtin)" in shown
    assert "2 prompts, 9 tokens, 64 more each (sha256 000000000000)" in shown
    with pytest.raises(ArtifactError, match="scales per channel"):
        require_per_group(manifest.body)


@pytest.mark.parametrize("part", ["scale", "input_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e37])
def test_scales_that_cannot_be_are_refused(tmp_path: Path, part: str, value: float) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors[f"layers.2.down.{part}"].view(-1)[0] = value

    with pytest.raises(ArtifactError, match=rf"layers\.2\.down\.{part} holds a scale"):
        load_engine(load_manifest(channel_directory(tmp_path / "bad", change)))
    bundle = channel_directory(tmp_path / "bundle", change, kind="bundle")
    with pytest.raises(ArtifactError, match="holds a scale"):
        build_engine(bundle, tmp_path / "out", BuildOptions(engine="onnxruntime"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [1e-30, 1e30, 0.5])
def test_an_input_scale_of_another_calibration_is_refused(tmp_path: Path, value: float) -> None:
    """It would give wrong tokens and no other sign."""

    def change(tensors: dict[str, Any]) -> None:
        tensors["layers.2.down.input_scale"].fill_(value)

    manifest = load_manifest(channel_directory(tmp_path / "bad", change))
    with pytest.raises(ArtifactError, match=r"layers\.2\.down is not that of the calibration"):
        load_engine(manifest)


Tensors = dict[str, torch.Tensor]
CHANGES: dict[str, Callable[[Tensors], Any]] = {
    "missing": lambda tensors: tensors.pop("layers.1.down.input_scale"),
    "wide": lambda tensors: tensors.update({"layers.1.down.input_scale": torch.ones(1)}),
    "typed": lambda tensors: tensors.update(
        {"layers.1.down.input_scale": torch.tensor(1.0, dtype=torch.bfloat16)}
    ),
    "blocks": lambda tensors: tensors.update({"layers.1.down.scale": torch.ones(1, 3)}),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_weights_that_are_not_the_recipes_are_refused(tmp_path: Path, name: str) -> None:
    manifest = load_manifest(channel_directory(tmp_path / "bad", CHANGES[name]))
    with pytest.raises(ArtifactError, match="not those of the FP8 recipe") as caught:
        load_engine(manifest)
    assert "layers.1.down" in str(caught.value)


def test_a_file_per_group_is_not_one_per_channel(tmp_path: Path) -> None:
    section = fp8_section(CHANNEL, select_linears(CONFIG, CHANNEL), {}, FACTS)
    manifest = load_manifest(write_directory(tmp_path / "bad", section=section))
    with pytest.raises(ArtifactError, match="not those of the FP8 recipe"):
        load_engine(manifest)


@pytest.mark.parametrize(
    ("kind", "engine", "tensorrt", "message"),
    [
        ("per-channel", "cuda", TensorRTOptions(), "scales per channel is for TensorRT"),
        ("per-channel", "tensorrt", LEGACY, "scales per channel is for TensorRT"),
        ("per-group", "tensorrt-rtx", NO_PLUGINS, "scales per group needs the plugins"),
    ],
)
def test_a_quantised_bundle_is_refused_where_it_cannot_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    engine: str,
    tensorrt: Any,
    message: str,
) -> None:
    monkeypatch.setattr(builder, "resolve_for_build", lambda name, sm: builder.ENGINES[name])
    make = channel_directory if kind == "per-channel" else write_directory
    bundle = make(tmp_path / "bundle", kind="bundle")  # type: ignore[operator]
    with pytest.raises(InvalidRequestError, match=message):
        build_engine(bundle, tmp_path / "out", BuildOptions(engine=engine, tensorrt=tensorrt))
    assert not (tmp_path / "out").exists()


# Prompts and weights that nothing can be calibrated on


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers in float32 with room for 80 tokens, no tokenizer, stand-ins for graphs."""
    folder = tmp_path_factory.mktemp("refused")
    checkpoint = make_checkpoint("llada", folder / "checkpoint", layers=2, max_length=80)
    return make_bundle(checkpoint, folder / "bundle").directory


def refused(bundle: Path, folder: Path, text: bytes, **recipe: Any) -> LaCacheError:
    """The error of a build that calibrates on a file of this text; it leaves nothing behind."""
    file, out = folder / "prompts.jsonl", folder / "out"
    file.write_bytes(text)
    before = sorted(folder.iterdir())
    options = BuildOptions(engine="onnxruntime", fp8=replace(CHANNEL, **recipe), calibration=file)
    with pytest.raises(LaCacheError) as caught:
        build_engine(bundle, out, options)
    assert sorted(folder.iterdir()) == before
    return caught.value


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (b"", InvalidRequestError, "prompts.jsonl holds no prompt"),
        (b"\n \n", InvalidRequestError, "prompts.jsonl holds no prompt"),
        (b"[3, 4]\n\n{broken\n", InvalidRequestError, "line 3 of prompts.jsonl is not JSON"),
        (b'[3]\n{"text": "x"}\n', InvalidRequestError, "line 2 of prompts.jsonl holds no prompt"),
        (b"[3]\n[3, 1.5]\n", InvalidRequestError, "line 2 of prompts.jsonl holds no prompt"),
        (b"[3]\n[]\n", InvalidRequestError, "line 2 of prompts.jsonl: the prompt is empty"),
        (b"[3, 99999]\n", InvalidRequestError, "line 1 .* outside the vocabulary"),
        (b"\xff\xfe\n", InvalidRequestError, "not UTF-8"),
        (b'"text"\n', InvalidRequestError, "line 1 .* needs a tokenizer"),
        (b"[3]\n[" + b"4," * 16 + b"4]\n", CapacityError, "line 2 .* longer than the model"),
        (b"[" * 100_000 + b"\n", InvalidRequestError, "line 1 of prompts.jsonl is not JSON"),
    ],
)
def test_prompts_that_are_none_are_refused(
    bundle: Path, tmp_path: Path, text: bytes, kind: type[LaCacheError], message: str
) -> None:
    error = refused(bundle, tmp_path, text)
    assert isinstance(error, kind)
    assert error.args
    with pytest.raises(kind, match=message):
        raise error


def test_a_file_that_is_not_there_is_refused(bundle: Path, tmp_path: Path) -> None:
    options = BuildOptions(engine="onnxruntime", fp8=CHANNEL, calibration=tmp_path / "none.jsonl")
    with pytest.raises(InvalidRequestError, match=r"cannot read none\.jsonl"):
        build_engine(bundle, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def changed(bundle: Path, out: Path, name: str, value: float) -> Path:
    """A copy of the bundle in which a tensor has one value, its hashes right."""
    manifest = load_manifest(bundle, "bundle")
    with publish_directory(out) as directory:
        tensors = load_file(bundle / WEIGHTS)
        tensors[name].fill_(value)
        save_file(tensors, directory / WEIGHTS)
        for file in manifest.files:
            if file != WEIGHTS:
                (directory / file).write_bytes(manifest.path(file).read_bytes())
        write_manifest(directory, "bundle", manifest.body)
    return out


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        ("layers.1.gate_up.weight", float("nan"), QuantisationError, "gate_up.weight is not fin"),
        ("embed.weight", float("inf"), QuantisationError, "embed.weight is not finite"),
        ("layers.1.ffn_norm.weight", 3e38, NumericalError, "NaN or infinite"),
        ("layers.1.ffn_norm.weight", 0.0, QuantisationError, "layers.1.gate_up is zero on every"),
        ("layers.1.ffn_norm.weight", 1e-30, QuantisationError, "layers.1.gate_up is zero on every"),
    ],
)
def test_weights_that_leave_no_scale_are_refused(
    bundle: Path, tmp_path: Path, name: str, value: float, kind: type[LaCacheError], message: str
) -> None:
    broken = changed(bundle, tmp_path / "broken", name, value)
    error = refused(broken, tmp_path, b"[3, 4, 5]\n")
    assert isinstance(error, kind)
    assert message in error.what


def test_an_interrupted_calibration_leaves_nothing(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "prompts.jsonl").write_text("[3]\n")
    monkeypatch.setattr(calibrate, "calibrate", interrupted)
    options = BuildOptions(
        engine="onnxruntime", fp8=CHANNEL, calibration=tmp_path / "prompts.jsonl"
    )
    with pytest.raises(KeyboardInterrupt):
        build_engine(bundle, tmp_path / "out", options)
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]
