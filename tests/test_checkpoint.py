"""Opening checkpoint directories: what is accepted, and what is refused with which words."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic import make_dream, make_dream_7b_layout, make_llada, make_llada_8b_layout

from lacache_trt.errors import (
    CheckpointError,
)
from lacache_trt.model.checkpoint import Checkpoint

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def llada(tmp_path: Path) -> Path:
    return make_llada(tmp_path / "llada", layers=2)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_llada(tmp_path / "sharded", layers=2, shards=3)


def rewrite_index(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = root / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the JSON header of a safetensors file, keeping its data."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize("shards", [1, 6])
def test_both_families_open(tmp_path: Path, shards: int) -> None:
    llada = Checkpoint.open(make_llada(tmp_path / "a", shards=shards, tokenizer=True))
    assert llada.config.eos_ids == (95, 94)
    assert len(llada.tensors) == 9 * 3 + 3
    dream = Checkpoint.open(str(make_dream(tmp_path / "b", shards=shards, dtype="bfloat16")))
    assert dream.config.dtype == "bfloat16"
    assert len(dream.tensors) == 12 * 3 + 3
    assert dream.revision is None


def test_true_layouts(tmp_path: Path) -> None:
    """Names, shapes and shards of the released models, on sparse files."""
    llada = Checkpoint.open(make_llada_8b_layout(tmp_path / "llada"))
    assert len(llada.tensors) == 291
    assert len({tensor.path for tensor in llada.tensors.values()}) == 6
    assert sum(tensor.nbytes for tensor in llada.tensors.values()) == 16031162368
    assert llada.config.eos_ids == (126081,)
    dream = Checkpoint.open(make_dream_7b_layout(tmp_path / "dream"))
    assert len(dream.tensors) == 339
    assert sum(tensor.nbytes for tensor in dream.tensors.values()) == 15231233024


def test_dtype_of_mixed_weights(tmp_path: Path) -> None:
    root = make_llada(tmp_path / "m", layers=1, dtype="bfloat16")
    assert Checkpoint.open(root).config.dtype == "bfloat16"
    other = make_llada(tmp_path / "n", layers=1, dtype="float16", shards=2)
    bf16 = make_llada(tmp_path / "o", layers=1, dtype="bfloat16", shards=2)
    shard = "model-00001-of-00002.safetensors"
    shutil.copy(bf16 / shard, other / shard)
    assert Checkpoint.open(other).config.dtype == "float32"


def test_stored_inverse_frequencies_are_ignored(llada: Path) -> None:
    def add(header: dict[str, Any]) -> None:
        end = max(entry["data_offsets"][1] for key, entry in header.items() if key[0] != "_")
        header["model.transformer.rotary_emb.inv_freq"] = {
            "dtype": "F32",
            "shape": [0],
            "data_offsets": [end, end],
        }

    edit_header(llada / "model.safetensors", add)
    assert "rotary" not in " ".join(Checkpoint.open(llada).tensors)


def test_missing_extra_and_misshapen_tensors_are_named_in_one_error(llada: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        header["model.extra.weight"] = header.pop("model.transformer.ln_f.weight")
        header["model.transformer.blocks.0.q_proj.weight"]["shape"] = [32, 128]
        norm = header["model.transformer.blocks.1.ff_norm.weight"]
        norm["dtype"] = "I32"

    edit_header(llada / "model.safetensors", change)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(llada)
    message = str(caught.value)
    assert "missing: model.transformer.ln_f.weight" in message
    assert "unexpected: model.extra.weight" in message
    assert "blocks.0.q_proj.weight [32, 128] instead of [64, 64]" in message
    assert "wrong dtype: model.transformer.blocks.1.ff_norm.weight I32" in message


def test_a_config_that_contradicts_the_weights_is_refused(tmp_path: Path) -> None:
    root = make_llada(tmp_path / "c", config_changes={"n_layers": 4})
    with pytest.raises(CheckpointError, match=r"missing: .*blocks\.3\.attn_norm\.weight"):
        Checkpoint.open(root)
    root = make_dream(tmp_path / "d", config_changes={"tie_word_embeddings": True})
    with pytest.raises(CheckpointError, match=r"unexpected: lm_head\.weight"):
        Checkpoint.open(root)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "is not a JSON object"),
        (b'{"model_type": "llada", "model_type": "llada"}', "twice"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b'{"a": "' + b"x" * 2**20 + b'"}', "too large"),
        (b'{"model_type": "llada", "d_model": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_bad_config_json(llada: Path, content: bytes, match: str) -> None:
    (llada / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=match):
        Checkpoint.open(llada)


def test_missing_things(llada: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint directory"):
        Checkpoint.open(tmp_path / "absent")
    (llada / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        Checkpoint.open(llada)
    (llada / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no config\.json") as caught:
        Checkpoint.open(llada)
    assert "is it a checkpoint?" in str(caught.value.fix)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickle_is_refused_unread(llada: Path, name: str) -> None:
    (llada / "model.safetensors").rename(llada / name)
    with pytest.raises(CheckpointError, match="convert the pickle files"):
        Checkpoint.open(llada)


def test_shards_without_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"download model\.safetensors\.index\.json"):
        Checkpoint.open(sharded)


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks model-00002-of-00003"):
        Checkpoint.open(sharded)


def test_index_and_shards_disagree(sharded: Path) -> None:
    def change(weight_map: dict[str, Any]) -> None:
        weight_map["model.transformer.ln_f.weight"] = "model-00001-of-00003.safetensors"
        del weight_map["model.transformer.wte.weight"]

    rewrite_index(sharded, change)
    with pytest.raises(CheckpointError, match="disagree") as caught:
        Checkpoint.open(sharded)
    assert "ln_f.weight" in str(caught.value)
    assert "wte.weight" in str(caught.value)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
def test_index_without_weight_map(sharded: Path, weight_map: object) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="no weight_map"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/passwd", "a/../../x", "..", ".", "", "a\\..\\b", "sub/x"],
)
def test_index_names_do_not_leave_the_directory(sharded: Path, name: str) -> None:
    (sharded.parent / "outside.safetensors").write_bytes(b"secret")

    def change(weight_map: dict[str, Any]) -> None:
        weight_map["model.transformer.ln_f.weight"] = name

    rewrite_index(sharded, change)
    with pytest.raises(CheckpointError, match="leads out of the checkpoint"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_symlinks_out_of_the_directory_are_refused(llada: Path, name: str) -> None:
    (llada / name).rename(llada.parent / name)
    (llada / name).symlink_to(llada.parent / name)
    with pytest.raises(CheckpointError, match="symlink that leads out"):
        Checkpoint.open(llada)


def test_symlink_loops_and_dangling_links(llada: Path) -> None:
    (llada / "model.safetensors").unlink()
    (llada / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors"):
        Checkpoint.open(llada)


def test_hub_cache_links_are_followed_and_give_the_revision(llada: Path, tmp_path: Path) -> None:
    snapshot = as_hub_cache(llada, tmp_path / "models--owner--name")
    checkpoint = Checkpoint.open(snapshot)
    assert checkpoint.revision == SHA
    assert len(checkpoint.tensors) == 21
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    assert Checkpoint.open(link).revision == SHA


def as_hub_cache(source: Path, cache: Path) -> Path:
    snapshot = cache / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for index, path in enumerate(sorted(source.iterdir())):
        shutil.copy(path, cache / "blobs" / f"blob{index}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob{index}")
    return snapshot


def test_not_regular_files(llada: Path) -> None:
    (llada / "model.safetensors").unlink()
    os.mkfifo(llada / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        Checkpoint.open(llada)
    (llada / "config.json").unlink()
    (llada / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        Checkpoint.open(llada)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_no_permission(llada: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by the operating system; simulated, since root may read everything."""

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if str(path).endswith(name):
                raise PermissionError(13, "Permission denied")
            return function(path, *args, **options)

        return call

    monkeypatch.setattr(os, "open", guarded(os.open))
    monkeypatch.setattr("builtins.open", guarded(open))
    with pytest.raises(CheckpointError, match="Permission"):
        Checkpoint.open(llada)


