"""What the CUDA engine does on the host, checked without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sample_bundle import MODEL, write_bundle

from lacache_trt.engines.builder import build_engine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.padding import BUCKET, no_room, row_bucket, with_rows
from lacache_trt.engines.windows import WindowMemory
from lacache_trt.errors import (
    ArtifactError,
    CapacityError,
    InvalidRequestError,
    MissingDependencyError,
)

pytest.importorskip("triton")
from lacache_trt.engines.cuda.engine import device_model, require_cuda
from lacache_trt.engines.cuda.floor import floor_calls
from lacache_trt.engines.cuda.fp8 import Fp8Table
from lacache_trt.engines.cuda.gemm import GemmTable, weight_shapes
from lacache_trt.engines.cuda.lane import LaneShape, lane_bytes
from lacache_trt.engines.cuda.staging import StagedInputs
from lacache_trt.model.config import parameter_shapes

HERE = Path(__file__).parent
TABLE = GemmTable({(64, 128): {32: "cublaslt", 256: "cublas", 1024: "cublaslt"}})
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.mark.parametrize(
    ("m", "k", "n", "name"),
    [
        (1, 64, 128, "cublaslt"),
        (32, 64, 128, "cublaslt"),
        (33, 64, 128, "cublas"),
        (256, 64, 128, "cublas"),
        (257, 64, 128, "cublaslt"),
        (5000, 64, 128, "cublaslt"),
        (32, 128, 64, "cublas"),
    ],
)
def test_table_picks_the_smallest_ceiling_that_fits(m: int, k: int, n: int, name: str) -> None:
    assert TABLE.choice(m, k, n) == name


def test_row_buckets() -> None:
    """At least the rows, at most half as many again, few of them, each its own bucket."""
    buckets = [row_bucket(rows) for rows in range(1, 65)]
    assert buckets[:9] == [1, 2, 3, 4, 6, 6, 8, 8, 12]
    for rows, bucket in enumerate(buckets, 1):
        assert rows <= bucket < 1.5 * rows or rows <= 2
        assert row_bucket(bucket) == bucket
    assert len(set(buckets)) == 12


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((5, 29), "5 rows (run as 6) and 29 columns (run as 64)"),
        ((5, 64), "5 rows (run as 6) and 64 columns"),
        ((4, 128), "4 rows and 128 columns"),
    ],
)
def test_a_batch_without_room_is_named_as_it_was_asked_for(
    asked: tuple[int, int], words: str
) -> None:
    rows, columns = asked
    error = no_room(asked, (row_bucket(rows), -(-columns // BUCKET) * BUCKET), 2**30, 4096)
    assert f"a batch of {words} does not fit into the device's memory\n" in str(error)
    assert (error.got, error.expected) == ("4,096 bytes free", "1,073,741,824 bytes")


def test_rows_are_repeated_below() -> None:
    inputs = {"guide_row": np.array([2, 1, 0], np.int32), "tokens": np.arange(6).reshape(3, 2)}
    assert with_rows(inputs, 3) is inputs
    padded = with_rows(inputs, 5)
    assert padded["guide_row"].tolist() == [2, 1, 0, 0, 0]
    assert padded["guide_row"].dtype == np.int32
    assert padded["tokens"].tolist() == [[0, 1], [2, 3], [4, 5], [4, 5], [4, 5]]


def test_table_survives_the_manifest() -> None:
    assert GemmTable.from_json(TABLE.to_json()) == TABLE


@pytest.mark.parametrize(
    "data",
    [
        None,
        "cublas",
        [None],
        [{"k": 1, "n": 2, "m_up_to": 3}],
        [{"k": 1, "n": 2, "m_up_to": 3, "implementation": "magic"}],
        [{"k": True, "n": 2, "m_up_to": 3, "implementation": "cublas"}],
        [{"k": 1.5, "n": 2, "m_up_to": 3, "implementation": "cublas"}],
        [{"k": 1, "n": 2, "implementation": "cublas"}],
        [{"k": 1, "n": 2, "m_up_to": 3, "implementation": ["cublas"]}],
    ],
)
def test_a_malformed_table_is_refused(data: object) -> None:
    with pytest.raises(ArtifactError, match="GEMM table"):
        GemmTable.from_json(data)


def test_every_linear_of_the_model_is_measured() -> None:
    shapes = parameter_shapes(MODEL)
    matrices = {shape for name, shape in shapes.items() if len(shape) == 2 and "embed" not in name}
    assert set(weight_shapes(MODEL)) == matrices


def test_staged_inputs_travel_in_one_copy() -> None:
    layout = {
        "tokens": ((2, 3), "int32"),
        "temperature": ((2,), "float32"),
        "suppress_ids": ((2, 4), "int32"),
        "logit_columns": ((2, 0), "int32"),
    }
    staged = StagedInputs(layout, torch.device("cpu"))
    values = {
        "tokens": np.arange(6, dtype=np.int64).reshape(2, 3),
        "temperature": np.array([0.25, 7], np.float32),
        "suppress_ids": np.array([[5], [6]], np.int32),
        "logit_columns": np.zeros((2, 0), np.int32),
    }
    staged.write(values)
    assert not staged.tensors["tokens"].any()
    staged.upload()
    assert staged.tensors["tokens"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert staged.tensors["temperature"].tolist() == [0.25, 7.0]
    assert staged.tensors["suppress_ids"].tolist() == [[5, -1, -1, -1], [6, -1, -1, -1]]
    starts = {tensor.data_ptr() for tensor in staged.tensors.values() if tensor.numel()}
    assert max(starts) - min(starts) == 4 * 8


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suppress_ids", np.zeros((2, 9), np.int32)),
        ("suppress_ids", np.zeros((3, 1), np.int32)),
        ("tokens", np.zeros((2, 2), np.int32)),
    ],
)
def test_what_does_not_fit_the_buffers_is_refused(name: str, value: np.ndarray) -> None:
    layout = {"tokens": ((2, 3), "int32"), "suppress_ids": ((2, 8), "int32")}
    with pytest.raises(CapacityError, match=name):
        StagedInputs(layout, torch.device("cpu")).write({name: value})


def test_a_window_is_placed_anew_when_anything_of_it_changes() -> None:
    """The same values are the same window; a change in place, other pads or a length are not."""
    memory = WindowMemory()
    columns = np.array([[10, 11, 12, 13, -1], [20, 21, 22, 23, 24]], np.int32)
    block = np.array([[11, 12], [20, 21]], np.int32)
    first = memory.place(columns, block, 40, 24)
    assert memory.place(columns.copy(), block.copy(), 40, 24) is first
    wide = first["window_columns"]
    assert wide.shape == (2, 64)
    assert wide[0, :6].tolist() == [34, 35, 36, 37, -1, -1]
    assert first["block_columns"].tolist() == [[35, 36], [44, 45]]
    block += 1
    assert memory.place(columns, block, 40, 24)["block_columns"].tolist() == [[36, 37], [45, 46]]
    assert memory.place(columns, block, 40, 3)["block_columns"].tolist() == [[15, 16], [24, 25]]
    with pytest.raises(InvalidRequestError, match="not a run of columns"):
        memory.place(columns, block, 24, 3)
    columns[1] += 5
    with pytest.raises(InvalidRequestError, match="outside the window"):
        memory.place(columns, block, 40, 3)


def test_lane_bytes_grow_with_rows_and_columns() -> None:
    small, wide = LaneShape(1, 64, 32), LaneShape(2, 128, 32)
    caches = 64 * MODEL.cache_bytes_per_token(2)
    assert lane_bytes(MODEL, small, 2) > caches
    assert lane_bytes(MODEL, wide, 2) > 2 * lane_bytes(MODEL, small, 2)


def test_the_model_does_not_copy_its_weights() -> None:
    weights = {name: torch.zeros(shape) for name, shape in parameter_shapes(MODEL).items()}
    model = device_model(MODEL, weights, TABLE)
    for name, value in weights.items():
        assert model.weight(name).data_ptr() == value.data_ptr()


@without_gpu
def test_a_machine_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match="NVIDIA GPU"):
        require_cuda()
    write_bundle(tmp_path / "bundle", dtype="bfloat16")
    with pytest.raises(MissingDependencyError, match="NVIDIA GPU"):
        build_engine(tmp_path / "bundle", tmp_path / "engine", BuildOptions(engine="cuda"))
    assert not (tmp_path / "engine").exists()


def test_interpreted_engine() -> None:
    """Sessions and lanes over interpreted kernels, in a process of their own."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "interpreted_engine.py"],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_a_checkout_runs_without_installation(tmp_path: Path) -> None:
    """Scripts and the processes that they start find the mapped folders as parts of the package."""
    script = tmp_path / "script.py"
    child = "import lacache_trt.engines.options as o; print(o.__file__)"
    script.write_text(
        "import importlib.util, subprocess, sys\n"
        "import lacache_trt.plugins.spec as s\n"
        "print(s.__file__, importlib.util.find_spec('plugins'))\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
    )
    command = [sys.executable, "benchmarks/run_from_checkout.py", str(script)]
    done = subprocess.run(
        command, cwd=HERE.parent, capture_output=True, text=True, timeout=120, check=True
    )
    first, second = done.stdout.split("\n")[:2]
    assert first.endswith("lacache_trt/plugins/spec.py None")
    assert second.endswith("lacache_trt/engines/options.py")
    assert "site-packages" not in done.stdout


