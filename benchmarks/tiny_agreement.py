"""tiny-llada on an engine: exact caches against none, accuracy, and the tokens for a comparison.

    python3 benchmarks/run_from_checkout.py benchmarks/tiny_agreement.py BUNDLE [--against FILE]

The held-out problems are one batch. The tokens go to `tiny_tokens.json` and what was counted to
`tiny_agreement.json`, both under $OUT, or here. FILE holds the tokens of another engine.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from result_file import write_result

from lacache_trt import GenerationConfig, GenerationResult, Runtime
from lacache_trt.demo.problems import is_correct, problem
from lacache_trt.engines.builder import build_engine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.model.fp8 import Fp8Recipe


def answers_by_cache(
    bundle: Path, engine: str, questions: list[str], fp8: Fp8Recipe | None
) -> dict[str, list[GenerationResult]]:
    """Results of one batch with exact caches and without any."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "engine"
        build_engine(bundle, directory, BuildOptions(engine=engine, fp8=fp8))
        with Runtime.load(directory) as runtime:
            for cache in ("exact", "none"):
                config = GenerationConfig(gen_length=64, block_length=32, steps=64, cache=cache)
                results = runtime.generate(questions, config)
                found[cache] = results if isinstance(results, list) else [results]
    return found


def main() -> None:
    """Compare, print, write the tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--engine", default="cuda")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--fp8", action="store_true", help="FP8 FFNs, as build --fp8 makes them")
    parser.add_argument("--fp8-scope", default="ffn", choices=("ffn", "linears", "all"))
    parser.add_argument("--against", type=Path, help="tokens of another engine")
    arguments = parser.parse_args()
    recipe = Fp8Recipe(scope=arguments.fp8_scope) if arguments.fp8 else None
    problems = [problem("held-out", index) for index in range(arguments.problems)]
    questions = [each.question for each in problems]
    found = answers_by_cache(arguments.bundle, arguments.engine, questions, recipe)
    pairs = zip(found["exact"], found["none"], strict=True)
    equal = sum(exact.tokens == none.tokens for exact, none in pairs)
    right = sum(
        is_correct(each, answer.text or "")
        for each, answer in zip(problems, found["exact"], strict=True)
    )
    count, tokens = len(problems), [list(answer.tokens) for answer in found["exact"]]
    print(f"{equal} of {count} generations equal, {right} answers right")
    name = f"tiny.{arguments.engine}.{f'fp8_{arguments.fp8_scope}' if recipe else 'plain'}"
    metrics = {
        f"{name}.exact_equals_none_fraction": equal / count,
        f"{name}.exact_match": right / count,
    }
    details: dict[str, object] = {"problems": count}
    if arguments.against:
        others = json.loads(arguments.against.read_text())
        different = [
            i for i, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1]
        ]
        metrics[f"{name}.equals_other_engine_fraction"] = 1 - len(different) / count
        details["different"] = different
        print(f"{count - len(different)} of {count} generations equal those of {arguments.against}")
    folder = Path(os.environ.get("OUT", "."))
    (folder / "tiny_tokens.json").write_text(json.dumps(tokens))
    write_result("tiny_agreement", arguments.engine, metrics, details, folder)


if __name__ == "__main__":
    main()
