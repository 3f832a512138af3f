"""The generated part of a row while it is being denoised: masks turning into text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.text import Text

from lacache_trt.generation import GenerationConfig, StepEvent

if TYPE_CHECKING:
    from lacache_trt.runtime import Runtime
    from lacache_trt.text import TextCodec

MASK_GLYPH = "░░"
END_GLYPH = "·"
_RUN = re.compile(rf"({MASK_GLYPH}|{END_GLYPH})(?: \1)+")
_NEW, _OLD, _MASK = "bold green", "default", "cyan dim"


@dataclass(frozen=True)
class Decoder:
    """Turns token ids into text; without a tokenizer the ids themselves are shown."""

    codec: TextCodec | None
    mask_id: int
    eos_ids: frozenset[int]

    @classmethod
    def from_runtime(cls, runtime: Runtime) -> Decoder:
        """The decoder of a loaded engine."""
        model = runtime.engine.config
        return cls(runtime.codec, model.mask_id, frozenset(model.eos_ids))

    def text(self, tokens: list[int]) -> str:
        """The tokens in context, special ones included."""
        if self.codec is None:
            return " ".join(map(str, tokens))
        return self.codec.decode(tokens, skip_special=False)


@dataclass
class CanvasView:
    """What has been committed so far, and how to show it."""

    decoder: Decoder
    config: GenerationConfig
    forwards: int = 0
    block: int = 0
    slots: list[int | None] = field(default_factory=list)
    fresh: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.slots = [None] * self.config.gen_length

    def apply(self, event: StepEvent) -> None:
        """Write what one step committed."""
        for column, token in zip(event.columns, event.tokens, strict=True):
            self.slots[column] = token
        self.forwards += 1
        self.block = event.block
        self.fresh = frozenset(event.columns)

    def finish(self) -> None:
        """What an early stop has left masked becomes the end token."""
        end = min(self.decoder.eos_ids, default=None)
        self.slots = [end if slot is None else slot for slot in self.slots]
        self.fresh = frozenset()

    def status(self) -> str:
        """Progress in words."""
        done = sum(slot is not None for slot in self.slots)
        return (
            f"block {self.block + 1}/{self.config.num_blocks}  step {self.forwards}"
            f"  {done}/{self.config.gen_length} tokens"
        )

    def render(self) -> Text:
        """The canvas as text: green what is new, shaded what is still masked."""
        ids = [self.decoder.mask_id if slot is None else slot for slot in self.slots]
        whole, text, cursor = self.decoder.text(ids), Text(), 0
        for column, token in enumerate(ids):
            piece = self.decoder.text([token]).strip()
            start = whole.find(piece, cursor) if piece else -1
            # A piece that is only a part of a character is not found; it stays unstyled.
            if start < 0 or start > cursor + 4:
                continue
            text.append(whole[cursor:start])
            text.append(*self._shown(column, token, piece))
            cursor = start + len(piece)
        text.append(whole[cursor:])
        return text

    def line(self) -> str:
        """The canvas in one plain line; runs of masks and of end tokens are counted."""
        return _RUN.sub(lambda run: f"{run[1][0]}×{len(run[0].split())}", self.render().plain)

    def _shown(self, column: int, token: int, piece: str) -> tuple[str, str]:
        if self.slots[column] is None:
            return MASK_GLYPH, _MASK
        if token in self.decoder.eos_ids:
            return END_GLYPH, "dim"
        return piece, _NEW if column in self.fresh else _OLD
