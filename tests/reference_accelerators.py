"""Plain loops for the accelerators: one unpadded row, everything recomputed, rules read off the
papers and repositories. Shares no code with the toolkit.

Fast-dLLM's caches are played by `StaleModel`: which rows may be fresh is decided here, by hand.
A step's decisions record how close they were to another outcome (`Trace.closest`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from reference_decoding import Decision, Ids, Trace, noise, noise_bits
from stale_model import Kept, StaleModel

Probabilities = NDArray[np.float64]
SUFFIX_ID = 2**30 + 2**20


@dataclass(frozen=True)
class Options:
    """The settings of a request, named as in `GenerationConfig`."""

    gen_length: int
    block_length: int
    steps: int
    policy: str = "schedule"
    cache: str = "none"
    temperature: float = 0.0
    seed: int = 0
    threshold: float = 0.9
    factor: float = 1.0
    kl_threshold: float = 0.01
    kl_history: int = 2
    neighbour_threshold: float = 0.75
    neighbour_radius: int = 4
    answer_start: int | None = None
    refresh_every: int | None = None
    commit_first: bool = False
    suffix: str = "full"
    suffix_window: int = 256
    suffix_sigma: float = 4.0
    suffix_scale: float = 2.0
    suffix_seed: int = 0
    stop_at_eos: bool = True
    stop_in_block: bool = False
    eos_truncation: float | None = None
    eos_guard: int = 0
    no_empty_answer: bool = False


@dataclass
class Prediction:
    """One column: its token, the float32 probability of it, and the whole distribution."""

    token: int
    confidence: float
    p: Probabilities
    logits: Probabilities


class Loop:
    """One generation."""

    def __init__(self, model: StaleModel, prompt: list[int], options: Options, ids: Ids) -> None:
        self.model, self.o, self.ids = model, options, ids
        self.start = len(prompt)
        self.x = prompt + [ids.mask] * options.gen_length
        self.blocks = options.gen_length // options.block_length
        self.trace = Trace()
        self.kept = Kept()
        self.visible: list[int] = []
        self.previous: dict[int, Probabilities] = {}
        self.moves: dict[int, list[float]] = {}

    def run(self) -> Trace:
        """Decode to the end."""
        block = 0
        while block < self.blocks and not self._block(block):
            block += 1
        end = self.ids.ends[0]
        generated = self.x[self.start :]
        self.trace.tokens = [end if token == self.ids.mask else token for token in generated]
        return self.trace

    def _block(self, block: int) -> bool:
        """Decode one block; whether the answer has ended with it."""
        first = self.start + block * self.o.block_length
        columns = range(first, first + self.o.block_length)
        self.previous, self.moves = {}, {}
        step = 0
        while any(self.x[column] == self.ids.mask for column in columns):
            masked = [column for column in columns if self.x[column] == self.ids.mask]
            found = self._forward(columns, step)
            if self.o.eos_truncation is not None and step == 0:
                self._cut(found, first)
            if self.o.policy == "prophet" and self._is_clear(found):
                # The toolkit reads the rest in one more forward of the same canvas.
                self.trace.forwards += 1
                self._commit({})
                left = [column for column, token in enumerate(self.x) if token == self.ids.mask]
                self._commit({column: found[column].token for column in left})
                return True
            if self.o.commit_first and step == 0:
                self._klass_ready(found, masked, columns, step)  # the history still grows
                self._commit({first: found[first].token})
            else:
                chosen = self._choose(found, masked, columns, step)
                self._commit({column: found[column].token for column in chosen})
            step += 1
            if self.o.stop_in_block and self._has_ended(columns):
                return True
        return self.o.stop_at_eos and any(self.x[c] in self.ids.ends for c in columns)

    def _has_ended(self, columns: range) -> bool:
        for column in columns:
            if self.x[column] == self.ids.mask:
                return False
            if self.x[column] in self.ids.ends:
                return True
        return False

    def _forward(self, columns: range, step: int) -> dict[int, Prediction]:
        """Predictions of the columns that are run and visible."""
        cached, every = self.o.cache in ("prefix", "dual"), self.o.refresh_every
        if not cached or step == 0 or (every is not None and step % every == 0):
            self.visible, self.kept = self._visible(columns), Kept()
            fresh = set(self.visible)
        else:
            last = columns.stop if self.o.cache == "dual" else len(self.x)
            fresh = {column for column in self.visible if columns.start <= column < last}
        tokens = [self.x[column] for column in self.visible]
        marks = [column in fresh for column in self.visible]
        logits = self.model.forward(tokens, self.visible, self.kept, marks)
        self.trace.forwards += 1
        found = {}
        for row, column in enumerate(self.visible):
            source = max(row - 1, 0) if self.model.reference.shift else row
            if column in fresh and marks[source]:
                found[column] = self._predict(logits[source], column)
        return found

    def _visible(self, columns: range) -> list[int]:
        end = self.start + self.blocks * self.o.block_length
        kept = list(range(columns.stop))
        block = (columns.start - self.start) // self.o.block_length
        for distance, column in enumerate(range(columns.stop, end)):
            if self.o.suffix == "full" or self._survives(block, distance):
                kept.append(column)
        return kept

    def _survives(self, block: int, distance: int) -> bool:
        if distance >= self.o.suffix_window:
            return False
        spacing = self.o.suffix_window - 1
        z = self.o.suffix_sigma * distance / spacing if spacing else 0.0
        p = self.o.suffix_scale * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        draw = noise_bits(self.o.suffix_seed, block, 0, distance + SUFFIX_ID) + 0.5
        return draw / 2**23 < p

    def _predict(self, logits: Probabilities, column: int) -> Prediction:
        x = logits.copy()
        x[[self.ids.mask, *self.ids.suppressed]] = -math.inf
        if self.o.no_empty_answer and column == self.start:
            x[list(self.ids.ends)] = -math.inf
        noisy = x.copy()
        if self.o.temperature > 0:
            for token in range(len(x)):
                value = noise(self.o.seed, self.trace.forwards - 1, column, token)
                noisy[token] += self.o.temperature * value
        p = np.exp(x - x.max())
        p /= p.sum()
        best = np.sort(noisy)
        self._decide("token", best[-1] - best[-2])
        token = int(noisy.argmax())
        return Prediction(token, float(np.float32(p[token])), p, x)

    def _cut(self, found: dict[int, Prediction], first: int) -> None:
        for column in sorted(found):
            generated = column - self.start
            if column < first or generated < self.o.eos_guard:
                continue
            if found[column].token in self.ids.ends:
                limit = self.o.eos_truncation or 0.0
                self._decide("rank", abs(found[column].confidence - limit))
                if found[column].confidence >= limit:
                    self.blocks = min(self.blocks, generated // self.o.block_length + 1)
                    return

    def _choose(
        self, found: dict[int, Prediction], masked: list[int], columns: range, step: int
    ) -> list[int]:
        confidence = {column: found[column].confidence for column in masked}
        ranked = sorted(masked, key=lambda column: (-confidence[column], column))
        per_block = self.o.steps // (self.o.gen_length // self.o.block_length)
        count = self.o.block_length // per_block + (step < self.o.block_length % per_block)
        if step >= per_block - 1:
            count = len(masked)
        if self.o.policy in ("schedule", "prophet"):
            return self._top(ranked, count, confidence)
        if self.o.policy == "threshold":
            for column in ranked[1:]:
                self._decide("rank", abs(confidence[column] - self.o.threshold))
            sure = [column for column in ranked if confidence[column] >= self.o.threshold]
            return sure or self._top(ranked, 1, confidence)
        if self.o.policy == "factor":
            return self._top(ranked, self._factor_count(ranked, confidence), confidence)
        if self.o.policy == "local_leap":
            return self._leap(ranked, confidence)
        ready = self._klass_ready(found, masked, columns, step)
        if ready and step < per_block - 1:
            return ready
        return self._top(ranked, count, confidence)

    def _factor_count(self, ranked: list[int], confidence: dict[int, float]) -> int:
        size = len(ranked)
        stop = 0
        for place in range(size):
            limit = -1.0 if place == 0 else 1 - self.o.factor / (place + 2)
            if place:
                self._decide("rank", abs(confidence[ranked[place]] - limit))
            stop = place
            if confidence[ranked[place]] < limit:
                break
        if stop in (0, size - 1):
            stop += 1
        return stop

    def _leap(self, ranked: list[int], confidence: dict[int, float]) -> list[int]:
        anchors = [column for column in ranked if confidence[column] >= self.o.threshold]
        chosen = {ranked[0]}
        for column in ranked:
            near = any(abs(column - anchor) <= self.o.neighbour_radius for anchor in anchors)
            limit = self.o.neighbour_threshold if near else self.o.threshold
            self._decide("rank", abs(confidence[column] - limit))
            if confidence[column] >= limit:
                chosen.add(column)
        self._top(ranked, 1, confidence)
        return sorted(chosen)

    def _klass_ready(
        self, found: dict[int, Prediction], masked: list[int], columns: range, step: int
    ) -> list[int]:
        if self.o.policy != "klass":
            return []
        ready = []
        for column in columns:
            if column not in found:
                continue
            p = found[column].p
            q = self.previous.get(column, np.zeros_like(p))
            moved = float((p * (np.log(p + 1e-12) - np.log(q + 1e-12))).sum())
            self.previous[column] = p
            history = self.moves.setdefault(column, [0.0] * self.o.kl_history)
            history.append(moved)
            del history[0]
            if column not in masked or step < self.o.kl_history - 1:
                continue
            confidence = found[column].confidence
            self._decide("rank", abs(confidence - self.o.threshold))
            self._decide("rank", min(abs(move - self.o.kl_threshold) for move in history))
            if max(history) < self.o.kl_threshold and confidence > self.o.threshold:
                ready.append(column)
        return ready

    def _is_clear(self, found: dict[int, Prediction]) -> bool:
        first = self.start + (self.o.answer_start or 0)
        columns = range(first, min(first + 5, len(self.x)))
        gaps = []
        for column in columns:
            second, best = np.sort(found[column].logits)[-2:]
            gaps.append(best - second)
        gap = sum(gaps) / len(gaps)
        progress = self.trace.forwards / self.o.steps
        limit = 7.5 if progress < 0.33 else 5.0 if progress < 0.67 else 2.5
        self._decide("rank", abs(gap - limit))
        return bool(gap >= limit)

    def _commit(self, tokens: dict[int, int]) -> None:
        for column, token in tokens.items():
            self.x[column] = token
        self.trace.committed.append({c - self.start: t for c, t in sorted(tokens.items())})

    def _top(self, ranked: list[int], count: int, confidence: dict[int, float]) -> list[int]:
        if 0 < count < len(ranked):
            gap = confidence[ranked[count - 1]] - confidence[ranked[count]]
            self._decide("rank", gap)
        return ranked[:count]

    def _decide(self, kind: str, gap: float) -> None:
        step = self.trace.forwards - 1
        self.trace.decisions.append(Decision(kind, step, float(gap)))  # type: ignore[arg-type]


def decode(model: StaleModel, prompt: list[int], options: Options, ids: Ids) -> Trace:
    """Generate for one prompt."""
    return Loop(model, prompt, options, ids).run()