@pytest.mark.parametrize("cut", [0, 4, 8, 100, -1, -100])
def test_truncated_files(llada: Path, cut: int) -> None:
    path = llada / "model.safetensors"
    path.write_bytes(path.read_bytes()[: cut or None] if cut else b"")
    with pytest.raises(CheckpointError, match=r"not a valid safetensors file|not valid JSON"):
        Checkpoint.open(llada)


@pytest.mark.parametrize("length", [0, 1, 2**27, 2**40, 2**63, 2**64 - 1])
def test_header_lengths(llada: Path, length: int) -> None:
    path = llada / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        Checkpoint.open(llada)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("data_offsets", [4, 16388], "hole|overlap"),
        ("data_offsets", [0, 2**62], "holds"),
        ("data_offsets", [16384, 0], "data_offsets"),
        ("data_offsets", [-4, 16380], "integers from 0"),
        ("data_offsets", [0], "data_offsets"),
        ("data_offsets", [0.0, 16384.0], "integers from 0"),
        ("shape", [2**40, 2**40], "holds"),
        ("shape", [True, 4096], "integers from 0"),
        ("shape", [64, 64, 2**63], "integers from 0"),
        ("shape", [1] * 100, "integers from 0"),
        ("dtype", "F33", "dtype"),
        ("dtype", ["F32"], "dtype"),
        ("dtype", "F16", "holds"),
        ("extra", 1, "entry"),
    ],
)
def test_corrupt_entries(llada: Path, key: str, value: object, match: str) -> None:
    def change(header: dict[str, Any]) -> None:
        header["model.transformer.blocks.0.q_proj.weight"][key] = value

    edit_header(llada / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=match):
        Checkpoint.open(llada)


def test_overlapping_tensors(llada: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        q = header["model.transformer.blocks.0.q_proj.weight"]
        header["model.transformer.blocks.0.attn_out.weight"]["data_offsets"] = q["data_offsets"]

    edit_header(llada / "model.safetensors", change)
    with pytest.raises(CheckpointError, match="overlap"):
        Checkpoint.open(llada)
