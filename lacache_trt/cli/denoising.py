"""One problem of the demo: its question, its answer being denoised, and the verdict."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.text import Text

from lacache_trt.cli.canvas import CanvasView, Decoder
from lacache_trt.cli.output import console
from lacache_trt.cli.streaming import show_live
from lacache_trt.demo.problems import Problem, is_correct
from lacache_trt.generation import GenerationConfig, StepEvent
from lacache_trt.runtime import Runtime

FRAMES = 6


def show_answer(runtime: Runtime, problem: Problem, settings: GenerationConfig) -> None:
    """Animated on a terminal; otherwise some frames one below the other."""
    out = console()
    out.print()
    out.print(Text(problem.question, style="bold"))
    view = CanvasView(Decoder.from_runtime(runtime), settings)
    events = runtime.stream(problem.question, settings, raw=True)
    text = show_live(events, view) if sys.stdout.isatty() else _print_frames(events, view)
    right = is_correct(problem, text or "")
    verdict = Text("  ✓ " if right else "  ✗ ", style="green" if right else "red")
    verdict.append(f"expected {problem.answer}", style="dim")
    out.print(verdict)


def _print_frames(events: Iterable[StepEvent], view: CanvasView) -> str | None:
    text = None
    every = max(1, view.config.steps // FRAMES)
    for event in events:
        view.apply(event)
        text = event.text
        if view.forwards % every == 1 or every == 1:
            print(f"  {view.forwards:3d}  {view.line()}")
    view.finish()
    print(f"  {view.forwards:3d}  {view.line()}")
    return text
