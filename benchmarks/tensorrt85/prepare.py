"""Packs everything that the TensorRT 8.5 run needs, on a machine with a network and without a GPU.

    PYTHONPATH=benchmarks python3 benchmarks/run_from_checkout.py \\
        benchmarks/tensorrt85/prepare.py WORK HEADERS PYTHON

WORK keeps downloads and compressed libraries between runs; its folder `payload/` receives
`part-NN` (the libraries, which never change) and `small/`: `code` (scripts, graphs, the plugin
library) and zstd.
HEADERS is a folder with the headers of TensorRT 8.5.3. PYTHON is an installation of CPython 3.10,
the version that the bindings are for. Nothing of NVIDIA's is kept in the repository.
With --timing-cache builds there start from the tactics that an earlier run measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import graphs
from python_tree import CUDA_HEADERS, copy_python, copy_site, empty_library, wheel_of_pycuda
from run_from_checkout import MAPPED, ROOT
from thin_library import thin

from lacache_trt.plugins.library import build_library

PART_BYTES = 48 * 10**6
LEVEL = "-15"
WHEELS = ("tensorrt==8.5.3.1", "nvidia-cublas-cu11==11.11.3.6", "numpy==2.2.6")
PURE = ("cuda-bindings==13.4.4", "cuda-pathfinder==1.8.3", "pytools==2026.1.1")
NEEDED = ("platformdirs==4.12.4", "typing_extensions==4.16.0", "siphash24==1.9", "mako==1.4.3")
PLATFORMS = ("manylinux1_x86_64", "manylinux2014_x86_64", "manylinux_2_17_x86_64")
NEWER = ("manylinux_2_24_x86_64", "manylinux_2_28_x86_64")
SCRIPTS = ("tensorrt85", "llada_shape.py", "reference_llada.py", "result_file.py")
TINY = ("tiny.reference", "tiny.float16", "tiny.shared", "tiny.fp8")
MODELS = (*TINY, "shared.4", "slice.4", "shared.32")
CUDNN = "libcudnn.so.8"
# These stay whole: their kernels are checked against a SHA-256 digest when a builder is made, and
# with a single kernel overwritten TensorRT gives no builder (`validateCaskKLibDigest`).
WHOLE = ("libnvinfer.so.8", "libnvinfer_builder_resource.so.8.5.3")
ZSTD_LIBRARIES = ("liblz4", "liblzma", "libz")


def download(folder: Path) -> None:
    """The wheels, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in (*WHEELS, *PURE, *NEEDED):
        name = package.split("==")[0].replace("-", "_")
        if list(folder.glob(f"{name}-*.whl")):
            continue
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version", "3.10", "--implementation", "cp"]
        command += [part for name in (*PLATFORMS, *NEWER) for part in ("--platform", name)]
        subprocess.run([*command, "--dest", str(folder), package], check=True)


def compress(source: Path, target: Path) -> None:
    """zstd over a long window: cubins of one kernel resemble each other. Slow, so done once."""
    if not target.exists():
        fresh = target.with_suffix(".fresh")
        command = ["zstd", "-q", "-f", LEVEL, "--long=27", str(source), "-o", str(fresh)]
        subprocess.run(command, check=True)
        fresh.rename(target)


def pack_folder(source: Path, target: Path) -> None:
    """A compressed tar of a folder, without what tells one run from the next."""
    with tempfile.TemporaryDirectory() as temporary:
        archive = Path(temporary) / "folder.tar"
        with tarfile.open(archive, "w", dereference=True) as tar:
            tar.add(source, arcname=".", filter=_plain)
        target.unlink(missing_ok=True)
        compress(archive, target)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if "__pycache__" in member.name or member.name.endswith((".pyc", ".pyi", ".pxd", ".pyx")):
        return None
    member.mtime, member.uid, member.gid, member.uname, member.gname = 0, 0, 0, "", ""
    return member


def libraries(work: Path) -> list[Path]:
    """TensorRT, and cuBLAS for one SM, compressed one by one so that they unpack in parallel."""
    wheels, target = work / "wheels", work / "libraries"
    target.mkdir(exist_ok=True)
    found = []
    for pattern in ("tensorrt-*.whl", "nvidia_cublas*.whl"):
        with tempfile.TemporaryDirectory(dir=work) as temporary:
            unpacked = Path(temporary)
            shutil.unpack_archive(next(wheels.glob(pattern)), unpacked, "zip")
            for path in sorted(unpacked.rglob("*.so*")):
                if path.name != "libnvblas.so.11":
                    found.append(_library(path, target))
    return found


def _library(path: Path, folder: Path) -> Path:
    target = folder / f"{path.name}.zst"
    if not target.exists():
        if path.name not in WHOLE:
            print(f"{path.name}: {thin(path, graphs.SM):,} bytes cleared", flush=True)
        compress(path, target)
    return target


def base(work: Path, python: Path) -> None:
    """`part-NN`: what does not change with this project."""
    wheels, payload = work / "wheels", work / "payload"
    download(wheels)
    pycuda = wheel_of_pycuda(work, python)
    entries = libraries(work)
    for name, copy in {
        "python": lambda out: copy_python(python, out),
        "site": lambda out: copy_site(wheels, pycuda, out),
    }.items():
        target = work / f"{name}.tar.zst"
        if not target.exists():
            with tempfile.TemporaryDirectory() as folder:
                copy(Path(folder))
                pack_folder(Path(folder), target)
        entries.append(target)
    payload.mkdir(exist_ok=True)
    for old in payload.glob("part-*"):
        old.unlink()
    archive = work / "base.tar"
    with tarfile.open(archive, "w") as tar:
        for entry in entries:
            tar.add(entry, arcname=entry.name, filter=_plain)
    with open(archive, "rb") as file:
        number = 0
        while piece := file.read(PART_BYTES):
            (payload / f"part-{number:02}").write_bytes(piece)
            number += 1
    archive.unlink()


