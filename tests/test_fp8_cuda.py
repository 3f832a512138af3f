"""The CUDA engine's FP8 on the host, and with interpreted kernels in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_fp8_recipe import WIDE

from lacache_trt.errors import ArtifactError, MissingDependencyError

pytest.importorskip("triton")
from lacache_trt.engines.cuda import fp8
from lacache_trt.engines.cuda.fp8 import Fp8Table, fp8_shapes, require_fp8
from lacache_trt.engines.cuda.fp8_ops import _outputs
from lacache_trt.engines.cuda.gemm import GemmTable, weight_shapes
from lacache_trt.model.fp8 import Fp8Recipe, select_linears
from lacache_trt.plugins.fp8 import dequantise_blocks, quantise_blocks, quantise_groups

HERE = Path(__file__).parent


def test_steps_with_interpreted_kernels() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "interpreted_fp8_engine.py"],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(result.stdout[-6000:])
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def test_the_tables_cover_every_linear_once() -> None:
    for scope in ("ffn", "linears", "all"):
        linears = select_linears(WIDE, Fp8Recipe(scope=scope)).linears  # type: ignore[arg-type]
        half, quantised = weight_shapes(WIDE, linears), fp8_shapes(WIDE, linears)
        assert set(half) | set(quantised) == set(weight_shapes(WIDE))
        assert (WIDE.hidden_size, 2 * WIDE.intermediate_size) in quantised
        # Layer 0 keeps the model's dtype, so its shapes are measured there too.
        assert (WIDE.hidden_size, 2 * WIDE.intermediate_size) in half


def test_a_table_survives_the_manifest_and_names_only_what_exists() -> None:
    table = Fp8Table({(128, 512): {32: "triton", 1024: "cublaslt"}})
    assert Fp8Table.from_json(table.to_json()) == table
    assert [table.choice(m, 128, 512) for m in (1, 32, 33, 4096)] == [
        "triton",
        "triton",
        "cublaslt",
        "cublaslt",
    ]
    assert table.choice(1, 512, 128) == "triton"
    assert GemmTable({}).choice(1, 512, 128) == "cublas"
    with pytest.raises(ArtifactError, match="GEMM table"):
        Fp8Table.from_json([{"k": 1, "n": 2, "m_up_to": 3, "implementation": "cublas"}])


@pytest.mark.parametrize("shape", [(2, 3), (1, 5), (4, 1), (1, 1)])
def test_scales_are_made_with_their_rows_innermost(shape: tuple[int, int]) -> None:
    """As cuBLASLt wants them, so that no step copies them."""
    values, scale = _outputs(torch.empty(*shape, 512, dtype=torch.bfloat16), 256)
    rows = shape[0] * shape[1]
    assert (values.shape, scale.shape) == ((*shape, 256), (*shape, 2))
    flat = scale.view(rows, -1)
    assert (flat.stride(1), flat.data_ptr()) == (rows, scale.data_ptr())
    assert flat.stride(0) == 1 or rows == 1


@pytest.mark.parametrize(
    ("rows", "width", "used"),
    [(64, 512, "cublaslt"), (63, 512, "triton"), (64, 640, "triton"), (2, 128, "triton")],
)
def test_the_library_gets_only_scales_in_fours(
    monkeypatch: pytest.MonkeyPatch, rows: int, width: int, used: str
) -> None:
    ran: list[str] = []
    named = {name: lambda *_, name=name: ran.append(name) for name in fp8.IMPLEMENTATIONS}
    monkeypatch.setattr(fp8, "IMPLEMENTATIONS", named)
    activations = quantise_groups(torch.randn(rows, width))
    weight = quantise_blocks(torch.randn(64, width))
    table = Fp8Table({(width, 64): {2048: "cublaslt"}})
    table.multiply((*activations, *weight), None, torch.empty(rows, 64))
    assert ran == [used]


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)])
def test_a_gpu_without_fp8_is_named(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old GPU")
    require_fp8(())
    with pytest.raises(MissingDependencyError, match="no FP8 tensor cores") as caught:
        require_fp8({"layers.1.down"})
    assert f"Old GPU, sm_{capability[0]}{capability[1]}" in str(caught.value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    require_fp8({"layers.1.down"})


def test_an_implementation_with_other_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = quantise_groups(torch.randn(3, 128))
    weight = quantise_blocks(torch.randn(64, 128))
    product = (rows[0].float() * rows[1]) @ dequantise_blocks(*weight).t()
    monkeypatch.setattr(fp8, "_triton", lambda operands, residual, out: out.copy_(product))

    def refused(*_: object) -> None:
        raise RuntimeError("not on this GPU")

    operands = (*rows, *weight)
    assert fp8.agrees(lambda o, r, out: out.copy_(product), operands, torch.empty(3, 64))
    assert not fp8.agrees(lambda o, r, out: out.copy_(2 * product), operands, torch.empty(3, 64))
    assert not fp8.agrees(lambda o, r, out: out.fill_(torch.nan), operands, torch.empty(3, 64))
    assert not fp8.agrees(refused, operands, torch.empty(3, 64))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_build_without_a_gpu_quantises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the cuda engine needs is asked for first: quantising 8B takes minutes."""
    from sample_bundle import write_bundle

    from lacache_trt.engines import builder
    from lacache_trt.engines.options import BuildOptions

    monkeypatch.setattr(builder, "_quantised", lambda *_: pytest.fail("quantised"))
    bundle = tmp_path / "bundle"
    write_bundle(bundle)
    with pytest.raises(MissingDependencyError, match="NVIDIA GPU"):
        builder.build_engine(
            bundle, tmp_path / "engine", BuildOptions(engine="cuda", fp8=Fp8Recipe())
        )
    assert not (tmp_path / "engine").exists()