@pytest.mark.parametrize("full_first_layer", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_the_floor_holds_every_linear_of_a_step(full_first_layer: bool, fp8: bool) -> None:
    """Rows and widths of each product, in order; layer 0, the last layer and the head are cut."""
    config = replace(MODEL, hidden_size=128, head_dim=32, num_layers=3)
    weights = {name: torch.ones(shape) for name, shape in parameter_shapes(config).items()}
    if fp8:
        weights["layers.1.down.weight"] = weights["layers.1.down.weight"].T.contiguous()
        weights["layers.1.down.scale"] = torch.ones(1, 1)
    done: list[tuple[int, int, int]] = []

    class Gemms(GemmTable):
        def multiply(self, rows: Any, weight: Any, into: Any = None) -> Any:
            done.append((rows.shape[0], *weight.shape))

    class Table(Fp8Table):
        def multiply(self, operands: Any, residual: Any, out: Any) -> None:
            rows, scale, weight, _ = operands
            assert scale.shape == (rows.shape[0], rows.shape[1] // 128)
            assert out.shape == (rows.shape[0], weight.shape[0])
            done.append((-rows.shape[0], rows.shape[1], weight.shape[0]))

    calls = floor_calls(
        config,
        weights,
        Gemms({}),
        rows=2,
        columns=16,
        block=4,
        full_first_layer=full_first_layer,
        fp8_gemms=Table({}),
        attention=False,
    )
    for call in calls:
        call()
    first = 32 if full_first_layer else 8
    qkv, out, gate_up, down = (128, 256), (128, 128), (128, 256), (128, 128)
    expected = [(first, *qkv), (32, *out), (32, *gate_up), (32, *down)]
    expected += [(32, *qkv), (32, *out), (32, *gate_up), (-32 if fp8 else 32, *down)]
    expected += [(32, 128, 128), (8, 128, 128), (8, *out), (8, *gate_up), (8, *down)]
    assert done == [*expected, (8, 128, config.vocab_size)]
