"""Where TensorRT's builder spends its time, from its verbose messages.

    build_log.py FILE

`record` writes every message with its time to a file that outlives a killed process and says on
stdout every few seconds how far the builder is. `summary` shares the time between two messages out
to the runner that was being timed (`Timing Runner: NAME (KIND)`), else to the kind of message.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

LOGGER = "lacache_trt.tensorrt"
PROGRESS_SECONDS, GAP_SECONDS, NAME_CHARACTERS = 10.0, 2.0, 110
_RUNNER = re.compile(r"Timing Runner: (.*) \((\w+)\)")
_END = ("Computing costs for", "Autotuning format", "Computing reformatting costs")
_TACTIC = "Tactic: "


class _File(logging.Handler):
    """Milliseconds since the start and the message, a line each."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.DEBUG)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 (as long as the process)
        self._start = self._said = time.monotonic()
        self._lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        text = record.getMessage().replace("\n", " | ")
        self._file.write(f"{1000 * (now - self._start):.0f} {text}\n")
        self._lines += 1
        if now - self._said > PROGRESS_SECONDS:
            self._said = now
            shown = text[:NAME_CHARACTERS]
            print(f"   {now - self._start:.0f} s, message {self._lines}: {shown}", flush=True)


def record(path: Path) -> None:
    """Write TensorRT's messages of every level to `path`."""
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.DEBUG)
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.WARNING)
    logger.addHandler(_File(path))


def _messages(path: Path) -> Iterator[tuple[float, str]]:
    for line in path.read_text(errors="replace").splitlines():
        stamp, _, text = line.partition(" ")
        if stamp.isdigit():
            yield int(stamp) / 1000, text


def summary(path: Path, shown: int = 18) -> str:
    """The runners, kinds of runner and single waits that took longest."""
    runners: dict[str, float] = defaultdict(float)
    kinds: dict[str, float] = defaultdict(float)
    tactics: dict[str, int] = defaultdict(int)
    gaps: list[tuple[float, float, str]] = []
    current, kind = "", ""
    messages = list(_messages(path))
    for (at, text), (after, _) in zip(messages, messages[1:] + messages[-1:], strict=True):
        found = _RUNNER.search(text)
        if found:
            current, kind = found.group(1), found.group(2)
        elif any(end in text for end in _END):
            current = kind = ""
        waited = after - at
        label = f"{kind}: {current}" if current else f"({' '.join(text.split()[:4])})"
        runners[label[:NAME_CHARACTERS]] += waited
        kinds[kind or "no runner"] += waited
        tactics[kind or "no runner"] += text.startswith(_TACTIC)
        if waited > GAP_SECONDS:
            gaps.append((waited, at, text[:NAME_CHARACTERS]))
    lines = [f"{len(messages)} messages in {messages[-1][0]:.0f} s"] if messages else ["nothing"]
    lines += [f"{s:8.1f} s {tactics[k]:6} tactics  {k}" for k, s in _largest(kinds, shown)]
    lines += ["by runner:", *(f"{s:8.1f} s  {name}" for name, s in _largest(runners, shown))]
    lines += ["single waits:", *(f"{w:8.1f} s at {at:.0f}: {t}" for w, at, t in sorted(gaps)[::-1])]
    lines += ["last:", *(f"{at:8.1f} {text[:300]}" for at, text in messages[-4:])]
    return "\n".join(lines)


def _largest(seconds: dict[str, float], count: int) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])[:count]


if __name__ == "__main__":
    print(summary(Path(sys.argv[1])))
