"""The whole chain on the model that ships: export, build, generate, score, time.

`tiny-llada` is a small masked-diffusion model, trained on generated word problems; the problems
asked here are held out. What is measured is exact match of the final number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from lacache_trt.demo.problems import Problem, is_correct, problem
from lacache_trt.demo.shipped import CHECKPOINT as CHECKPOINT
from lacache_trt.demo.shipped import SETTINGS as SETTINGS
from lacache_trt.engines.builder import build_engine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.errors import ArtifactError, OutputError
from lacache_trt.export.exporter import export_bundle
from lacache_trt.export.options import ExportOptions
from lacache_trt.generation import Cache, GenerationConfig, GenerationResult
from lacache_trt.progress import Progress
from lacache_trt.publish import MANIFEST_NAME
from lacache_trt.runtime import Runtime

BATCH_SIZE = 16
TIMED_PROBLEMS = 3
CACHES: tuple[Cache, ...] = ("none", "exact")

Watch = Callable[[Runtime, Sequence[Problem], GenerationConfig], None]


@dataclass(frozen=True)
class DemoReport:
    """What the demo found.

    Attributes:
        problems: held-out problems asked.
        correct: how many got the right final number.
        accuracy: their share.
        settings: how they were decoded.
        ms_per_step: milliseconds per denoising step by cache, one row, fills counted.
        seconds: where the time went.
        directory: the kept bundle and engine directories, or None.
    """

    problems: int
    correct: int
    accuracy: float
    settings: dict[str, object]
    ms_per_step: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)
    directory: str | None = None


def run_demo(
    count: int,
    keep: Path | None,
    progress: Progress,
    watch: Watch | None = None,
) -> DemoReport:
    """Run the chain.

    Args:
        count: held-out problems to ask.
        keep: directory that receives `bundle` and `engine`; None removes them at the end.
        progress: told what is going on.
        watch: called with the loaded runtime before the scoring, to show some answers.
    """
    with _workplace(keep) as directory:
        seconds: dict[str, float] = {}
        engine = _prepare(directory, progress, seconds)
        problems = [problem("held-out", index) for index in range(count)]
        with Runtime.load(engine) as runtime:
            if watch is not None:
                watch(runtime, problems, SETTINGS)
            started = time.perf_counter()
            correct = _score(runtime, problems, progress)
            seconds["answers"] = time.perf_counter() - started
            timings = _time_caches(runtime, problems[:TIMED_PROBLEMS], progress)
    settings: dict[str, object] = {
        "gen_length": SETTINGS.gen_length,
        "block_length": SETTINGS.block_length,
        "steps": SETTINGS.steps,
        "cache": SETTINGS.cache,
    }
    kept = None if keep is None else str(keep)
    return DemoReport(count, correct, correct / count, settings, timings, seconds, kept)


@contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with TemporaryDirectory(prefix="lacache-trt-demo-") as temporary:
            yield Path(temporary)
        return
    if (keep / MANIFEST_NAME).exists():
        raise OutputError(
            "the demo would write into a bundle or an engine",
            got=f"{keep} with a {MANIFEST_NAME}",
            expected="a directory for both, or a name that does not exist yet",
            fix="--keep another name",
        )
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise OutputError(
            "the demo can keep its files in a directory only",
            got=f"{keep}: {error.strerror}",
            expected="a directory, or a name that does not exist yet",
            fix="--keep another name",
        ) from error
    yield keep


def _prepare(directory: Path, progress: Progress, seconds: dict[str, float]) -> Path:
    """Export and build into `directory`; returns the engine directory."""
    if not (CHECKPOINT / "config.json").is_file():
        raise ArtifactError(
            "the model of the demo is not installed",
            got=f"no {CHECKPOINT.name} beside {Path(__file__).name}",
            fix="install the complete package, or train the model: examples/train_tiny.py",
        )
    bundle, engine = directory / "bundle", directory / "engine"
    report = export_bundle(str(CHECKPOINT), bundle, ExportOptions(overwrite=True), progress)
    seconds["export"] = report.seconds
    options = BuildOptions(engine="onnxruntime", overwrite=True)
    seconds["build"] = build_engine(bundle, engine, options, progress).seconds
    return engine


def _score(runtime: Runtime, problems: Sequence[Problem], progress: Progress) -> int:
    progress.start("answering held-out problems", len(problems))
    correct = 0
    for first in range(0, len(problems), BATCH_SIZE):
        batch = problems[first : first + BATCH_SIZE]
        results = _answers(runtime, [item.question for item in batch], SETTINGS)
        for item, result in zip(batch, results, strict=True):
            correct += is_correct(item, result.text or "")
        progress.advance(len(batch))
    return correct


def _time_caches(
    runtime: Runtime, problems: Sequence[Problem], progress: Progress
) -> dict[str, float]:
    """Milliseconds per step, one row at a time; the fastest of the problems, after a warm-up."""
    progress.start("timing steps", len(CACHES) * (len(problems) + 1))
    timings: dict[str, float] = {}
    for cache in CACHES:
        settings = replace(SETTINGS, cache=cache)
        found = []
        for item in (problems[0], *problems):
            result = _answers(runtime, [item.question], settings)[0]
            found.append(ms_per_step(result))
            progress.advance()
        timings[cache] = min(found[1:])
    return timings


def ms_per_step(result: GenerationResult) -> float:
    """Milliseconds per forward, cache fills counted."""
    spent = sum(block.fill_s + block.steps_s for block in result.blocks)
    return 1e3 * spent / max(1, sum(block.forwards for block in result.blocks))


def _answers(
    runtime: Runtime, questions: list[str], settings: GenerationConfig
) -> list[GenerationResult]:
    results = runtime.generate(list(questions), settings, raw=True)
    return results if isinstance(results, list) else [results]
