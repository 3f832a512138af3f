"""`lacache-trt generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lacache_trt.cli.command import verb
from lacache_trt.cli.output import Output
from lacache_trt.generation import GenerationConfig, GenerationResult

BATCH_SIZE = 8
PROMPT_HELP = "The prompt; '-' or nothing reads one a line from stdin, empty lines left out."
TOKENS_HELP = "Prompts are token ids, separated by spaces or commas."
JSONL_HELP = 'Each line of stdin is JSON: a string, token ids, or {"prompt": ...}.'


@verb
def generate(
    output: Output,
    engines: Annotated[Path, typer.Argument(metavar="ENGINES", help="Engine directory.")],
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help=PROMPT_HELP)] = None,
    *,
    config: GenerationConfig,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help=TOKENS_HELP)] = False,
    jsonl: Annotated[bool, typer.Option("--jsonl", help=JSONL_HELP)] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Show every step; with --json, one event a line.")
    ] = False,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, max=4096, help="Prompts decoded together.")
    ] = BATCH_SIZE,
) -> None:
    """Generate text with a built engine.

    Several prompts on stdin are decoded in batches and answered in order, one line an answer;
    with --json every answer has its tokens, its text, its forwards and its timings. With --stream
    and --json, stdout is JSON lines: one event a step, then the same answer under "result".
    """
    from lacache_trt.cli.prompts import read_prompts
    from lacache_trt.cli.streaming import stream_answer

    prompts = read_prompts(prompt, tokens=tokens, jsonl=jsonl)
    if stream:
        stream_answer(output, engines, prompts, config, raw)
        return
    _answer(output, engines, prompts, config, raw, batch_size)


def _answer(
    output: Output,
    engines: Path,
    prompts: list[str | list[int]],
    config: GenerationConfig,
    raw: bool,
    batch_size: int,
) -> None:
    from dataclasses import asdict, replace

    from lacache_trt.cli.streaming import note_empty, shown
    from lacache_trt.runtime import Runtime

    seeds = config.row_seeds(len(prompts))
    results: list[GenerationResult] = []
    with output.progress(lines=False) as progress, Runtime.load(engines) as runtime:
        runtime.check_prompts(prompts, config, raw=raw)  # before hours of work are lost to one
        progress.start("generating", len(prompts))
        for first in range(0, len(prompts), batch_size):
            rows = prompts[first : first + batch_size]
            settings = replace(config, seed=seeds[first : first + batch_size])
            answers = runtime.generate(rows, settings, raw=raw)
            results += answers if isinstance(answers, list) else [answers]
            progress.advance(len(rows))

    def render() -> None:
        for result in results:
            print(shown(result.text, result.tokens))

    output.result({"results": [asdict(result) for result in results]}, render)
    note_empty(output, [result.text for result in results], config)
