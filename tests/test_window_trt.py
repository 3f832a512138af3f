"""Plans of `reuse-kv` and `window`: built for SM89 without a GPU, their cubins checked by bytes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from synthetic import make_llada

from lacache_trt.artifacts import Manifest, load_manifest
from lacache_trt.engines.tensorrt.building import build_plans, graphs_to_build
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.errors import InvalidRequestError
from lacache_trt.export.exporter import export_bundle
from lacache_trt.export.options import ExportOptions
from lacache_trt.model.safetensors_file import read_safetensors_header
from lacache_trt.plugins.programs import packed_program
from lacache_trt.progress import SilentProgress

TENSORRT_RTX = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="TensorRT-RTX is not installed"
)
PROFILE = "B=1:1:2,N=16:96:256,Bk=4:16:32,W=4:16:256,S=1:1:2,E=1:1:2,R=0:0:4"
GRAPHS = ("fill", "reuse", "reuse-kv", "window")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Two layers with grouped heads of 64, in fp16."""
    folder = tmp_path_factory.mktemp("window-trt")
    checkpoint = make_llada(
        folder / "model", hidden=256, heads=4, kv_heads=2, ffn=384, layers=2, vocab=197
    )
    options = ExportOptions(dtype="float16", validate="off")
    export_bundle(str(checkpoint), folder / "bundle", options)
    return load_manifest(folder / "bundle")


@TENSORRT_RTX
@pytest.mark.parametrize("plugins", [True, False], ids=["plugins", "portable"])
def test_the_plans_build(bundle: Manifest, tmp_path: Path, plugins: bool) -> None:
    """Shared weights: the three graphs with all layers take one copy of them."""
    options = TensorRTOptions(
        sm=89, profiles=(PROFILE,), weights="shared", cache="exact,kv", plugins=plugins
    )
    body = build_plans(bundle, tmp_path, "tensorrt-rtx", options, SilentProgress())
    assert set(body["contract"]) == set(GRAPHS)
    assert all(len(profile["W"]) == 3 for profile in body["profiles"])
    assert set(body["shared_weights"]["reuse-kv"]) == set(body["shared_weights"]["reuse"])
    assert set(body["shared_weights"]["window"]) == set(body["shared_weights"]["reuse"])
    program = packed_program("AttentionWindow", torch.float16, bundle.model.head_dim, 89)
    header = read_safetensors_header(tmp_path / "weights.safetensors")
    stored = (tmp_path / "weights.safetensors").read_bytes()
    for graph in GRAPHS:
        plan = (tmp_path / f"{graph}.plan").read_bytes()
        assert (program in plan) == (plugins and graph == "window")
        if not plugins:
            assert b"AttentionWindow" not in plan
        for name in body["shared_weights"][graph]:
            start = header[name].offset
            assert stored[start : start + 512] not in plan, (graph, name)
    json.dumps(body)


def test_a_bundle_without_the_graphs_is_refused(bundle: Manifest) -> None:
    contract = {name: spec for name, spec in bundle.contract.items() if name != "window"}
    assert graphs_to_build(contract, "exact") == ("fill", "reuse")
    with pytest.raises(InvalidRequestError, match="no window"):
        graphs_to_build(contract, "exact,kv")
    with pytest.raises(InvalidRequestError, match="unknown kinds of caches"):
        TensorRTOptions(cache="kv")  # type: ignore[arg-type]
