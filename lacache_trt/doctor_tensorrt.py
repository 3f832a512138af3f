"""What this machine can do with TensorRT and TensorRT-RTX, each problem with its remedy."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from lacache_trt.engines.registry import ENGINES, TENSORRT_ENGINES, EngineEntry
from lacache_trt.errors import MissingDependencyError
from lacache_trt.gpus import GpuReport
from lacache_trt.plugins.library import find_compiler, find_headers

_LOAD_SECONDS = 120


@dataclass(frozen=True)
class Ability:
    """One thing to do with the toolkit: whether it works here, else why not and what to do."""

    name: str
    works: bool
    reason: str
    fix: str | None = None


def tensorrt_abilities(gpu: GpuReport) -> tuple[Ability, ...]:
    """Compiling the plugin library, then building and running with each flavour."""
    found = [_compile_ability()]
    for name in TENSORRT_ENGINES:
        entry = ENGINES[name]
        build = _build_ability(entry, gpu)
        found += [build, _run_ability(entry, build, gpu)]
    return tuple(found)


def install_line(command: str) -> str:
    """The command for the Python that runs this."""
    return command.replace("pip install", f"{sys.executable} -m pip install", 1)


def _compile_ability() -> Ability:
    name = "compile plugins"
    try:
        compiler, headers = find_compiler(), find_headers()
    except MissingDependencyError as error:
        return Ability(name, False, str(error.got), error.fix)
    return Ability(
        name, True, f"{compiler}, headers of TensorRT {headers.major} in {headers.folder}"
    )


def _build_ability(entry: EngineEntry, gpu: GpuReport) -> Ability:
    name = f"build {entry.name}"
    missing = entry.missing()
    if missing:
        return Ability(name, False, f"{missing[0]} not installed", install_line(entry.install))
    version, problem = _load(entry)
    if problem is not None:
        fix = f"{install_line(entry.install)} (reinstall it together with its libraries)"
        return Ability(name, False, problem, fix)
    unusable = entry.gpu_problem()
    if unusable is None:
        return Ability(name, True, f"{version}, for {gpu.devices[0].name}")
    if entry.cross_builds:
        return Ability(name, True, f"{version}, for another machine's GPU only (--sm): {unusable}")
    return Ability(name, False, f"{version} is installed, but {unusable}")


def _run_ability(entry: EngineEntry, build: Ability, gpu: GpuReport) -> Ability:
    name = f"run {entry.name}"
    if not build.works:
        return Ability(name, False, build.reason, build.fix)
    unusable = entry.gpu_problem()
    if unusable is not None:
        return Ability(name, False, unusable)
    missing = entry.missing_to_run()
    if missing:
        fix = install_line(entry.install_runtime)
        return Ability(name, False, f"{', '.join(missing)} not installed", fix)
    return Ability(name, True, f"{entry.description}; {gpu.devices[0].name}")


def _load(entry: EngineEntry) -> tuple[str, str | None]:
    """Version and None, or an empty text and why the package does not load; in a process apart."""
    names = ", ".join(repr(name) for name in entry.requires[0])
    script = (
        "from importlib import import_module\nfrom importlib.util import find_spec\n"
        f"name = next(name for name in ({names},) if find_spec(name))\n"
        "print(import_module(name).__version__)"
    )
    try:
        result = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=_LOAD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"{entry.name} takes longer than {_LOAD_SECONDS} s to load"
    if result.returncode == 0:
        return f"{entry.name} {result.stdout.strip()}", None
    words = result.stderr.strip().splitlines()[-1:] or ["the process ended without a word"]
    return "", f"{entry.name} is installed but does not load: {words[0]}"
