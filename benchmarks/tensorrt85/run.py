"""The TensorRT 8.5 run on the GPU machine, offline, from the payload that `prepare.py` packed.

    python3 run.py PAYLOAD [--wait SECONDS] [--stop] [PART...] [KIND=SECONDS...]

PAYLOAD is the folder that `part-NN` and `small/` were copied to. PART is any of

    tiny.DTYPE[.bkN]      tiny-llada at every block length or one; then the C++ loader
    slice.LAYERS[.nN]     LLaDA-8B's width with so many layers, at every length or one
    shared.LAYERS[.nN]    the same with every large weight an input of the plans
    peers.LAYERS          our CUDA engine and the eager reference on the same machine

KIND=SECONDS is the limit of one process of a kind. The parts go on in the background after SECONDS
of waiting; a call without parts waits for them again, one with more parts queues nothing and is
refused. Every call leaves in $OUT what there is so far: `trt85.json` in the form of
benchmarks/results/, the logs, the inspector's reports, `timing/` with the tactics that TensorRT has
measured (`prepare.py --timing-cache` packs that folder for a later machine with the same GPU), and
small plans once the parts are done. `--stop` ends what still runs. Plans that an earlier call
built are used again. TRT85_TACTICS names TensorRT's tactic sources to build with; TRT85_QUICK has
fewer kernels timed, which `tiny` does anyway.
LACACHE_TRT_COMMIT is the commit that the result names; by default the one that was packed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

OUT = Path(os.environ.get("OUT", "/tmp/trt85-out"))
SHOWN_CHARACTERS = 9000
# What a device machine gives back of one file, and of how many files.
PLANS_BYTES, PLANS_FILES = 15 * 10**6, 3


def find_root() -> Path:
    """In memory where there is room: plans and weights are read several times."""
    if "TRT85_ROOT" in os.environ:
        return Path(os.environ["TRT85_ROOT"])
    memory = Path("/dev/shm")
    if (memory / "trt85-run").exists():
        return memory / "trt85-run"
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 40 * 2**30
    return (memory if roomy else Path("/tmp")) / "trt85-run"


def unpack(payload: Path, target: Path) -> None:
    """The payload into `target`; `code` again whenever it changed."""
    target.mkdir(parents=True, exist_ok=True)
    os.chmod(payload / "zstd", 0o755)
    zstd = ["env", f"LD_LIBRARY_PATH={payload}", str(payload / "zstd"), "-dqf", "--long=27"]
    if not (target / "base-done").exists():
        pieces = sorted(payload.glob("part-*"))
        packed = target / "packed"
        _untar(["cat", *map(str, pieces)], packed)
        (target / "lib").mkdir(exist_ok=True)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda path: _unpack_one(zstd, path, target), packed.iterdir()))
        shutil.rmtree(packed)
        shutil.move(target / "lib" / "tensorrt.so", target / "site" / "tensorrt" / "tensorrt.so")
        (target / "base-done").touch()
    stamp, changed = target / "code-done", (payload / "code").stat().st_mtime
    if not stamp.exists() or stamp.stat().st_mtime < changed:
        _untar([*zstd, "-c", str(payload / "code")], target)
        stamp.touch()


def _unpack_one(zstd: list[str], path: Path, target: Path) -> None:
    if path.name.endswith(".tar.zst"):
        folder = target / path.name.removesuffix(".tar.zst")
        folder.mkdir(exist_ok=True)
        _untar([*zstd, "-c", str(path)], folder)
    else:
        out = target / "lib" / path.name.removesuffix(".zst")
        subprocess.run([*zstd, str(path), "-o", str(out)], check=True)


def _untar(command: list[str], folder: Path) -> None:
    """Unpack the archive that a command prints."""
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as tar,
    ):
        tar.extractall(folder, filter="data")
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}")


def worker(root: Path) -> int | None:
    """The process that works through the parts, if it still runs."""
    path = root / "worker.pid"
    pid = int(path.read_text()) if path.exists() else 0
    stat = Path(f"/proc/{pid}/stat")
    if not pid or not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
        return None
    return pid


def take_timing_cache(root: Path) -> None:
    """Start from the packed tactics if this GPU is of the model that they were measured on.

    That is for us to know: a cache only bears its GPU's number.
    """
    packed, target = root / "timing", root / "work" / "timing.cache"
    if target.exists() or not (packed / "timing.json").is_file():
        return
    measured, here = json.loads((packed / "timing.json").read_text())["device"], device_name()
    if measured != here:
        print(f"the packed timing cache is of {measured}, not of {here}: not used", flush=True)
        return
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(packed / "timing.cache", target)


def start(root: Path, parts: list[str]) -> None:
    """Work through the parts in a session of its own, which outlives this call."""
    command = [sys.executable, str(root / "scripts" / "parts.py"), str(root), *parts]
    (root / "state.json").unlink(missing_ok=True)
    with open(root / "worker.log", "w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=root, start_new_session=True
        )
    (root / "worker.pid").write_text(str(process.pid))


def stop(root: Path) -> None:
    """End the worker and the part that it runs, which has a session of its own."""
    pid = worker(root)
    if pid is None:
        return
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.killpg(pid, signal.SIGKILL)
    for child in map(int, children):
        os.killpg(child, signal.SIGKILL)
    print(f"stopped {pid} and {children}", flush=True)


def state(root: Path) -> dict[str, Any]:
    """What the worker said last."""
    path = root / "state.json"
    if not path.exists():
        return {"running": None, "finished": [], "failures": ["the worker has not started"]}
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def wait(root: Path, seconds: float) -> None:
    """Until the worker is done or the time is over; says which process runs and how far it is."""
    deadline, shown = time.monotonic() + seconds, ""
    while worker(root) is not None and time.monotonic() < deadline:
        time.sleep(1)
        running = state(root)["running"]
        log = root / "logs" / f"{running}.log"
        last = log.read_text(errors="replace").splitlines()[-1:] if log.exists() else []
        line = f"{running}: {last[0][:150]}" if last else f"{running}"
        if line != shown:
            shown = line
            print(f"{seconds - (deadline - time.monotonic()):5.0f} s  {line}", flush=True)


def collect(root: Path) -> None:
    """One result file, the logs, the inspector's reports, and what the builder has learned."""
    metrics: dict[str, float] = {}
    versions = {"tensorrt": tensorrt_version(root)}
    details: dict[str, Any] = state(root)
    for path in sorted((root / "results").glob("*.json")):
        if path.name.endswith(".layers.json"):
            continue
        found = json.loads(path.read_text())
        metrics |= found["metrics"]
        versions |= found.get("versions", {})
        details[path.stem] = found["details"]
    _write_result(root, metrics, details, versions)
    with tarfile.open(OUT / "layers.tar.xz", "w:xz") as tar:
        for path in sorted((root / "results").glob("*.layers.json")):
            tar.add(path, arcname=path.name)
    with tarfile.open(OUT / "logs.tar.xz", "w:xz", preset=1) as tar:
        tar.add(root / "logs", arcname="logs")
        tar.add(root / "worker.log", arcname="worker.log")
    keep_timing_cache(root)
    if worker(root) is None:
        keep_plans(root)
    for name, value in metrics.items():
        print(f"{name} = {value:.6g}")


