"""Streaming one answer: live on a terminal, a line a step otherwise, JSON lines with `--json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from lacache_trt.cli.canvas import CanvasView, Decoder
from lacache_trt.cli.output import Output, console
from lacache_trt.errors import InvalidRequestError
from lacache_trt.generation import GenerationConfig, GenerationResult, StepEvent


def shown(text: str | None, tokens: Sequence[int]) -> str:
    """An answer for the reader: its text, or its token ids without a tokenizer."""
    return " ".join(map(str, tokens)) if text is None else text


def note_empty(output: Output, texts: Sequence[str | None], config: GenerationConfig) -> None:
    """Say on stderr that an answer is empty, which on stdout looks like a failure."""
    empty = texts.count("")
    if not empty:
        return
    what = (
        "the answer is empty" if len(texts) == 1 else f"{empty} of {len(texts)} answers are empty"
    )
    if not config.no_empty_answer:
        each = "it" if empty == 1 else "them"
        what += f": the model ended {each} at once; --no-empty-answer keeps it from that"
    output.note(what)


def stream_answer(
    output: Output,
    engines: Path,
    prompts: list[str | list[int]],
    config: GenerationConfig,
    raw: bool,
) -> None:
    """Decode one prompt and show every step."""
    from lacache_trt.runtime import Runtime

    if len(prompts) != 1:
        raise InvalidRequestError(
            "--stream shows one answer", got=f"{len(prompts)} prompts", fix="leave --stream out"
        )
    with Runtime.load(engines) as runtime:
        view = CanvasView(Decoder.from_runtime(runtime), config)
        events = runtime.stream(prompts[0], config, raw=raw)
        if output.json:
            text = _print_json_lines(events)
        elif sys.stdout.isatty():
            text = show_live(events, view)
        else:
            text = _print_lines(events, view)
    note_empty(output, [text], config)


def show_live(events: Iterable[StepEvent], view: CanvasView, title: str = "") -> str | None:
    """Redraw the canvas in place until the answer is complete; returns its text."""
    from rich.live import Live
    from rich.panel import Panel

    text = None
    with Live(console=console(), refresh_per_second=30) as live:
        for event in events:
            view.apply(event)
            text = event.text
            live.update(Panel(view.render(), title=title, subtitle=view.status()))
        status = view.status()
        view.finish()
        live.update(Panel(view.render(), title=title, subtitle=status))
    return text


def _print_lines(events: Iterable[StepEvent], view: CanvasView) -> str | None:
    last: StepEvent | None = None
    for event in events:
        view.apply(event)
        print(f"[{view.status()}] {view.line()}", flush=True)
        last = event
    if last is None:
        return None
    print(shown(last.text, _committed(view)))
    return last.text


def _print_json_lines(events: Generator[StepEvent, None, GenerationResult]) -> str | None:
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            result: GenerationResult = end.value
            print(json.dumps({"result": asdict(result)}))
            return result.text
        print(json.dumps({"event": asdict(event)}), flush=True)


def _committed(view: CanvasView) -> list[int]:
    return [slot for slot in view.slots if slot is not None]
