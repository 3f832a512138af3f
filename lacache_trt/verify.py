"""Is a built engine right? The acceptance test that a user runs on the machine that will serve.

1. Every file is what the manifest says (`load_manifest`), the contract is what the engine has.
2. `reuse` run twice on the same caches gives the same bits.
3. `fill` and `reuse` against the plain graph, per output: largest difference, in units of the
   largest value and in float32 ulps of it. The plain graph is the engine's own or, with a bundle,
   that of an ONNX Runtime engine built from it.
4. Whole generations, exact caches against none: token agreement.
A differing token is excused, and counted, where the reference's best two probabilities are closer
than the bound; more than 0.1% of them fails.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lacache_trt.artifacts import load_manifest
from lacache_trt.decoding import rows
from lacache_trt.engines.base import Canvas, Engine, Int, Sampling, StepOutputs
from lacache_trt.engines.builder import build_engine, load_engine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.errors import InvalidRequestError
from lacache_trt.generation import GenerationConfig, GenerationResult
from lacache_trt.model.config import ModelConfig
from lacache_trt.progress import Progress, SilentProgress
from lacache_trt.runtime import Runtime

# max|a - b| / max|b| of every output, by the engine's dtype.
BOUNDS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
EXCUSED_FRACTION = 1e-3
_ULP = float(np.finfo(np.float32).eps)
_PROMPTS = (5, 12, 31)
_BLOCKS = (4, 8, 32)
_OUTPUTS = ("confidence", "margin", "neg_entropy")


@dataclass(frozen=True)
class Check:
    """One comparison: its name, whether it held, and the figures behind it."""

    name: str
    passed: bool
    figures: dict[str, float]


@dataclass(frozen=True)
class VerifyReport:
    """What was checked on which engine."""

    engine: str
    device: str
    dtype: str
    reference: str
    bound: float
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Every check held."""
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain types, `passed` included."""
        return {"passed": self.passed, **asdict(self)}

    def to_markdown(self) -> str:
        """A table to paste into a report."""
        lines = [
            f"**{'passed' if self.passed else 'FAILED'}**: {self.engine} engine on {self.device}, "
            f"{self.dtype}, against {self.reference}, bound {self.bound:g}",
            "",
            "| check | held | figures |",
            "|---|---|---|",
        ]
        for check in self.checks:
            figures = ", ".join(f"{name} {value:.3g}" for name, value in check.figures.items())
            lines.append(f"| {check.name} | {'yes' if check.passed else 'NO'} | {figures} |")
        return "\n".join(lines) + "\n"


def verify_engine(
    directory: Path,
    bundle: Path | None = None,
    report: Path | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check the engine directory, against the bundle it was built from if that is given.

    `report` is a file to write the result to: Markdown if its suffix is `.md`, else JSON.

    Raises:
        ArtifactError: a file or the contract is not what the manifest says.
        InvalidRequestError: the engine has no plain graph and no bundle is given.
    """
    progress = progress or SilentProgress()
    manifest = load_manifest(Path(directory), "engine", progress=progress)
    dtype = str(manifest.body["dtype"])
    with ExitStack() as stack:
        engine = stack.enter_context(load_engine(manifest))
        reference, name = engine, "its own plain graph"
        if bundle is not None:
            reference = stack.enter_context(_reference_engine(bundle, progress))
            name = "ONNX Runtime on the bundle's plain graph"
        elif "none" not in engine.capabilities.caches:
            raise InvalidRequestError(
                f"the {engine.name} engine has no plain graph to compare with",
                fix="add --bundle BUNDLE",
            )
        bound = BOUNDS[dtype]
        progress.start("verify", total=3)
        checks = [_repeatable(engine)]
        progress.advance()
        checks += _outputs_agree(engine, reference, bound)
        progress.advance()
        checks.append(_generations_agree(engine, reference))
        progress.advance()
        result = VerifyReport(engine.name, engine.device, dtype, name, bound, tuple(checks))
    if report is not None:
        markdown = report.suffix == ".md"
        report.write_text(
            result.to_markdown() if markdown else json.dumps(result.to_json(), indent=1) + "\n"
        )
    return result


@contextmanager
def _reference_engine(bundle: Path, progress: Progress) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="lacache-trt-verify-") as temporary:
        out = Path(temporary) / "reference"
        build_engine(bundle, out, BuildOptions(engine="onnxruntime"), progress)
        with load_engine(load_manifest(out, "engine", hashes="sizes")) as engine:
            yield engine


