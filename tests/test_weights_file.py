"""The weights file, read back with the safetensors library and compared with the sources."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from synthetic import make_dream, make_llada

from lacache_trt.errors import ArtifactError, CheckpointError, OutputError
from lacache_trt.export import weights as weights_module
from lacache_trt.export.bands import convert
from lacache_trt.export.weights import read_header, read_tensor, write_weights
from lacache_trt.model.checkpoint import Checkpoint
from lacache_trt.model.config import DTYPES, Dtype

TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def expected_tensors(root: Path) -> dict[str, torch.Tensor]:
    """Bundle name → tensor, written out by hand from the families' layouts."""
    stored: dict[str, torch.Tensor] = {}
    for path in root.glob("*.safetensors"):
        stored.update(load_file(path))
    if "lm_head.weight" in stored or "model.embed_tokens.weight" in stored:
        layer, parts, top = (
            "model.layers.{}.",
            [
                "input_layernorm",
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "self_attn.o_proj",
                "post_attention_layernorm",
                "mlp.gate_proj",
                "mlp.up_proj",
                "mlp.down_proj",
            ],
            ["model.embed_tokens", "model.norm", "lm_head"],
        )
    else:
        layer, parts, top = (
            "model.transformer.blocks.{}.",
            [
                "attn_norm",
                "q_proj",
                "k_proj",
                "v_proj",
                "attn_out",
                "ff_norm",
                "ff_proj",
                "up_proj",
                "ff_out",
            ],
            ["model.transformer.wte", "model.transformer.ln_f", "model.transformer.ff_out"],
        )
    embed = stored[top[0] + ".weight"]
    result = {
        "embed.weight": embed,
        "norm.weight": stored[top[1] + ".weight"],
        "head.weight": stored.get(top[2] + ".weight", embed).T,
    }
    count = sum(f".{parts[0]}.weight" in name for name in stored)
    for index in range(count):
        prefix = layer.format(index)
        norm1, q, k, v, out, norm2, gate, up, down = (
            stored[f"{prefix}{part}.weight"] for part in parts
        )
        target = f"layers.{index}."
        biases = [stored.get(f"{prefix}{part}.bias") for part in parts[1:4]]
        split = 0 < index == count - 1
        groups = {"q": [0], "kv": [1, 2]} if split else {"qkv": [0, 1, 2]}
        for name, members in groups.items():
            result[f"{target}{name}.weight"] = torch.cat([(q, k, v)[i] for i in members]).T
            if biases[0] is not None:
                chosen = [bias for i in members if (bias := biases[i]) is not None]
                result[f"{target}{name}.bias"] = torch.cat(chosen)
        result[target + "attn_norm.weight"] = norm1
        result[target + "attn_out.weight"] = out.T
        result[target + "ffn_norm.weight"] = norm2
        result[target + "gate_up.weight"] = torch.cat([gate, up]).T
        result[target + "down.weight"] = down.T
    return result


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def check_file(root: Path, path: Path, target: Dtype) -> None:
    """Bit for bit, with torch's own conversion as the reference."""
    expected = expected_tensors(root)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(expected)
        for name, tensor in expected.items():
            found = file.get_tensor(name)
            assert found.dtype == TORCH[target]
            assert torch.equal(bits(found), bits(tensor.to(TORCH[target]))), name


@settings(max_examples=25, deadline=None)
@given(
    family=st.sampled_from(["llada", "dream"]),
    heads=st.integers(1, 4),
    group=st.integers(1, 2),
    half=st.integers(1, 5),
    layers=st.integers(1, 3),
    ffn=st.integers(1, 40),
    vocab=st.integers(8, 50),
    shards=st.integers(1, 4),
    tied=st.booleans(),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    band_bytes=st.sampled_from([1, 64, 999, 2**25]),
)
def test_every_layout_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    heads: int,
    group: int,
    half: int,
    layers: int,
    ffn: int,
    vocab: int,
    shards: int,
    tied: bool,
    dtypes: tuple[Dtype, Dtype],
    band_bytes: int,
) -> None:
    root = tmp_path_factory.mktemp("case")
    make = make_llada if family == "llada" else make_dream
    make(
        root / "model",
        hidden=heads * group * half * 2,
        layers=layers,
        heads=heads * group,
        kv_heads=heads,
        ffn=ffn,
        vocab=vocab,
        shards=shards,
        tied=tied,
        dtype=dtypes[0],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_module, "BAND_BYTES", band_bytes)
        write_weights(Checkpoint.open(root / "model"), root / "weights.safetensors", dtypes[1])
    check_file(root / "model", root / "weights.safetensors", dtypes[1])


