"""The engines by name: where each lives and what it needs. Nothing here imports an engine."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from lacache_trt.errors import MissingDependencyError
from lacache_trt.gpus import find_gpus

AUTO = "auto"


@dataclass(frozen=True)
class EngineEntry:
    """One engine.

    Attributes:
        name: what `--engine` and the manifest say.
        module: module with the engine's `build` and `load` functions.
        description: one line for help and `doctor`.
        requires: the packages it needs, each as the import names that provide it.
        install: command that installs them.
        runs_with: further packages that loading needs and building does not.
        install_runtime: command that installs those.
        needs_gpu: it runs on an NVIDIA GPU only.
        sms: the compute capabilities that it supports; empty for all.
        cross_builds: it can build for a GPU that is not there, if `--sm` names it.
        oldest: first version that the builder knows how to use; empty for all.
    """

    name: str
    module: str
    description: str
    requires: tuple[tuple[str, ...], ...]
    install: str
    runs_with: tuple[tuple[str, ...], ...] = ()
    install_runtime: str = ""
    needs_gpu: bool = False
    sms: tuple[int, ...] = ()
    cross_builds: bool = False
    oldest: tuple[int, ...] = ()

    def missing(self) -> tuple[str, ...]:
        """Packages that building and loading need and that are not installed."""
        return _missing(self.requires)

    def missing_to_run(self) -> tuple[str, ...]:
        """Packages that only loading needs and that are not installed."""
        return _missing(self.runs_with)

    def gpu_problem(self) -> str | None:
        """Why no GPU of this machine can be used, or None if one can or none is needed."""
        if not self.needs_gpu:
            return None
        report = find_gpus()
        if not report.devices:
            return report.problem or "no GPU"
        found = [gpu.sm for gpu in report.devices]
        if self.sms and not set(found) & set(self.sms):
            return f"{self.name} does not support sm_{found[0]} ({report.devices[0].name})"
        return None

    def load_problem(self) -> str | None:
        """Why the first of its packages, which is installed, does not load, or None if it does."""
        name = next(name for name in self.requires[0] if _installed(name))
        try:
            import_module(name)
        except (ImportError, OSError) as error:
            return f"{name} is installed but does not load: {error}"
        return None

    def version(self) -> str:
        """Version of its first package, which loads."""
        name = next(name for name in self.requires[0] if _installed(name))
        return str(import_module(name).__version__)

    def age_problem(self, version: str) -> str | None:
        """Why a version of its first package cannot be used, or None if it can."""
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if numbers >= self.oldest:
            return None
        return f"{self.name} {version} is older than {'.'.join(map(str, self.oldest))}"


_CUDA_PYTHON = (("pycuda",), ("cuda.bindings",))
_INSTALL_CUDA_PYTHON = "pip install pycuda cuda-bindings"
_ENTRIES = (
    EngineEntry(
        name="tensorrt",
        module="lacache_trt.engines.tensorrt",
        description="TensorRT 10.15 or newer on an NVIDIA GPU",
        requires=(("tensorrt", "tensorrt_bindings"),),
        install="pip install tensorrt",
        runs_with=_CUDA_PYTHON,
        install_runtime=_INSTALL_CUDA_PYTHON,
        needs_gpu=True,
        oldest=(10, 15),
    ),
    EngineEntry(
        name="tensorrt-rtx",
        module="lacache_trt.engines.tensorrt",
        description="TensorRT for RTX, on GeForce RTX, RTX PRO and L40S GPUs",
        requires=(("tensorrt_rtx", "tensorrt_rtx_bindings"),),
        install="pip install tensorrt-rtx",
        runs_with=_CUDA_PYTHON,
        install_runtime=_INSTALL_CUDA_PYTHON,
        needs_gpu=True,
        sms=(75, 80, 86, 89, 120, 121),
        cross_builds=True,
    ),
    EngineEntry(
        name="cuda",
        module="lacache_trt.engines.cuda",
        description="PyTorch with Triton kernels and CUDA graphs on an NVIDIA GPU",
        requires=(("torch",), ("triton",)),
        install='pip install "lacache-trt[cuda]"',
        needs_gpu=True,
    ),
    EngineEntry(
        name="onnxruntime",
        module="lacache_trt.engines.onnxruntime",
        description="ONNX Runtime on the CPU, runs anywhere",
        requires=(("onnxruntime",),),
        install="pip install onnxruntime",
    ),
)
ENGINES = {entry.name: entry for entry in _ENTRIES}
TENSORRT_ENGINES = ("tensorrt", "tensorrt-rtx")


def resolve(name: str) -> EngineEntry:
    """The entry of a named engine whose packages are installed.

    Raises:
        MissingDependencyError: they are not. Another engine is never put in its place.
    """
    entry = ENGINES[name]
    missing = entry.missing()
    if missing:
        lacking = f"missing {', '.join(missing)}"
        no_gpu = None if entry.cross_builds else entry.gpu_problem()
        if no_gpu is not None:
            raise MissingDependencyError(
                f"the {name} engine needs an NVIDIA GPU and packages that are not installed",
                got=f"{no_gpu}; {lacking}",
                fix=f"on a machine with a GPU: {entry.install}{_or_choose(name, '; here')}",
            )
        raise MissingDependencyError(
            f"the {name} engine needs packages that are not installed",
            got=lacking,
            fix=f"{entry.install}{_or_choose(name)}",
        )
    return entry


def resolve_for_build(name: str, sm: int | None = None) -> EngineEntry:
    """The engine to build: a named one, or TensorRT, else TensorRT-RTX for `auto`.

    Args:
        name: of the engine, or `auto`.
        sm: the GPU that the user named; where the engine can build for a GPU that is not there,
            this machine's own does not matter then.

    Raises:
        MissingDependencyError: it is not usable here. Another engine is never put in its place.
    """
    if name == AUTO:
        return _automatic(sm)
    entry = resolve(name)
    if name not in TENSORRT_ENGINES:
        return entry
    _require_loads(entry)
    if sm is not None and entry.cross_builds:
        return entry
    problem = entry.gpu_problem()
    if problem is not None:
        raise MissingDependencyError(
            f"the {name} engine cannot be built for this machine",
            got=problem,
            fix=f"name the target GPU: --engine {name} --sm 89{_or_choose(name)}"
            if entry.cross_builds
            else f"build on the machine with the GPU{_for_another_gpu(sm)}{_or_choose(name)}",
        )
    return entry


def require_legacy(version: str) -> None:
    """Raise `MissingDependencyError` unless the legacy TensorRT is the one that is installed.

    Args:
        version: major and minor, as `--trt-version` names it.
    """
    entry = ENGINES["tensorrt"]
    problem = "tensorrt is not installed" if entry.missing() else entry.load_problem()
    if problem is None:
        if entry.version().startswith(f"{version}."):
            return
        problem = f"tensorrt {entry.version()}"
    raise MissingDependencyError(
        f"--trt-version {version} needs TensorRT {version}",
        got=problem,
        fix=f"pip install tensorrt=={version}.3.1 (Python 3.10), or leave --trt-version out",
    )


def _require_loads(entry: EngineEntry) -> None:
    problem = entry.load_problem()
    if problem is not None:
        raise MissingDependencyError(
            f"the {entry.name} engine cannot be used here",
            got=problem,
            fix=f"reinstall it together with its libraries: {entry.install}"
            f"{_or_choose(entry.name, '; or')}",
        )


def _automatic(sm: int | None) -> EngineEntry:
    problems = []
    for name in TENSORRT_ENGINES:
        entry = ENGINES[name]
        problem = _problem(entry)
        if problem is None:
            return entry
        problems.append(f"{name}: {problem}")
    install = f"{ENGINES['tensorrt'].install} on a machine with an NVIDIA GPU and its driver"
    raise MissingDependencyError(
        "--engine auto builds for TensorRT, or else for TensorRT-RTX, and neither can be used here",
        got="; ".join(problems),
        fix=f"{install}{_for_another_gpu(sm)}{_or_choose('tensorrt')}",
    )


def _problem(entry: EngineEntry) -> str | None:
    """Why nothing can be built with one of the TensorRT engines for this machine, or None."""
    missing = entry.missing()
    if missing:
        return f"{missing[0]} is not installed"
    return entry.gpu_problem() or entry.load_problem() or entry.age_problem(entry.version())


def _for_another_gpu(sm: int | None) -> str:
    """`; ...` with the build for a GPU that is not there, if its package is."""
    entry = ENGINES["tensorrt-rtx"]
    if entry.missing() or (sm is not None and sm not in entry.sms):
        return ""
    return f"; for another machine's L40S or RTX GPU: --engine {entry.name} --sm {sm or 89}"


def _or_choose(name: str, joint: str = ", or") -> str:
    """`, or choose --engine ...` with the other engines that this machine can use, if any."""
    usable = [entry.name for entry in _ENTRIES if entry.name != name and _usable(entry)]
    return f"{joint} choose --engine {' or '.join(usable)}" if usable else ""


def _usable(entry: EngineEntry) -> bool:
    """Whether an engine can be built and run here, by the same rules as `doctor`."""
    if entry.name in TENSORRT_ENGINES:
        return _problem(entry) is None and not entry.missing_to_run()
    return not entry.missing() and entry.gpu_problem() is None


def _missing(packages: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    return tuple(names[0] for names in packages if not any(map(_installed, names)))


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
