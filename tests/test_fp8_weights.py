"""FP8 weights when they are loaded, and checkpoints that are FP8 already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from fp8_models import make_checkpoint
from fp8_reference import dequantised_blocks, quantised_blocks
from safetensors.torch import load_file, save_file
from test_fp8_quantise import CONFIG, run, write_source

from lacache_trt.artifacts import load_manifest, publish_directory, write_manifest
from lacache_trt.engines import builder
from lacache_trt.engines.builder import build_engine, load_engine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.errors import ArtifactError, CheckpointError, LaCacheError, MissingDependencyError
from lacache_trt.export.dequantise import E4M3_VALUES
from lacache_trt.export.weights import write_weights
from lacache_trt.fp8_weights import checked_fp8_linears
from lacache_trt.gpus import Gpu, GpuReport
from lacache_trt.model.checkpoint import Checkpoint
from lacache_trt.model.fp8 import Fp8Recipe, fp8_section, select_linears

WEIGHTS = "weights.safetensors"


def write_directory(
    out: Path, change: Any = None, section: Any = ..., kind: Any = "engine", **more: object
) -> Path:
    """An FP8 engine directory without graphs, its tensors changed and its hashes right."""
    recipe = Fp8Recipe()
    source = out.parent / f"{out.name}.source"
    write_source(source, CONFIG, "bfloat16")
    with publish_directory(out) as directory:
        _, facts = run(source, directory / WEIGHTS, CONFIG, "bfloat16", recipe)
        tensors = load_file(directory / WEIGHTS)
        if change is not None:
            change(tensors)
            save_file(tensors, directory / WEIGHTS)
        written = fp8_section(recipe, select_linears(CONFIG, recipe), {})
        body: dict[str, Any] = {
            "model": CONFIG.to_json(),
            "engine": "onnxruntime",
            "dtype": "bfloat16",
        }
        body |= more
        if section is not None:
            body["fp8"] = written if section is ... else section
        write_manifest(directory, kind, body)
    assert facts
    return out


def test_a_good_file_is_accepted(tmp_path: Path) -> None:
    manifest = load_manifest(write_directory(tmp_path / "good"))
    assert checked_fp8_linears(manifest) == set(manifest.body["fp8"]["linears"])  # type: ignore[index]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_cannot_be_are_refused(tmp_path: Path, value: float) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["layers.2.down.scale"][0, 1] = value

    manifest = load_manifest(write_directory(tmp_path / "bad", change))
    with pytest.raises(ArtifactError, match=r"layers\.2\.down\.scale holds a scale") as caught:
        load_engine(manifest)
    assert "[0, 1]" in str(caught.value)
    bundle = write_directory(tmp_path / "bundle", change, kind="bundle")
    with pytest.raises(ArtifactError, match="holds a scale"):
        build_engine(bundle, tmp_path / "out", BuildOptions(engine="onnxruntime"))


def drop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def retype(name: str) -> Any:
    return lambda tensors: tensors.update({name: tensors[name].to(torch.bfloat16)})


def transpose(name: str) -> Any:
    return lambda tensors: tensors.update({name: tensors[name].t().contiguous()})


def extra_fp8(tensors: dict[str, Any]) -> None:
    tensors["layers.0.down.weight"] = tensors["layers.1.down.weight"].clone()


@pytest.mark.parametrize(
    "change",
    [
        drop("layers.1.down.scale"),
        drop("layers.1.down.weight"),
        retype("layers.1.down.weight"),
        retype("layers.1.down.scale"),
        transpose("layers.1.down.weight"),
        transpose("layers.1.gate_up.scale"),
        extra_fp8,
    ],
)
def test_weights_that_are_not_the_recipes_are_refused(tmp_path: Path, change: Any) -> None:
    manifest = load_manifest(write_directory(tmp_path / "bad", change))
    with pytest.raises(ArtifactError, match="not those of the FP8 recipe"):
        load_engine(manifest)


def test_fp8_weights_without_a_recipe_are_refused(tmp_path: Path) -> None:
    manifest = load_manifest(write_directory(tmp_path / "bad", section=None))
    with pytest.raises(ArtifactError, match="not those of the FP8 recipe"):
        load_engine(manifest)


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("where", ["the GPU of --sm", "NVIDIA A100"])
def test_fp8_for_a_gpu_without_it_is_refused_before_anything_is_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool, where: str
) -> None:
    """Asked for with --fp8, or in the bundle already; the GPU named, or the one that is here."""
    entry = builder.ENGINES["tensorrt-rtx"]
    here = () if where.startswith("the") else (Gpu(where, "8.0", 2**36),)
    monkeypatch.setattr(builder, "resolve_for_build", lambda name, sm: entry)
    monkeypatch.setattr(builder, "find_gpus", lambda: GpuReport("580", "13.0", here, None))
    bundle = write_directory(tmp_path / "bundle", kind="bundle")
    if asked:
        monkeypatch.setattr(builder, "checked_fp8_linears", lambda manifest: frozenset())
    options = BuildOptions(
        engine="tensorrt-rtx",
        tensorrt=TensorRTOptions(sm=None if here else 86),
        fp8=Fp8Recipe() if asked else None,
    )
    with pytest.raises(MissingDependencyError, match="no FP8 tensor cores") as caught:
        build_engine(bundle, tmp_path / "out", options)
    assert f"{where}, sm_{80 if here else 86}" in str(caught.value)
    assert "sm_89 or later" in str(caught.value)
    assert not (tmp_path / "out").exists()


# Checkpoints that are FP8 already


def test_all_codes_of_e4m3_are_known() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(E4M3_VALUES, expected)
    np.testing.assert_array_equal(np.signbit(E4M3_VALUES), np.signbit(expected))


LAYOUTS: dict[str, Any] = {
    "deepseek": (
        "_scale_inv",
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    ),
    "modelopt": ("_scale", {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo", "ignore": []}),
}
QUANTISED = ("ff_proj", "up_proj", "ff_out.weight", "q_proj")


def quantised_checkpoint(
    path: Path, layout: str, change: Any = None, **config: object
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A LLaDA checkpoint whose linears are FP8; what it was before, and its tensors."""
    suffix, section = LAYOUTS[layout]
    make_checkpoint(
        "llada", path, dtype="bfloat16", config_changes={"quantization_config": section, **config}
    )
    original = load_file(path / "model.safetensors")
    tensors = dict(original)
    for name, tensor in original.items():
        if "blocks" in name and any(part in name for part in QUANTISED):
            values, scales = quantised_blocks(tensor.float().numpy())
            tensors[name] = torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn)
            blocks = torch.from_numpy(scales)
            shape = (len(scales), 1, scales.shape[1], 1) if layout == "modelopt" else scales.shape
            tensors[name + suffix] = blocks.reshape(shape)
    if change is not None:
        change(tensors)
    save_file(tensors, path / "model.safetensors")
    return original, tensors


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_quantised_checkpoint_is_dequantised(tmp_path: Path, layout: str) -> None:
    """Exactly, in float32; and quantising again gives the same values, also by way of bfloat16."""
    _, tensors = quantised_checkpoint(tmp_path / "checkpoint", layout)
    checkpoint = Checkpoint.open(tmp_path / "checkpoint")
    assert checkpoint.config.dtype == "bfloat16"
    source = "model.transformer.blocks.1.ff_out.weight"
    suffix = LAYOUTS[layout][0]
    values = tensors[source].view(torch.uint8).numpy()
    scales = tensors[source + suffix].reshape(1, -1).numpy()
    exact = dequantised_blocks(values.view(ml_dtypes.float8_e4m3fn), scales)
    for dtype, tolerance in (("float32", 2.0**-23), ("bfloat16", 2.0**-8)):
        path = tmp_path / f"{dtype}.safetensors"
        write_weights(checkpoint, path, dtype)  # type: ignore[arg-type]
        found = load_file(path)["layers.1.down.weight"].t().float().numpy()
        np.testing.assert_allclose(found, exact, rtol=tolerance, atol=0)
        target = tmp_path / f"{dtype}.fp8"
        run(path, target, checkpoint.config, dtype, Fp8Recipe())
        again = load_file(target)
        got = again["layers.1.down.weight"].view(torch.uint8).numpy()
        np.testing.assert_array_equal(got, values)
        np.testing.assert_allclose(again["layers.1.down.scale"].numpy(), scales, rtol=tolerance)


