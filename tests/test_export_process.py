"""Exports in a process of their own: how much memory they take, and what a kill leaves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic import make_llada

from lacache_trt.artifacts import load_manifest

_MEMORY = """
import json, sys
from pathlib import Path
from lacache_trt.export.exporter import export_bundle
from lacache_trt.export.options import ExportOptions
export_bundle(sys.argv[1], Path(sys.argv[2]), ExportOptions(validate="off"))
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps({key: int(status[key].split()[0]) * 1024 for key in ("VmHWM", "RssAnon")}))
"""
SIZES: dict[str, dict[str, int]] = {
    "0.2 GB": {"hidden": 1024, "ffn": 4096, "vocab": 32000, "heads": 8},
    "1.2 GB": {"hidden": 3072, "ffn": 8192, "vocab": 64000, "heads": 24},
    "2.9 GB": {"hidden": 4096, "ffn": 12288, "vocab": 126464, "heads": 32},
}


def measure_export(scratch: Path, sizes: dict[str, int]) -> tuple[int, dict[str, int]]:
    """Bytes of the bundle of two layers, and the memory figures of the process that wrote it."""
    checkpoint, out = scratch / "checkpoint", scratch / "out"
    make_llada(checkpoint, layers=2, kv_heads=None, dtype="bfloat16", sparse=True, **sizes)
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(checkpoint), str(out)],
        capture_output=True,
        text=True,
        check=True,
        timeout=400,
    )
    written = load_manifest(out, hashes="sizes").total_bytes()
    shutil.rmtree(checkpoint)
    shutil.rmtree(out)
    return written, json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("one", "other"),
    [("0.2 GB", "1.2 GB"), pytest.param("1.2 GB", "2.9 GB", marks=pytest.mark.slow)],
)
def test_memory_of_an_export_does_not_grow_with_the_weights(
    scratch: Path, one: str, other: str
) -> None:
    """VmHWM and RssAnon of `export --validate off` grow by less than 5% of the added weights."""
    (small, before), (large, after) = (measure_export(scratch, SIZES[n]) for n in (one, other))
    print(f"weights {small / 1e9:.2f} -> {large / 1e9:.2f} GB, {before} -> {after}")
    assert large - small > 10**9
    growth = {key: after[key] - before[key] for key in after}
    assert max(growth.values()) < 0.05 * (large - small), growth


# Forks, so that each child starts with everything imported, and kills itself at a chosen moment.
_KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from lacache_trt.export.exporter import export_bundle
from lacache_trt.export.options import ExportOptions

def export(fraction=None, whole=None):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    if fraction is not None:
        kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(fraction * whole, kill).start()
    export_bundle(sys.argv[1], Path(sys.argv[2]), ExportOptions(overwrite=True))
    os._exit(0)

started = time.monotonic()
assert export() == 0
whole = time.monotonic() - started
for fraction in (*map(float, sys.argv[3:]), None):
    print("ready", flush=True)
    sys.stdin.readline()
    print(export(fraction, whole), flush=True)
"""


@pytest.fixture
def exports(models: Any, scratch: Path) -> Iterator[Callable[[], int]]:
    """Runs the next export, killed at one of the moments; the last one runs to its end."""
    moments = ("0.03", "0.5", "0.9")
    arguments = [str(models("llada-one").checkpoint), str(scratch / "out"), *moments]
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pipes = process.stdin, process.stdout

        def run_next() -> int:
            assert pipes[1].readline() == "ready\n"
            pipes[0].write("\n")
            return int(pipes[1].readline())

        yield run_next
        process.kill()


def test_a_killed_export_leaves_the_output_whole_or_absent(
    exports: Callable[[], int], scratch: Path
) -> None:
    """While replacing a bundle, and while writing a new one; the next export cleans up."""
    out = scratch / "out"
    killed = 0
    for keep in (True, False, False):
        if not keep:
            shutil.rmtree(out, ignore_errors=True)
        killed += exports() != 0
        if out.exists():
            load_manifest(out, "bundle")
        assert out.exists() or not keep
    assert killed
    assert exports() == 0
    load_manifest(out, "bundle")
    assert [path.name for path in scratch.iterdir()] == ["out"]