def test_biases_of_llada_and_mixed_dtypes(tmp_path: Path) -> None:
    root = make_llada(tmp_path / "a", qkv_bias=True, shards=2, dtype="float32")
    other = make_llada(tmp_path / "b", qkv_bias=True, shards=2, dtype="bfloat16")
    shard = "model-00002-of-00002.safetensors"
    (root / shard).write_bytes((other / shard).read_bytes())
    checkpoint = Checkpoint.open(root)
    write_weights(checkpoint, tmp_path / "w.safetensors")
    check_file(root, tmp_path / "w.safetensors", "float32")


def test_strips_of_whole_pages(tmp_path: Path) -> None:
    """Tensors with more rows than a page has elements, over several bands."""
    root = make_llada(
        tmp_path / "a",
        hidden=16,
        heads=2,
        kv_heads=1,
        ffn=5000,
        vocab=9001,
        layers=1,
        dtype="bfloat16",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_module, "BAND_BYTES", 2**17)
        write_weights(Checkpoint.open(root), tmp_path / "w.safetensors", "bfloat16")
    check_file(root, tmp_path / "w.safetensors", "bfloat16")


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_conversion_of_every_16_bit_pattern(source: Dtype, target: Dtype) -> None:
    """Against ml_dtypes and NumPy; float32 patterns are sampled around every 16-bit one."""
    numpy = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    patterns = np.arange(2**16, dtype=np.uint32)
    if source == "float32":
        low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
        values = ((patterns[:, None] << 16) | low).reshape(-1).view(np.float32)
    else:
        values = patterns.astype(np.uint16).view(numpy[source])
    values = values[np.isfinite(values.astype(np.float32))]
    storage = values.view(np.uint16) if source == "bfloat16" else values
    with np.errstate(over="ignore"):
        expected = values.astype(np.float32).astype(numpy[target])
    found = convert(storage, source, target)
    assert found.tobytes() == expected.tobytes()


