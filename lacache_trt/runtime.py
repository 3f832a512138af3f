"""Generation: semi-autoregressive decoding across the fill and the reuse graph.

The canvas of a row is its prompt followed by masks. Blocks of the masked part are denoised from
left to right. When a block begins, everything outside it is final until it is complete, so `fill`
computes once what depends on those tokens alone (embeddings, layer 0's q, k, v and its attention
state; deeper layers mix the block into every token). Each denoising step is then one `reuse`: layer
0 computes the block's rows and continues every other row's softmax from its kept state with the
block's keys, the layers above run on all rows, and the head predicts the block. That is the whole
model's result for less than its work. The policy commits some of the positions, which are emitted.
LaCache (arXiv 2607.16339), section 3.

`cache="prefix"` and `"dual"` are Fast-dLLM's approximations (arXiv 2505.22618) on top: the step
that begins a block is a full one that also keeps K and V of all layers, and the others run only a
window of the canvas against them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lacache_trt.artifacts import load_manifest
from lacache_trt.batch import Batch
from lacache_trt.closing import ClosesOnExit
from lacache_trt.deadline import Deadline
from lacache_trt.decoding.policy import Policy
from lacache_trt.decoding.registry import build_policy
from lacache_trt.decoding.rows import Prompt, check_prompt
from lacache_trt.decoding.selection import require_finite
from lacache_trt.engines.base import Engine, Session, StepOutputs
from lacache_trt.engines.builder import load_engine
from lacache_trt.errors import (
    CancelledError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    LaCacheError,
)
from lacache_trt.generation import GenerationConfig, GenerationResult, StepEvent
from lacache_trt.requests import (
    Limits,
    PromptLike,
    as_prompts,
    check_arguments,
    check_logits,
    engine_directory,
    one_prompt,
)
from lacache_trt.text import TextCodec

logger = logging.getLogger(__name__)


class Runtime(ClosesOnExit):
    """A loaded engine and its tokenizer. Safe to call from many threads at once."""

    def __init__(
        self,
        engine: Engine,
        codec: TextCodec | None = None,
        *,
        max_batch: int | None = None,
        max_length: int | None = None,
    ) -> None:
        self.engine = engine
        self.codec = codec
        self.limits = Limits(max_batch, max_length)
        self._closed = threading.Event()

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        max_batch: int | None = None,
        max_length: int | None = None,
    ) -> Runtime:
        """Load a directory that `lacache-trt build` wrote; the manifest names the engine.

        Args:
            directory: engine directory.
            max_batch: most prompts of one call; None is the engine's own limit.
            max_length: most columns (prompt and generated part); None is the model's own limit.

        Raises:
            ArtifactError: the directory is incomplete or was changed.
            InvalidRequestError: `directory` is not a path.
            MissingDependencyError: the engine cannot run on this machine.
        """
        manifest = load_manifest(engine_directory(directory), "engine")
        codec = TextCodec.load(manifest.directory)
        runtime = cls(load_engine(manifest), codec, max_batch=max_batch, max_length=max_length)
        logger.info("loaded %s engine on %s", runtime.engine.name, runtime.engine.device)
        return runtime

    def generate(
        self,
        prompt: PromptLike | Sequence[PromptLike],
        config: GenerationConfig | None = None,
        *,
        raw: bool = False,
        cancel: threading.Event | None = None,
    ) -> GenerationResult | list[GenerationResult]:
        """Answer a prompt, or a list of prompts as one batch.

        Args:
            prompt: text, a list of token ids, or a list of either.
            config: how to decode; the defaults if None.
            raw: do not apply the checkpoint's chat template to text.
            cancel: stops the call at the next step when it is set.

        Returns:
            One result, or a list of results for a list of prompts.

        Raises:
            InvalidRequestError: a prompt or a setting is not valid.
            CapacityError: more prompts or columns than the model or the limits allow.
            NumericalError: the model produced NaN or infinite logits.
            CancelledError, DeadlineExceededError: stopped between two steps.
        """
        config = GenerationConfig() if config is None else config
        prompts, single = as_prompts(prompt)
        batch, policy = self._prepare(prompts, config, raw, cancel)
        for _ in self._decode(batch, policy, cancel):
            pass
        results = [batch.result(row, self._text(batch, row)) for row in range(len(prompts))]
        return results[0] if single else results

    def stream(
        self,
        prompt: PromptLike,
        config: GenerationConfig | None = None,
        *,
        raw: bool = False,
        cancel: threading.Event | None = None,
    ) -> Generator[StepEvent, None, GenerationResult]:
        """Answer one prompt step by step: an event per step, with the text so far.

        Closing the iterator stops at the next step and releases the caches. What is wrong with the
        request is raised here; the iterator raises what `generate` raises later. A deadline counts
        from the first event asked for, and the time that the caller takes between two. At its end
        the generator returns what `generate` would (`StopIteration.value`).
        """
        config = GenerationConfig() if config is None else config
        batch, policy = self._prepare(one_prompt(prompt), config, raw, cancel)
        return self._stream(batch, policy, cancel)

    def _stream(
        self, batch: Batch, policy: Policy, cancel: threading.Event | None
    ) -> Generator[StepEvent, None, GenerationResult]:
        for event in self._decode(batch, policy, cancel):
            yield replace(event, text=self._text(batch, event.row))
        return batch.result(0, self._text(batch, 0))

    def close(self) -> None:
        """Release the engine. Calls in flight stop at their next step with `CancelledError`."""
        if not self._closed.is_set():
            self._closed.set()
            self.engine.close()

    def _decode(
        self, batch: Batch, policy: Policy, cancel: threading.Event | None
    ) -> Iterator[StepEvent]:
        """The loop: new block → fill; while masks remain → reuse; the policy commits; emit.

        `batch.advance` notes where a row begins a block, `batch.leaving` whom the policy ends.
        """
        deadline = Deadline(batch.config.deadline_s)
        session = self.engine.session()
        try:
            while batch.active:
                self._stop_if_asked(cancel, deadline)
                try:
                    outputs = self._step(session, batch)
                    require_finite(outputs)
                    events = batch.apply(policy(batch.view(outputs)))
                    if batch.leaving:
                        events += self._last_step(batch)
                except EngineError:
                    self._stop_if_asked(cancel, deadline)  # closed in the middle of the step
                    raise
                batch.advance()
                yield from events
        finally:
            session.close()

    def _step(self, session: Session, batch: Batch) -> StepOutputs:
        """One denoising step: alone, or over the caches, which a fill before it may renew.

        `prefix` and `dual` begin a block with `reuse_kv`, a `reuse` that also keeps K and V of all
        layers, then run windows. `regroup` forms the canvas of the rows still decoding.
        """
        started = filled = time.perf_counter()
        config = batch.config
        if config.cache == "none":
            canvas, block_columns = batch.regroup()
            outputs = session.plain(canvas, block_columns, batch.sampling(), batch.logit_columns())
        elif batch.needs_fill:
            session.fill(*batch.regroup())
            filled = time.perf_counter()
            step = session.reuse_kv if config.has_window else session.reuse
            outputs = step(batch.block_tokens(), batch.sampling(), batch.logit_columns())
        elif config.has_window:
            outputs = session.window(*batch.window(), batch.sampling(), batch.logit_columns())
        else:
            outputs = session.reuse(batch.block_tokens(), batch.sampling(), batch.logit_columns())
        batch.charge(filled - started, time.perf_counter() - filled)
        return batch.look_ahead(outputs)

    def _last_step(self, batch: Batch) -> list[StepEvent]:
        """One forward that predicts the whole answer of the rows that Prophet ends early."""
        started = filled = time.perf_counter()
        canvas, columns, sampling = batch.whole_answers()
        session = self.engine.session()
        try:
            if batch.config.cache == "none":
                outputs = session.plain(canvas, columns, sampling)
            else:
                session.fill(canvas, columns)
                filled = time.perf_counter()
                tokens = np.take_along_axis(canvas.tokens, columns, axis=1)
                outputs = session.reuse(tokens, sampling)
        finally:
            session.close()
        batch.charge(filled - started, time.perf_counter() - filled)
        require_finite(outputs)
        return batch.fill_in(outputs)

    def _prepare(
        self,
        prompts: Sequence[PromptLike],
        config: GenerationConfig,
        raw: bool,
        cancel: threading.Event | None,
    ) -> tuple[Batch, Policy]:
        if self._closed.is_set():
            raise EngineError("the runtime is closed", fix="load it again with Runtime.load")
        check_arguments(config, raw, cancel, self.engine)
        self.limits.check_batch(len(prompts), self.engine)
        model = self.engine.config
        # Dream predicts a block's first position from a row outside the window.
        forced = config.commit_first or (model.logit_shift and config.has_window)
        policy = build_policy(config, commit_first=forced)
        check_logits(config, policy, self.engine)
        return Batch(self.check_prompts(prompts, config, raw=raw), config, model, policy), policy

    def check_prompts(
        self, prompts: Sequence[PromptLike], config: GenerationConfig, *, raw: bool = False
    ) -> list[Prompt]:
        """The token ids of prompts; an error names the one that is not valid."""
        ids: list[Prompt] = []
        for place, prompt in enumerate(prompts):
            try:
                tokens = check_prompt(
                    self._tokens(prompt, raw), self.engine.config, config.gen_length
                )
                self.limits.check_length(len(tokens) + config.gen_length)
            except LaCacheError as error:
                if len(prompts) > 1:
                    error.what = f"prompt {place + 1} of {len(prompts)}: {error.what}"
                raise
            ids.append(tokens)
        return ids

    def _tokens(self, prompt: PromptLike, raw: bool) -> Prompt | PromptLike:
        if not isinstance(prompt, str):
            return prompt
        if self.codec is None:
            raise InvalidRequestError(
                "a text prompt needs a tokenizer, and this engine directory has none",
                got="text",
                expected="a list of token ids",
                fix="export from a checkpoint with tokenizer files, or pass token ids",
            )
        templated = not raw and self.codec.has_chat_template
        return tuple(
            self.codec.encode(self.codec.apply_chat_template(prompt) if templated else prompt)
        )

    def _text(self, batch: Batch, row: int) -> str | None:
        """Text up to the first end token; masks are left out."""
        return None if self.codec is None else self.codec.decode(batch.answer(row))

    def _stop_if_asked(self, cancel: threading.Event | None, deadline: Deadline) -> None:
        if self._closed.is_set():
            raise CancelledError("the runtime was closed while generating")
        if cancel is not None and cancel.is_set():
            raise CancelledError("generation was cancelled")
        if deadline.passed:
            raise DeadlineExceededError(
                "generation passed its deadline",
                got=f"{deadline.seconds} s",
                fix="raise deadline_s",
            )
