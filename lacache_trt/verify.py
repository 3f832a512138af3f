"""Is a built engine right? The acceptance test that a user runs on the machine that will serve.

1. Every file is what the manifest says (`load_manifest`), the contract is what the engine has.
2. `reuse` run twice on the same caches gives the same bits.
3. `fill` and `reuse` against the plain graph: no confidence of either is NaN or infinite; per
   output the largest difference, in units of the largest value and in float32 ulps of it. The plain
   graph is the engine's own or, with a bundle, that of an ONNX Runtime engine built from it.
4. Where the engine has them, `reuse_kv` against `reuse`, and a window of unchanged tokens against
   it (`verify_window`).
5. Whole generations, exact caches against none, from random prompts and, where the engine has a
   tokenizer, from real ones (`verify_generation`).
A differing token is excused, and counted, where the reference's best two probabilities are closer
than the bound; more than 0.1% of them fails.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from lacache_trt.artifacts import Manifest, load_manifest
from lacache_trt.decoding import rows
from lacache_trt.engines.base import Canvas, Engine, Int, Sampling, StepOutputs
from lacache_trt.engines.builder import DERIVED, build_engine, load_engine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.errors import ArtifactError, InvalidRequestError, OutputError
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.config import Granularity, ModelConfig
from lacache_trt.model.fp8 import fp8_granularity
from lacache_trt.progress import Progress, SilentProgress
from lacache_trt.text import TextCodec
from lacache_trt.verify_generation import (
    generations_agree,
    greedy,
    settings_for,
)
from lacache_trt.verify_report import EXCUSED_FRACTION, Check, VerifyReport, largest_difference
from lacache_trt.verify_sizes import Sizes
from lacache_trt.verify_window import window_checks

Batch = tuple[Canvas, Int, Sampling]

# max|a - b| / max|b| of every output, by the engine's dtype.
BOUNDS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
# Where linears are FP8: an ulp before a quantiser can become a step of E4M3 behind it.
FP8_BOUNDS: dict[Granularity, float] = {"per-group": 1e-1, "per-channel": 2e-1}
_ULP = float(np.finfo(np.float32).eps)
_PROMPTS = (5, 12, 31)
_BLOCK_OF_ROW = (0, 1, 3)
_QUESTIONS = (
    "What is 12 + 30?",
    "Why is the sky blue? Answer in one sentence.",
    "A baker has 24 rolls and sells 15 of them. How many are left?",
)
_OUTPUTS = ("confidence", "margin", "neg_entropy")


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
        InvalidRequestError: the engine has no plain graph and no bundle is given, or the bundle is
            not the engine's.
        OutputError: the report cannot be written.
    """
    progress = progress or SilentProgress()
    if report is not None:
        _check_folder(report)
    manifest = load_manifest(Path(directory), "engine", progress=progress)
    dtype = _checked_dtype(manifest)
    fp8 = FP8_BOUNDS[fp8_granularity(manifest.body)] if "fp8" in manifest.body else 0.0
    bound = max(BOUNDS[dtype], fp8)
    with load_engine(manifest) as engine, ExitStack() as stack:
        reference, name = engine, "its own plain graph"
        if bundle is not None:
            _check_recipe(manifest, Path(bundle))
            reference = stack.enter_context(_reference_engine(bundle, progress))
            name = "ONNX Runtime on the bundle's plain graph"
        elif "none" not in engine.capabilities.caches:
            raise InvalidRequestError(
                f"the {engine.name} engine has no plain graph to compare with",
                fix="add --bundle BUNDLE",
            )
        checks = _all_checks(manifest, engine, reference, bound, progress)
        result = VerifyReport(engine.name, engine.device, dtype, name, bound, checks)
    if report is not None:
        text = json.dumps(result.to_json(), indent=1) + "\n"
        report.write_text(result.to_markdown() if report.suffix == ".md" else text)
    return result


def _check_folder(report: Path) -> None:
    if not report.parent.is_dir():
        raise OutputError(
            "the report has no folder to be written to",
            got=str(report),
            expected="a file in a folder that exists",
            fix=f"create {report.parent} first",
        )


def _checked_dtype(manifest: Manifest) -> str:
    dtype = manifest.body.get("dtype")
    if isinstance(dtype, str) and dtype in BOUNDS:
        return dtype
    raise ArtifactError(
        "the engine's manifest names no dtype that can be checked",
        got=repr(dtype),
        expected=", ".join(BOUNDS),
        fix="build the engine again",
    )


def _all_checks(
    manifest: Manifest, engine: Engine, reference: Engine, bound: float, progress: Progress
) -> tuple[Check, ...]:
    sizes = Sizes.of(manifest)
    progress.start("verify", total=4)
    batches = [random_batch(engine.config, sizes, width) for width in sizes.widths]
    checks = [_repeatable(engine, batches)]
    progress.advance()
    checks += _outputs_agree(engine, reference, batches, bound)
    progress.advance()
    checks += window_checks(engine, batches, bound, sizes.window)
    progress.advance()
    codec = TextCodec.load(manifest.directory)
    checks += _generations(engine, reference, codec, sizes, bound)
    progress.advance()
    return tuple(checks)