def test_header_is_aligned_and_in_file_order(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_dream(tmp_path / "a", vocab=128, ffn=128))
    write_weights(checkpoint, tmp_path / "w.safetensors", "bfloat16")
    header = read_header(tmp_path / "w.safetensors")
    assert list(header) == list(checkpoint.recipes)
    assert all(tensor.offset % 64 == 0 for tensor in header.values())
    assert all(tensor.dtype == "BF16" for tensor in header.values())
    data = (tmp_path / "w.safetensors").read_bytes()
    norm = header["norm.weight"]
    values = np.frombuffer(data, ml_dtypes.bfloat16, norm.nbytes // 2, norm.offset)
    expected = expected_tensors(tmp_path / "a")["norm.weight"].to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(values.astype(np.float32), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_read_tensor(tmp_path: Path, dtype: Dtype) -> None:
    root = make_llada(tmp_path / "a")
    write_weights(Checkpoint.open(root), tmp_path / "w.safetensors", dtype)
    found = read_tensor(tmp_path / "w.safetensors", "layers.0.down.weight")
    expected = expected_tensors(root)["layers.0.down.weight"].to(TORCH[dtype])
    expected = expected.float() if dtype == "bfloat16" else expected
    np.testing.assert_array_equal(found, expected.numpy())
    with pytest.raises(ArtifactError, match="no tensor nonsense"):
        read_tensor(tmp_path / "w.safetensors", "nonsense")


class Recorder:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.total: int | None = None
        self.done = 0

    def start(self, stage: str, total: int | None = None) -> None:
        self.total = total

    def advance(self, amount: int = 1) -> None:
        self.done += amount


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    recorder = Recorder()
    checkpoint = Checkpoint.open(make_dream(tmp_path / "a", dtype="bfloat16"))
    write_weights(checkpoint, tmp_path / "w.safetensors", "float32", recorder)
    sizes = [tensor.nbytes for tensor in read_header(tmp_path / "w.safetensors").values()]
    assert recorder.total == recorder.done == sum(sizes)


def poison(root: Path, name: str, index: int, value: float) -> None:
    """Overwrite one element of a tensor in place."""
    checkpoint = Checkpoint.open(root)
    tensor = checkpoint.tensors[name]
    kind = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[tensor.dtype]
    with open(tensor.path, "r+b") as file:
        file.seek(tensor.offset + index * np.dtype(kind).itemsize)
        file.write(np.array(value, kind).tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(tmp_path: Path, dtype: Dtype, value: float) -> None:
    root = make_llada(tmp_path / "a", dtype=dtype)
    name = "model.transformer.blocks.1.up_proj.weight"
    poison(root, name, 64 * 3 + 5, value)
    with pytest.raises(CheckpointError, match="not finite") as caught:
        write_weights(Checkpoint.open(root), tmp_path / "w.safetensors")
    assert name in str(caught.value)
    assert f"{value} at [3, 5]" in str(caught.value)
    assert not (tmp_path / "w.safetensors").exists()


@pytest.mark.parametrize(("value", "target"), [(70000.0, "float16"), (3.4e38, "bfloat16")])
def test_weights_that_do_not_fit(tmp_path: Path, value: float, target: Dtype) -> None:
    root = make_llada(tmp_path / "a")
    poison(root, "model.transformer.ln_f.weight", 7, value)
    with pytest.raises(CheckpointError, match=f"does not fit into {target}"):
        write_weights(Checkpoint.open(root), tmp_path / "w.safetensors", target)
    assert not (tmp_path / "w.safetensors").exists()


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    root = make_llada(tmp_path / "a")
    checkpoint = Checkpoint.open(root)
    with open(root / "model.safetensors", "r+b") as file:
        file.truncate(20000)
    with pytest.raises(CheckpointError, match="end of the file"):
        write_weights(checkpoint, tmp_path / "w.safetensors")
    assert not (tmp_path / "w.safetensors").exists()


def test_output_errors(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_llada(tmp_path / "a"))
    target = tmp_path / "w.safetensors"
    target.write_text("precious")
    with pytest.raises(OutputError, match="File exists"):
        write_weights(checkpoint, target)
    assert target.read_text() == "precious"
    with pytest.raises(OutputError, match="No such file"):
        write_weights(checkpoint, tmp_path / "absent" / "w.safetensors")
    with pytest.raises(OutputError, match="unknown dtype"):
        write_weights(checkpoint, tmp_path / "x", "int8")  # type: ignore[arg-type]


def test_disk_full_leaves_nothing(tmp_path: Path) -> None:
    """Simulated with a limit on the size of files."""
    checkpoint = Checkpoint.open(make_llada(tmp_path / "a"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OutputError, match="cannot write"):
            write_weights(checkpoint, tmp_path / "w.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "w.safetensors").exists()


def test_a_full_disk_is_told_with_its_free_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    checkpoint = Checkpoint.open(make_llada(tmp_path / "a"))
    target = tmp_path / "w.safetensors"
    with pytest.raises(OutputError) as caught:
        write_weights(checkpoint, target)
    error = caught.value
    assert re.search(r"No space left on device; \d+ bytes free in ", str(error.got))
    assert str(target) in str(error.expected)
    assert error.fix == "free some space, or choose an output on another disk"
    assert not target.exists()


def test_interruption_leaves_nothing(tmp_path: Path) -> None:
    class Interrupt(Recorder):
        def advance(self, amount: int = 1) -> None:
            raise KeyboardInterrupt

    checkpoint = Checkpoint.open(make_llada(tmp_path / "a"))
    with pytest.raises(KeyboardInterrupt):
        write_weights(checkpoint, tmp_path / "w.safetensors", progress=Interrupt())
    assert not (tmp_path / "w.safetensors").exists()


def test_writing_needs_neither_torch_nor_onnx(tmp_path: Path) -> None:
    root = make_llada(tmp_path / "a")
    script = (
        "import sys, json\n"
        "from pathlib import Path\n"
        "from lacache_trt.export.weights import write_weights\n"
        "from lacache_trt.model.checkpoint import Checkpoint\n"
        f"write_weights(Checkpoint.open({str(root)!r}), Path({str(tmp_path / 'w')!r}))\n"
        "print(json.dumps([m for m in ('torch', 'onnx', 'transformers') if m in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert json.loads(done.stdout) == []
