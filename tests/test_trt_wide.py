"""Two layers at LLaDA-8B's width, built for SM89 by the real TensorRT-RTX, without a GPU.

The weights are zeros but for a mark in each tensor, in a sparse file: what is checked is what a
builder can do with tensors of the real sizes. TensorRT keeps equal constants once, hence the marks.
One build at a time, each in a process of its own, which takes up to 8 GB.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from synthetic import make_llada

from lacache_trt.artifacts import load_manifest
from lacache_trt.export.exporter import export_bundle
from lacache_trt.export.options import ExportOptions
from lacache_trt.plugins.library import build_library

PROFILE = "B=1:1:4,N=64:512:2048,Bk=32"
MOST_MEMORY = 10 * 2**30
GRAPHS = ("fill", "reuse")
# What TensorRT calls the contract's dtypes.
DTYPES = {
    "int32": "DataType.INT32",
    "float32": "DataType.FLOAT",
    "float16": "DataType.HALF",
    "bfloat16": "DataType.BF16",
}
PLUGINS = {"fill": {"AttentionFill"}, "reuse": {"AttentionReuse", "Attention", "SampleBlock"}}


@dataclass(frozen=True)
class Slice:
    """Which bundle to build from.

    Attributes:
        dtype: of the weights and activations.
        fp8: the linears are quantised, as `build --fp8` does.
    """

    dtype: str
    fp8: bool = False

    def __str__(self) -> str:
        return f"{self.dtype}-fp8" if self.fp8 else self.dtype

    @property
    def plugins(self) -> dict[str, set[str]]:
        """The ops of each graph that become plugins."""
        added = {"RMSNormQuant", "SwiGLUQuant", "GroupLinear"} if self.fp8 else set()
        return {**PLUGINS, "reuse": PLUGINS["reuse"] | added}


SLICES = (Slice("float16"), Slice("bfloat16"), Slice("bfloat16", fp8=True))

pytestmark = [
    pytest.mark.skipif(
        find_spec("tensorrt_rtx_bindings") is None, reason="TensorRT-RTX is not installed"
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLaDA-8B with two of its 32 layers, no disk space taken."""
    folder = make_llada(
        tmp_path_factory.mktemp("wide") / "model",
        hidden=4096,
        heads=32,
        kv_heads=32,
        ffn=12288,
        layers=2,
        vocab=126464,
        dtype="bfloat16",
        sparse=True,
    )
    _mark_tensors(folder / "model.safetensors")
    return folder


def _mark_tensors(path: Path) -> None:
    """Another bfloat16 number at the beginning of every tensor; the file stays sparse."""
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        tensors = json.loads(file.read(length))
        tensors.pop("__metadata__", None)
        for index, tensor in enumerate(tensors.values()):
            file.seek(8 + length + tensor["data_offsets"][0])
            file.write((0x3F80 + index).to_bytes(2, "little"))


@pytest.fixture(scope="module", params=SLICES, ids=str)
def bundle(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Slice, Path]]:
    """A bundle of 3 GB, deleted before the next one is made."""
    chosen: Slice = request.param
    folder = tmp_path_factory.mktemp("wide-bundle")
    options = ExportOptions(dtype=chosen.dtype, cache="exact", validate="off")  # type: ignore[arg-type]
    export_bundle(str(checkpoint), folder / "bundle", options)
    if chosen.fp8:
        _quantise(folder / "bundle", folder / "fp8")
    yield chosen, folder / ("fp8" if chosen.fp8 else "bundle")
    shutil.rmtree(folder)


def _quantise(source: Path, target: Path) -> None:
    from lacache_trt.export.derive import derive_bundle
    from lacache_trt.model.fp8 import Fp8Recipe
    from lacache_trt.progress import SilentProgress

    manifest = load_manifest(source, "bundle", hashes="sizes")
    derive_bundle(manifest, target, Fp8Recipe(), SilentProgress())


@pytest.mark.parametrize("variant", ["plugins", "plugin-free"])
def test_both_graphs_build_at_full_width(bundle: tuple[Slice, Path], variant: str) -> None:
    chosen, folder = bundle
    if chosen.fp8 and variant == "plugin-free":
        pytest.skip("FP8 with scales per group needs the plugins")
    if _available_bytes() < MOST_MEMORY:
        pytest.skip("less than 10 GB of memory are free")
    report = _build(folder, variant)
    print(f"{chosen} {variant}: peak {report['peak_bytes'] / 2**30:.1f} GiB")
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in GRAPHS:
        found, contract = report["graphs"][name], manifest["contract"][name]
        for side in ("inputs", "outputs"):
            got = [(each["name"], each["dtype"], each["shape"]) for each in found[side]]
            assert got == [_promised(each) for each in contract[side]]
        assert not [each["name"] for each in found["inputs"] if each["is_shape"]]
        assert found["programs"].keys() == chosen.plugins[name]
        assert set(found["programs"].values()) == {variant == "plugins"}
    # The head, the embedding and two layers are constants of the plan.
    weights = (folder / "weights.safetensors").stat().st_size
    assert report["graphs"]["reuse"]["plan_bytes"] > 0.9 * weights
    assert report["peak_bytes"] < MOST_MEMORY


def _build(folder: Path, variant: str) -> Any:
    build_library()
    script = Path(__file__).parent / "trt_wide_check.py"
    done = subprocess.run(
        [sys.executable, str(script), str(folder), variant, PROFILE, *GRAPHS],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def _promised(tensor: dict[str, Any]) -> tuple[str, str, list[int]]:
    shape = [-1 if isinstance(size, str) else size for size in tensor["shape"]]
    return tensor["name"], DTYPES[tensor["dtype"]], shape


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
