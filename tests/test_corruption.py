"""Real bundles and engine directories, damaged file by file: refused before anything runs."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from built import Built

import lacache_trt.engines.builder as builder
from lacache_trt import Runtime
from lacache_trt.artifacts import load_manifest
from lacache_trt.engines.options import BuildOptions
from lacache_trt.errors import ArtifactError

FILES = (
    "fill.onnx",
    "reuse.onnx",
    "plain.onnx",
    "weights.safetensors",
    "tokenizer.json",
    "text.json",
    "manifest.json",
)
Damage = Callable[[Path], None]


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    """Lose the last two bytes; a manifest's very last one is a line end."""
    path.write_bytes(path.read_bytes()[:-2])


def swap(path: Path) -> None:
    """Exchange the file with the next one."""
    other = path.with_name(FILES[(FILES.index(path.name) + 1) % len(FILES)])
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def delete(path: Path) -> None:
    """Lose the file."""
    path.unlink()


@pytest.fixture(params=["bundle", "engine"])
def damaged(
    request: pytest.FixtureRequest,
    models: Callable[[str], Built],
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[str, Path]:
    """A copy of a bundle or of an engine directory; from here on no engine may be opened."""
    source: Path = getattr(models("llada"), request.param)

    def opened(name: str) -> None:
        pytest.fail(f"{name} was loaded although the directory is damaged")

    monkeypatch.setattr(builder, "import_module", opened)
    return request.param, Path(shutil.copytree(source, scratch / request.param))


@pytest.mark.parametrize("damage", [flip, truncate, swap, delete])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_before_anything_runs(
    damaged: tuple[str, Path], name: str, damage: Damage, scratch: Path
) -> None:
    kind, directory = damaged
    damage(directory / name)
    options = BuildOptions(engine="onnxruntime")
    build = partial(builder.build_engine, directory, scratch / "out", options)
    with pytest.raises(ArtifactError) as caught:
        Runtime.load(directory) if kind == "engine" else build()
    assert caught.value.got is not None
    assert caught.value.expected
    assert caught.value.fix
    assert not (scratch / "out").exists()


_BUILDS = """
import sys
from pathlib import Path
from lacache_trt.engines.builder import build_engine
from lacache_trt.engines.options import BuildOptions
print("ready", flush=True)
options = BuildOptions(engine="onnxruntime", overwrite=True)
while True:
    build_engine(Path(sys.argv[1]), Path(sys.argv[2]), options)
"""


def test_a_killed_build_leaves_the_output_whole_or_absent(
    models: Callable[[str], Built], scratch: Path
) -> None:
    """A half-precision bundle, so that graphs and weights are converted; then a build cleans up."""
    bundle, out = models("llada-bf16").bundle, scratch / "out"
    for seed in range(4):
        shutil.rmtree(out, ignore_errors=True)
        with subprocess.Popen(
            [sys.executable, "-c", _BUILDS, str(bundle), str(out)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.02 + random.Random(seed).random() * 0.6)
            os.kill(process.pid, signal.SIGKILL)
        if out.exists():
            load_manifest(out, "engine")
    builder.build_engine(bundle, out, BuildOptions(engine="onnxruntime", overwrite=True))
    load_manifest(out, "engine")
    assert [path.name for path in scratch.iterdir()] == ["out"]