def test_scales_of_another_layout_are_refused(tmp_path: Path) -> None:
    def rename(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name.removesuffix("_inv")] = tensors.pop(name)

    quantised_checkpoint(tmp_path / "checkpoint", "deepseek", rename)
    with pytest.raises(CheckpointError, match="lack the scales of DeepSeek's layout"):
        Checkpoint.open(tmp_path / "checkpoint")


@pytest.mark.parametrize("value", [float("nan"), -1.0, 0.0])
def test_broken_scales_of_a_checkpoint_are_refused(tmp_path: Path, value: float) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["model.transformer.blocks.0.ff_proj.weight_scale_inv"][0, 0] = value

    quantised_checkpoint(tmp_path / "checkpoint", "deepseek", change)
    checkpoint = Checkpoint.open(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"a scale of .*ff_proj\.weight cannot be one"):
        write_weights(checkpoint, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "gptq"},
        ["fp8"],
    ],
)
def test_other_quantisations_are_refused_by_name(tmp_path: Path, section: object) -> None:
    quantised_checkpoint(tmp_path / "checkpoint", "deepseek", quantization_config=section)
    with pytest.raises(LaCacheError, match="quantization_config"):
        Checkpoint.open(tmp_path / "checkpoint")


def test_the_config_is_json(tmp_path: Path) -> None:
    """What the tests write is what they mean to write."""
    quantised_checkpoint(tmp_path / "checkpoint", "modelopt")
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "fp8_pb_wo"
