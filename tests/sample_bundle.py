"""A small bundle whose files hold no graphs: enough for everything that only checks files."""

from __future__ import annotations

from pathlib import Path

from lacache_trt.artifacts import publish_directory, write_manifest
from lacache_trt.contract import graph_specs
from lacache_trt.contract_json import contract_to_json
from lacache_trt.model.config import ModelConfig

MODEL = ModelConfig(
    family="llada",
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=100,
    rope_theta=10000.0,
    norm_eps=1e-5,
    max_length=128,
    qkv_bias=False,
    tied_head=False,
    logit_shift=False,
    mask_id=99,
    eos_ids=(1, 2),
    dtype="float32",
)
FILES = {"fill.onnx": b"f" * 3000, "reuse.onnx": b"r" * 4000, "weights.safetensors": b"w" * 5000}


def write_bundle(out: Path, **extra: object) -> None:
    body = {
        "model": MODEL.to_json(),
        "contract": contract_to_json(graph_specs(MODEL, "float32")),
        "versions": {"onnx": "1.23.2"},
        **extra,
    }
    with publish_directory(out) as directory:
        for name, data in FILES.items():
            (directory / name).write_bytes(data)
        (directory / "text").mkdir()
        (directory / "text" / "tokenizer.json").write_text("{}")
        write_manifest(directory, "bundle", body)