def code(work: Path, headers: Path, models: Sequence[str], timing: Path | None) -> None:
    """`code`: scripts, a copy of the package, graphs, weights of tiny-llada, the two binaries.

    And the tactics that an earlier run measured, if `timing` is the folder that it left.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _copy_package(folder / "package")
        _copy_scripts(folder / "scripts")
        build_library(headers, _made(folder / "plugin"))
        compile_loader(headers, folder / "plugin" / "loader")
        empty_library(_made(folder / "lib") / CUDNN, CUDNN)
        for model in models:
            print(f"{model}", flush=True)
            cached = work / "models" / model
            if not cached.exists():
                make_model(model, cached)
            shutil.copytree(cached, folder / "models" / model)
        if timing is not None:
            copy_timing_cache(timing, folder / "timing")
        (folder / "COMMIT").write_text(os.environ.get("LACACHE_TRT_COMMIT", "unknown"))
        pack_folder(folder, work / "payload" / "small" / "code")


def copy_timing_cache(source: Path, target: Path) -> None:
    """Of the packed TensorRT only: a builder of another may take it and choose wrongly."""
    measured = json.loads((source / "timing.json").read_text())["tensorrt"]
    packed = WHEELS[0].split("==")[1]
    if measured != packed:
        raise SystemExit(f"{source} is of TensorRT {measured}, not of {packed}")
    _made(target)
    for name in ("timing.json", "timing.cache"):
        shutil.copyfile(source / name, target / name)


def unpacker(folder: Path) -> None:
    """zstd and the libraries that it needs, for a machine that has none."""
    program = Path(shutil.which("zstd") or "zstd")
    shutil.copy(program, _made(folder) / "zstd")
    listing = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True)
    for line in listing.stdout.splitlines():
        words = line.split()
        if len(words) > 2 and words[0].startswith(ZSTD_LIBRARIES):
            shutil.copy(words[2], folder / words[0])


def make_model(model: str, folder: Path) -> None:
    """One of `tiny.reference`, `tiny.float16`, `tiny.shared`, `tiny.fp8`, `slice.LAYERS`,
    `shared.LAYERS`."""
    kind, setting = model.split(".")
    fresh = folder.with_name(f"{folder.name}.fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    if kind in ("slice", "shared"):
        graphs.llada_8b(_made(fresh), int(setting), kind == "shared")
    else:
        make = {
            "reference": graphs.tiny_reference,
            "float16": graphs.tiny_graphs,
            "shared": graphs.tiny_shared,
            "fp8": graphs.tiny_fp8,
        }
        make[setting](_made(fresh))
    fresh.rename(folder)


def compile_loader(headers: Path, out: Path) -> None:
    """The C++ program, with its own C++ library so that it runs on another distribution."""
    here = Path(__file__).parent
    flags = ["-std=c++17", "-O2", "-s", "-Wno-deprecated-declarations"]
    include = [f"-isystem{headers}", f"-I{ROOT / 'plugins' / 'native' / 'cuda'}"]
    static = ["-static-libstdc++", "-static-libgcc", "-ldl"]
    command = ["g++", *flags, *include, str(here / "loader.cpp"), *static, "-o", str(out)]
    subprocess.run(command, check=True)


def _copy_package(target: Path) -> None:
    package = target / "lacache_trt"
    skipped = shutil.ignore_patterns("__pycache__", "tiny-llada")
    shutil.copytree(ROOT / "lacache_trt", package, ignore=skipped)
    for name in MAPPED:
        shutil.copytree(ROOT / name, package / name, ignore=skipped)


def _copy_scripts(target: Path) -> None:
    for name in SCRIPTS:
        source = ROOT / "benchmarks" / name
        if source.is_dir():
            shutil.copytree(source, _made(target), dirs_exist_ok=True)
        else:
            shutil.copy(source, _made(target))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def sizes(files: Iterable[Path]) -> str:
    """A line for each file."""
    return "\n".join(f"{path.stat().st_size:>12,} {path.name}" for path in sorted(files))


def main() -> None:
    """Make what is missing, pack it, list it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("headers", type=Path)
    parser.add_argument("python", type=Path)
    parser.add_argument("--only-code", action="store_true", help="leave part-NN as they are")
    parser.add_argument(
        "--timing-cache", type=Path, help="the folder `timing` that an earlier run left in $OUT"
    )
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), help="what `code` holds of " + " ".join(MODELS)
    )
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    _made(work / "payload" / "small")
    if not CUDA_HEADERS.is_dir():
        raise SystemExit(f"{CUDA_HEADERS} is needed to compile PyCUDA")
    if not arguments.only_code:
        base(work, arguments.python)
    code(work, arguments.headers.resolve(), arguments.models, arguments.timing_cache)
    unpacker(work / "payload" / "small")
    print(sizes(path for path in (work / "payload").rglob("*") if path.is_file()))


if __name__ == "__main__":
    main()
