"""An atlas of what the FFNs' linears receive while a model denoises.

At every step the abs max of each input channel of every gate-up and down linear is recorded. The
same inputs, rounded to E4M3 per 1 x 128 group and multiplied with the weight rounded per
128 x 128 block, give the noise that FP8 adds to the linear's output:

    SQNR = 10 log10(sum |x W|^2 / sum |x W - fp8(x) fp8(W)|^2)   over all rows and steps

A layer is suggested for exclusion if one of its linears lies `EXCLUSION_DB` decibels or more below
the median of the linears of that kind: it adds four times the typical noise energy. The rule looks
at the noise that a layer adds, not at what the layers after it make of it; `bench accuracy` says
that for tiny-llada. LaCache (arXiv 2607.16339) leaves out layer 0 and draws such heat maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lacache_trt.accuracy.decode import decode, equal_lengths
from lacache_trt.accuracy.models import (
    FFN,
    Case,
    build_model,
    device_title,
    load_weights,
    pick_device,
)
from lacache_trt.accuracy.prompt_ids import prompt_ids
from lacache_trt.accuracy.schemes import SCHEMES
from lacache_trt.accuracy.settings import ActivationSettings
from lacache_trt.demo.problems import problem
from lacache_trt.demo.shipped import CHECKPOINT
from lacache_trt.errors import InvalidRequestError, NumericalError
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.checkpoint import Checkpoint, resolve_model
from lacache_trt.model.config import ModelConfig
from lacache_trt.model.transformer import Transformer
from lacache_trt.plugins.fp8 import GROUP
from lacache_trt.progress import Progress, SilentProgress
from lacache_trt.text import TOKENIZER_FILE, TextCodec, parse_tokenizer

EXCLUSION_DB = 6.0
OUTLIER_TIMES_MEDIAN = 6.0
RULE = (
    "rule: layers where a linear's output in FP8 (1x128 x 128x128) has a signal-to-noise "
    f"{EXCLUSION_DB:g} dB or more below the median of its kind"
)


@dataclass(frozen=True)
class LinearFacts:
    """What one linear receives.

    Attributes:
        linear: its name.
        largest: largest abs input of all steps.
        median_channel: median over channels of the channel's abs max.
        outlier_ratio: the one divided by the other.
        outlier_channels: channels above 6 times the median.
        sqnr_db: signal to noise of its output in FP8, in decibels; None if no group fits.
    """

    linear: str
    largest: float
    median_channel: float
    outlier_ratio: float
    outlier_channels: int
    sqnr_db: float | None


@dataclass(frozen=True)
class Atlas:
    """The record of a run.

    Attributes:
        model: name of the checkpoint.
        device: where it ran.
        workload: what was decoded.
        steps: (block, step in the block) of every recorded step, in order.
        amax: by linear, float32 [steps, K]: abs max of each input channel at each step.
        linears: a summary of each linear.
        suggested: layers to leave in 16 bits.
        rule: how they were chosen.
    """

    model: str
    device: str
    workload: dict[str, object]
    steps: tuple[tuple[int, int], ...]
    amax: dict[str, NDArray[np.float32]]
    linears: tuple[LinearFacts, ...]
    suggested: tuple[int, ...]
    rule: str = RULE

    def to_json(self) -> dict[str, Any]:
        """Plain types; of the channels only the abs max over all steps."""
        return {
            "model": self.model,
            "device": self.device,
            "workload": self.workload,
            "linears": [vars(row) for row in self.linears],
            "suggested_exclusions": list(self.suggested),
            "rule": self.rule,
            "channel_amax": {
                name: [float(f"{value:.5g}") for value in values.max(axis=0)]
                for name, values in self.amax.items()
            },
        }


class Recorder:
    """Watches the inputs of the FFNs' linears, step by step.

    Rows that are decoded in several batches meet at the same step: the largest value is kept.
    """

    def __init__(self, model: Transformer) -> None:
        self.steps: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.energies: dict[str, Tensor] = {}
        self._now: tuple[int, int] = (0, 0)
        self._weights: dict[str, tuple[Tensor, Tensor]] = {}
        for layer in range(model.config.num_layers):
            for kind in FFN:
                name = f"layers.{layer}.{kind}"
                weight = model.weight(name + ".weight")
                if weight.shape[0] % GROUP == 0:
                    exact = weight.float()
                    reduced = SCHEMES["group"].weights(exact.T.contiguous()).T.contiguous()
                    self._weights[name] = (exact, reduced)

    def begin(self, block: int, step: int) -> None:
        """A forward of this step follows."""
        self._now = (block, step)

    def watch(self, name: str, x: Tensor) -> None:
        """The input x [B, N, K] of a linear."""
        if not name.endswith(FFN):
            return
        wide = x.float()
        found = wide.abs().flatten(0, -2).amax(dim=0)
        known = self.steps.setdefault(self._now, {})
        known[name] = torch.maximum(known[name], found) if name in known else found
        if name in self._weights:
            exact, reduced = self._weights[name]
            product = wide @ exact
            noise = SCHEMES["group"].activations(wide, found) @ reduced - product
            energy = torch.stack([part.double().square().sum() for part in (product, noise)])
            self.energies[name] = self.energies.get(name, torch.zeros_like(energy)) + energy


def record(
    settings: ActivationSettings | None = None,
    model: str | None = None,
    prompts: Sequence[str | list[int]] | None = None,
    progress: Progress | None = None,
) -> Atlas:
    """Decode prompts greedily in bf16 and record what the FFNs receive.

    Args:
        settings: how much to decode.
        model: checkpoint directory or hub id; tiny-llada if None.
        prompts: text or token ids; problems of the tune split if None, for tiny-llada only.
        progress: counts prompts.

    Raises:
        NumericalError: an activation is NaN or infinite; says where.
    """
    settings, progress = settings or ActivationSettings(), progress or SilentProgress()
    device = pick_device(settings.device)
    source = Checkpoint.open(CHECKPOINT if model is None else resolve_model(model))
    generation = GenerationConfig(
        gen_length=settings.gen_length,
        block_length=settings.block_length,
        steps=settings.steps,
        stop_at_eos=False,
    )
    ids = _token_ids(source, settings, model, prompts, generation)
    weights = load_weights(source, device)
    transformer, ops = build_model(source.config, weights, Case("bf16"), {})
    recorder = Recorder(transformer)
    ops.on_input = recorder.watch
    progress.start("recording activations", len(ids))
    for members in equal_lengths([len(prompt) for prompt in ids], settings.batch_rows):
        batch = [ids[index] for index in members]
        with torch.inference_mode():
            decode(transformer, batch, generation, device, recorder.begin)
        progress.advance(len(members))
    return _atlas(source, device_title(device), recorder, settings, len(ids))


def _token_ids(
    source: Checkpoint,
    settings: ActivationSettings,
    model: str | None,
    prompts: Sequence[str | list[int]] | None,
    generation: GenerationConfig,
) -> list[tuple[int, ...]]:
    if prompts is None and model is not None:
        raise InvalidRequestError(
            "no prompts for this model",
            got=f"model {model}",
            expected="prompts that are like its use",
            fix="add --calibration FILE.jsonl",
        )
    if prompts is None:
        prompts = [problem("tune", index).question for index in range(settings.problems)]
    tokenizer = cache(lambda: _tokenizer(source.directory))
    return prompt_ids(
        prompts, lambda text: tokenizer().encode(text), source.config, generation.gen_length
    )


def _tokenizer(directory: Path) -> TextCodec:
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise InvalidRequestError(
            "a text prompt needs a tokenizer",
            got=f"no {TOKENIZER_FILE} in {directory}",
            expected="prompts as lists of token ids",
            fix="tokenize the prompts first",
        )
    return TextCodec(parse_tokenizer(path.read_bytes()))


def _atlas(
    source: Checkpoint, device: str, recorder: Recorder, settings: ActivationSettings, prompts: int
) -> Atlas:
    steps = tuple(sorted(recorder.steps))
    names = [f"layers.{layer}.{kind}" for layer in range(source.config.num_layers) for kind in FFN]
    amax = {
        name: np.stack([recorder.steps[step][name].cpu().numpy() for step in steps])
        for name in names
    }
    facts = tuple(_facts(name, amax[name], recorder.energies.get(name)) for name in names)
    workload: dict[str, object] = {
        "prompts": prompts,
        "gen_length": settings.gen_length,
        "block_length": settings.block_length,
        "steps": settings.steps,
    }
    model = source.directory.name
    return Atlas(model, device, workload, steps, amax, facts, suggest(facts, source.config))


def _facts(name: str, amax: NDArray[np.float32], energy: Tensor | None) -> LinearFacts:
    if not np.isfinite(amax).all():
        raise NumericalError(
            f"an input of {name} is NaN or infinite",
            got=f"{int((~np.isfinite(amax)).any(axis=0).sum())} of {amax.shape[1]} channels",
            expected="finite activations",
            fix="check the checkpoint; with float16 weights, try bfloat16",
        )
    channels = amax.max(axis=0)
    median, largest = float(np.median(channels)), float(channels.max())
    sqnr = None
    if energy is not None:
        signal, noise = (float(part) for part in energy)
        sqnr = 10 * float(np.log10(signal / noise)) if signal and noise else None
    return LinearFacts(
        linear=name,
        largest=largest,
        median_channel=median,
        outlier_ratio=largest / median if median else 0.0,
        outlier_channels=int((channels > OUTLIER_TIMES_MEDIAN * median).sum()),
        sqnr_db=sqnr,
    )


def suggest(facts: Sequence[LinearFacts], config: ModelConfig) -> tuple[int, ...]:
    """Layers with a linear that is `EXCLUSION_DB` or more below the median of its kind."""
    found = set()
    for kind in FFN:
        measured = {
            int(row.linear.split(".")[1]): row.sqnr_db
            for row in facts
            if row.linear.endswith(kind) and row.sqnr_db is not None
        }
        if measured:
            middle = float(np.median(list(measured.values())))
            found |= {layer for layer, level in measured.items() if level <= middle - EXCLUSION_DB}
    return tuple(sorted(layer for layer in found if layer < config.num_layers))
