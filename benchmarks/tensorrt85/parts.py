"""The parts of the TensorRT 8.5 run, one process each; started by `run.py` on the GPU machine.

    parts.py ROOT PAYLOAD_PARTS...

Works through the parts in a session of its own, so that it goes on between two calls of `run.py`.
What a part prints goes to ROOT/logs, what it finds to ROOT/results; ROOT/state.json says what runs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import build_log

BLOCKS, LENGTHS = (32, 8, 64), (384, 1152)
LIMITS = {"tiny": 420, "slice": 900, "shared": 900, "peers": 200, "weights": 90, "loader": 60}
LOG_CHARACTERS = 2500


@dataclass
class Run:
    """Where things are, and what came of the parts."""

    root: Path
    limits: dict[str, int]
    failures: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)

    @property
    def results(self) -> Path:
        return self.root / "results"

    def state(self, running: str | None) -> None:
        """For `run.py`, which reads it while we work."""
        facts = {"running": running, "finished": self.finished, "failures": self.failures}
        fresh = self.root / "state.fresh"
        fresh.write_text(json.dumps(facts))
        fresh.rename(self.root / "state.json")

    def process(self, label: str, command: Sequence[str], old: bool) -> bool:
        """Run a part's process, its output in the logs; True if it succeeded."""
        started, limit = time.monotonic(), self.limits[label.split(".")[0]]
        self.state(label)
        print(f"=== {label}, at most {limit} s", flush=True)
        log = self.root / "logs" / f"{label}.log"
        environment = self._old() if old else self._new()
        with open(log, "w") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                done = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                done = 124
        seconds = time.monotonic() - started
        print(log.read_text(errors="replace")[-LOG_CHARACTERS:])
        verbose = self.root / "logs" / f"{label}.verbose.log"
        if verbose.is_file():
            print(build_log.summary(verbose))
        print(f"=== {label}: exit {done}, {seconds:.0f} s", flush=True)
        self.finished.append(label)
        if done:
            self.failures.append(f"{label}: exit {done} after {seconds:.0f} s")
        self.state(None)
        return done == 0

    def _shared(self) -> dict[str, str]:
        return {
            "TRT85_ROOT": str(self.root),
            "TRT85_RESULTS": str(self.results),
            "TRT85_LOGS": str(self.root / "logs"),
            "CUDA_MODULE_LOADING": "LAZY",
            "PYTHONUNBUFFERED": "1",
        }

    def _old(self) -> dict[str, str]:
        """Python 3.10 with TensorRT 8.5; cuBLAS must be there before Myelin looks for it."""
        lib = self.root / "lib"
        names = ("PATH", "HOME", "TRT85_TACTICS", "TRT85_QUICK")
        kept = {name: os.environ[name] for name in names if name in os.environ}
        driver = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
        driver.append("/usr/local/nvidia/lib64")
        return {
            **kept,
            **self._shared(),
            "PYTHONHOME": str(self.root / "python"),
            "PYTHONPATH": ":".join(
                str(self.root / name) for name in ("site", "package", "scripts")
            ),
            "LD_LIBRARY_PATH": ":".join([str(lib), str(self.root / "python" / "lib"), *driver]),
            "LD_PRELOAD": f"{lib / 'libcublasLt.so.11'}:{lib / 'libcublas.so.11'}",
        }

    def _new(self) -> dict[str, str]:
        path = ":".join(str(self.root / name) for name in ("package", "scripts"))
        return {**os.environ, **self._shared(), "PYTHONPATH": path}

    def old_python(self, label: str, script: str, *arguments: object) -> bool:
        interpreter = str(self.root / "python" / "bin" / "python3.10")
        command = [interpreter, str(self.root / "scripts" / script), *map(str, arguments)]
        return self.process(label, command, True)

    def new_python(self, label: str, script: str, *arguments: object) -> bool:
        command = [sys.executable, str(self.root / "scripts" / script), *map(str, arguments)]
        return self.process(label, command, False)


def tiny(run: Run, dtype: str, only: str = "") -> None:
    """Every packed block length, or `bkN` alone; one at a time, for they share measured kernels."""
    packed = [b for b in BLOCKS if (run.root / "models" / f"tiny.{dtype}" / f"bk{b}").is_dir()]
    for block in [int(only.removeprefix("bk"))] if only else packed:
        name = f"tiny.{dtype}.bk{block}"
        result = run.results / f"{name}.json"
        result.unlink(missing_ok=True)
        run.old_python(name, "tiny.py", dtype, block)
        if result.is_file():
            load_without_python(run, name, json.loads(result.read_text())["details"]["hashes"])


def load_without_python(run: Run, name: str, expected: dict[str, str]) -> None:
    """The C++ program's output hashes against the Python engine's."""
    work = run.root / "work" / name
    command = [str(run.root / "plugin" / "loader"), str(work / "engine" / "reuse.plan")]
    command += [str(run.root / "plugin" / "liblacache_trt_plugins.so"), str(work / "inputs")]
    label = f"loader.{name}"
    os.chmod(command[0], 0o755)
    run.process(label, command, True)
    lines = (run.root / "logs" / f"{label}.log").read_text(errors="replace").splitlines()
    words = [line.split() for line in lines]
    found = {each[0]: each[2] for each in words if len(each) == 3 and each[0] in expected}
    details = {"expected": expected, "found": found}
    metrics = {f"h200.trt85.{label}.equal": float(found == expected)}
    text = json.dumps({"metrics": metrics, "details": details})
    (run.results / f"{label}.json").write_text(text)
    print(f"{label}: {'equal' if found == expected else 'DIFFERENT'} {found}", flush=True)


def slices(run: Run, kind: str, layers: str, only: str = "") -> None:
    """Weights once, then every length in one process, or `nLENGTH` alone.

    What a process that failed left undone gets another, without the length that it failed at.
    """
    weights = run.root / "weights" / layers
    lengths = [int(only.removeprefix("n"))] if only else list(LENGTHS)
    label = f"{kind}.l{layers}"
    results = [run.results / f"{label}.n{each}.json" for each in lengths]
    for result in results:
        result.unlink(missing_ok=True)
    model = f"{kind}.{layers}"
    if run.new_python(f"weights.l{layers}", "peers.py", "weights", model, weights):
        for index, length in enumerate(lengths):
            if not results[index].is_file():
                arguments = (kind, layers, weights, *lengths[index:])
                run.old_python(f"{label}.n{length}", "slice.py", *arguments)
    shutil.rmtree(weights, ignore_errors=True)


def peers(run: Run, layers: str) -> None:
    """Our CUDA engine and the reference."""
    run.new_python(f"peers.l{layers}", "peers.py", "measure", layers)


ACTIONS = {
    "tiny": tiny,
    "slice": lambda run, *settings: slices(run, "slice", *settings),
    "shared": lambda run, *settings: slices(run, "shared", *settings),
    "peers": peers,
}


def main() -> None:
    """Every part in turn; KIND=SECONDS among them changes a limit."""
    root, words = Path(sys.argv[1]), sys.argv[2:]
    limits = dict(LIMITS)
    for word in words:
        kind, equals, seconds = word.partition("=")
        if equals:
            limits[kind] = int(seconds)
    run = Run(root, limits)
    for folder in ("results", "logs", "work"):
        (root / folder).mkdir(exist_ok=True)
    run.state(None)
    for part in (word for word in words if "=" not in word):
        kind, *settings = part.split(".")
        ACTIONS[kind](run, *settings)
    print(f"done: {len(run.failures)} failures {run.failures}", flush=True)


if __name__ == "__main__":
    main()