def _random_batch(model: ModelConfig, seed: int, width: int) -> tuple[Canvas, Int, Sampling]:
    """Three rows of different lengths, at different blocks, partly decoded."""
    generator = np.random.default_rng(seed)
    gen_length = 4 * width
    prompts = [tuple(_random_tokens(model, generator, length)) for length in _PROMPTS]
    canvas = rows.pad_left(prompts, gen_length, model)
    config = GenerationConfig(gen_length=gen_length, block_length=width, steps=gen_length)
    blocks = np.array([0, 1, 3], np.int32)
    columns = rows.columns_of_blocks(blocks, canvas.tokens.shape[1], config)
    for row, block in enumerate(blocks):
        done = slice(canvas.tokens.shape[1] - gen_length, columns[row, 0] + width // 2)
        count = width * int(block) + width // 2
        canvas.tokens[row, done] = _random_tokens(model, generator, count)
    count = len(prompts)
    sampling = Sampling(
        temperature=np.zeros(count, np.float32),
        seed=np.zeros(count, np.int32),
        step=np.zeros(count, np.int32),
        guide_row=np.arange(count, dtype=np.int32),
        cfg_scale=np.zeros(count, np.float32),
        suppress_ids=rows.id_rows((model.mask_id,), count),
        confidence_exclude_ids=rows.id_rows((), count),
    )
    return canvas, columns, sampling


def _random_tokens(model: ModelConfig, generator: np.random.Generator, count: int) -> list[int]:
    usable = np.setdiff1d(np.arange(model.vocab_size), [model.mask_id, *model.eos_ids])
    return [int(token) for token in generator.choice(usable, count)]


def _reuse(engine: Engine, canvas: Canvas, columns: Int, sampling: Sampling) -> StepOutputs:
    session = engine.session()
    try:
        session.fill(canvas, columns)
        return session.reuse(np.take_along_axis(canvas.tokens, columns, axis=1), sampling)
    finally:
        session.close()


def _repeatable(engine: Engine) -> Check:
    differing = 0
    for width in _BLOCKS:
        canvas, columns, sampling = _random_batch(engine.config, width, width)
        first = _reuse(engine, canvas, columns, sampling)
        second = _reuse(engine, canvas, columns, sampling)
        for name in ("token", *_OUTPUTS):
            left, right = getattr(first, name), getattr(second, name)
            differing += int((left.view(np.int32) != right.view(np.int32)).sum())
    return Check("reuse is bitwise repeatable", differing == 0, {"differing": differing})


def _outputs_agree(engine: Engine, reference: Engine, bound: float) -> list[Check]:
    worst = dict.fromkeys(_OUTPUTS, 0.0)
    differing = excused = total = 0
    for width in _BLOCKS:
        canvas, columns, sampling = _random_batch(engine.config, width, width)
        got = _reuse(engine, canvas, columns, sampling)
        session = reference.session()
        expected = session.plain(canvas, columns, sampling)
        session.close()
        same = got.token == expected.token
        for name in _OUTPUTS:
            left, right = getattr(got, name)[same], getattr(expected, name)[same]
            figure = float(np.abs(left - right).max() / max(np.abs(right).max(), 1e-30))
            worst[name] = max(worst[name], figure)
        total += same.size
        differing += int((~same & (expected.margin > bound)).sum())
        excused += int((~same & (expected.margin <= bound)).sum())
    checks = [
        Check(
            f"{name} of reuse against plain",
            figure <= bound,
            {"relative": figure, "ulps": figure / _ULP},
        )
        for name, figure in worst.items()
    ]
    held = differing == 0 and excused <= max(1, EXCUSED_FRACTION * total)
    figures = {"tokens": float(total), "differing": float(differing), "excused": float(excused)}
    return [*checks, Check("tokens of reuse against plain", held, figures)]


def _generations_agree(engine: Engine, reference: Engine) -> Check:
    """Greedy generations with exact caches against none, as token fractions and ms per step."""
    model = engine.config
    generator = np.random.default_rng(0)
    prompts = [_random_tokens(model, generator, length) for length in _PROMPTS]
    config = GenerationConfig(gen_length=32, block_length=8, steps=32, stop_at_eos=False)
    exact, exact_ms = _timed_generation(Runtime(engine), prompts, config)
    plain_config = GenerationConfig(
        gen_length=32, block_length=8, steps=32, stop_at_eos=False, cache="none"
    )
    plain, plain_ms = _timed_generation(Runtime(reference), prompts, plain_config)
    pairs = [
        (a, b)
        for left, right in zip(exact, plain, strict=True)
        for a, b in zip(left.tokens, right.tokens, strict=True)
    ]
    equal = sum(a == b for a, b in pairs) / len(pairs)
    # One near tie changes everything after it, so whole rows count, not single tokens.
    whole = sum(left.tokens == right.tokens for left, right in zip(exact, plain, strict=True))
    figures = {
        "equal_tokens": equal,
        "equal_rows": whole,
        "rows": len(prompts),
        "exact_ms_per_step": exact_ms,
        "reference_ms_per_step": plain_ms,
    }
    return Check("generations with exact caches against none", whole == len(prompts), figures)


def _timed_generation(
    runtime: Runtime, prompts: list[list[int]], config: GenerationConfig
) -> tuple[list[GenerationResult], float]:
    runtime.generate(prompts, config)
    started = time.perf_counter()
    results = runtime.generate(prompts, config)
    seconds = time.perf_counter() - started
    if not isinstance(results, list):
        raise InvalidRequestError("a batch gave a single result", got=type(results).__name__)
    return results, seconds * 1e3 / max(result.forwards for result in results)