def _write_result(
    root: Path, metrics: dict[str, float], details: dict[str, Any], versions: dict[str, str]
) -> None:
    sys.path.insert(0, str(root / "scripts"))
    from result_file import COMMIT_VARIABLE, write_result

    commit = root / "COMMIT"
    if not os.environ.get(COMMIT_VARIABLE) and commit.exists():
        os.environ[COMMIT_VARIABLE] = commit.read_text().strip()
    path = write_result("trt85", device_name(), metrics, details, OUT)
    content = json.loads(path.read_text())
    content["versions"] |= versions  # of the parts, which run in interpreters of their own
    path.write_text(json.dumps(content, indent=1) + "\n")


def tensorrt_version(root: Path) -> str:
    """Of the packed bindings."""
    path = root / "site" / "tensorrt" / "__init__.py"
    found = re.search(r'^__version__ = "(.+)"', path.read_text(), re.M) if path.exists() else None
    return found.group(1) if found else "unknown"


def keep_timing_cache(root: Path) -> None:
    """The measured tactics, and on what they were measured."""
    cache, out = root / "work" / "timing.cache", OUT / "timing"
    if cache.is_file():
        out.mkdir(exist_ok=True)
        shutil.copyfile(cache, out / cache.name)
        facts = {"device": device_name(), "tensorrt": tensorrt_version(root)}
        (out / "timing.json").write_text(json.dumps(facts))


def keep_plans(root: Path) -> None:
    """An archive for each of the engine directories whose plans are small, the newest first."""
    engines = sorted((root / "work").glob("*/engine"), key=lambda path: -path.stat().st_mtime)
    kept = 0
    for engine in engines:
        plans = sorted(engine.glob("*.plan"))
        if plans and kept < PLANS_FILES and sum(p.stat().st_size for p in plans) < PLANS_BYTES:
            kept += 1
            with tarfile.open(OUT / f"plans.{engine.parent.name}.tar", "w") as tar:
                for plan in plans:
                    tar.add(plan, arcname=plan.name)


def device_name() -> str:
    """As the driver names the first one."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=name", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return "unknown"
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    """Exit code 0: done; 1: a part failed; 2: parts still run, or were asked for while some do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("payload", type=Path)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--wait", type=float, default=540)
    parser.add_argument("--stop", action="store_true")
    arguments = parser.parse_intermixed_args()
    OUT.mkdir(parents=True, exist_ok=True)
    root, started = find_root(), time.monotonic()
    if arguments.stop:
        stop(root)
    if arguments.parts:
        if worker(root) is not None:
            print("other parts still run: call without parts, or with --stop")
            return 2
        unpack(arguments.payload, root)
        print(f"unpacked into {root}: {time.monotonic() - started:.1f} s", flush=True)
        take_timing_cache(root)
        start(root, arguments.parts)
    wait(root, arguments.wait - (time.monotonic() - started))
    running = worker(root) is not None
    print((root / "worker.log").read_text(errors="replace")[-SHOWN_CHARACTERS:])
    collect(root)
    failures = state(root)["failures"]
    print(f"{'STILL RUNNING' if running else 'done'}, {time.monotonic() - started:.0f} s")
    return 2 if running else int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