def _check_recipe(manifest: Manifest, bundle: Path) -> None:
    """Raise `InvalidRequestError` if the bundle is of another model or quantised in another way."""
    own, other = manifest.body.get("fp8"), load_manifest(bundle, "bundle", hashes="sizes")
    if replace(manifest.model, dtype=other.model.dtype) != other.model:
        raise InvalidRequestError(
            "the bundle is of another model than the engine",
            got=str(bundle),
            expected="the bundle that the engine was built from",
            fix="name that bundle",
        )
    if own != other.body.get("fp8"):
        kept = manifest.directory / DERIVED
        raise InvalidRequestError(
            "the bundle is not quantised as the engine is",
            got=f"{'an FP8' if own else 'an unquantised'} engine, and {bundle}",
            expected="the bundle that the engine was built from",
            fix=f"--bundle {kept}" if kept.is_dir() else "name that bundle",
        )


@contextmanager
def _reference_engine(bundle: Path, progress: Progress) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="lacache-trt-verify-") as temporary:
        out = Path(temporary) / "reference"
        build_engine(bundle, out, BuildOptions(engine="onnxruntime"), progress)
        with load_engine(load_manifest(out, "engine", hashes="sizes")) as engine:
            yield engine


def random_batch(model: ModelConfig, sizes: Sizes, width: int) -> Batch:
    """Rows of different lengths, at different blocks, partly decoded."""
    generator = np.random.default_rng(width)
    gen_length = width * sizes.blocks(width)
    prompts = _random_prompts(model, generator, sizes, width)
    canvas = rows.pad_left(prompts, gen_length, model)
    config = GenerationConfig(gen_length=gen_length, block_length=width, steps=gen_length)
    wanted = islice(cycle(_BLOCK_OF_ROW), sizes.rows)
    blocks = np.minimum(np.fromiter(wanted, np.int32), sizes.blocks(width) - 1)
    columns = rows.columns_of_blocks(blocks, canvas.tokens.shape[1], config)
    for row, block in enumerate(blocks):
        done = slice(canvas.tokens.shape[1] - gen_length, columns[row, 0] + width // 2)
        count = width * int(block) + width // 2
        canvas.tokens[row, done] = _random_tokens(model, generator, count)
    return canvas, columns, greedy(model, sizes.rows)


def _random_prompts(
    model: ModelConfig, generator: np.random.Generator, sizes: Sizes, width: int
) -> list[tuple[int, ...]]:
    lengths = [sizes.prompt_length(each, width) for each in islice(cycle(_PROMPTS), sizes.rows)]
    return [tuple(_random_tokens(model, generator, length)) for length in lengths]


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


def _repeatable(engine: Engine, batches: Sequence[Batch]) -> Check:
    differing = 0
    for canvas, columns, sampling in batches:
        first = _reuse(engine, canvas, columns, sampling)
        second = _reuse(engine, canvas, columns, sampling)
        for name in ("token", *_OUTPUTS):
            left, right = getattr(first, name), getattr(second, name)
            differing += int((left.view(np.int32) != right.view(np.int32)).sum())
    return Check("reuse is bitwise repeatable", differing == 0, {"differing": differing})


def _outputs_agree(
    engine: Engine, reference: Engine, batches: Sequence[Batch], bound: float
) -> list[Check]:
    worst = dict.fromkeys(_OUTPUTS, 0.0)
    differing = excused = total = 0
    broken = {"reuse": 0.0, "plain": 0.0}
    for canvas, columns, sampling in batches:
        got = _reuse(engine, canvas, columns, sampling)
        session = reference.session()
        expected = session.plain(canvas, columns, sampling)
        session.close()
        same = got.token == expected.token
        for name in _OUTPUTS:
            figure = largest_difference(getattr(got, name), getattr(expected, name), same)
            worst[name] = float(np.maximum(worst[name], figure))
        near = expected.margin <= bound
        total += same.size
        differing += int((~same & ~near).sum())
        excused += int((~same & near).sum())
        broken["reuse"] += float((~np.isfinite(got.confidence)).sum())
        broken["plain"] += float((~np.isfinite(expected.confidence)).sum())
    finite = {"predictions": float(total), **broken}
    checks = [Check("no NaN or infinite logits", not any(broken.values()), finite)]
    checks += [
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


def _generations(
    engine: Engine, reference: Engine, codec: TextCodec | None, sizes: Sizes, bound: float
) -> list[Check]:
    """From random prompts and, with a tokenizer, from real ones that fit."""
    width = 8 if 8 in sizes.widths else sizes.widths[0]
    config = settings_for(width, sizes.blocks(width))
    prompts = _random_prompts(engine.config, np.random.default_rng(0), sizes, width)
    batches = {"random": prompts}
    longest = sizes.columns - config.gen_length
    real = [each for each in _real_prompts(codec) if len(each) <= longest]
    if real:
        batches["real"] = list(islice(cycle(real), sizes.rows))
    return [
        generations_agree(
            f"generations from {kind} prompts, exact caches against none",
            engine,
            reference,
            batch,
            config,
            bound,
        )
        for kind, batch in batches.items()
    ]


def _real_prompts(codec: TextCodec | None) -> list[tuple[int, ...]]:
    if codec is None:
        return []
    templated = codec.has_chat_template
    asked = [codec.apply_chat_template(each) if templated else each for each in _QUESTIONS]
    return [tuple(codec.encode(question)) for question in asked]
