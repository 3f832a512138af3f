"""Static scales of the inputs of FP8 linears: the model answers the user's prompts, and is watched.

The bundle's model runs in torch in its own dtype, whole in memory, on the GPU if torch sees one. It
decodes greedily, one token a step, so that a block is seen from all masks to none. A linear's scale
is the largest magnitude of its input over all prompts and steps, divided by 448. Text goes through
the chat template where the model has one, as in `generate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from lacache_trt.accuracy.measurement import calibrate
from lacache_trt.accuracy.models import pick_device
from lacache_trt.accuracy.prompt_ids import prompt_ids
from lacache_trt.accuracy.settings import ActivationSettings
from lacache_trt.artifacts import Manifest
from lacache_trt.errors import (
    CapacityError,
    InvalidRequestError,
    NumericalError,
    QuantisationError,
)
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.config import ModelConfig
from lacache_trt.plugins.fp8 import ZERO_AMAX, scales
from lacache_trt.progress import Progress
from lacache_trt.prompt_file import PromptFile, read_prompt_file
from lacache_trt.text import TextCodec

WEIGHTS = "weights.safetensors"
_SETTINGS = ActivationSettings()


@dataclass(frozen=True)
class CalibrationFacts:
    """What the scales were measured on, for the manifest.

    Attributes:
        prompts: how many.
        tokens: of all prompts together.
        sha256: of their file.
        gen_length: tokens decoded after each prompt.
        block_length: of them in a block.
        steps: denoising steps of each prompt.
    """

    prompts: int
    tokens: int
    sha256: str
    gen_length: int
    block_length: int
    steps: int


@dataclass(frozen=True)
class Calibration:
    """Largest magnitude of the input of each linear, and what it was measured on."""

    input_amax: Mapping[str, float]
    facts: CalibrationFacts

    @property
    def input_scales(self) -> dict[str, float]:
        """Static scale of each linear's input, exact in float32."""
        amax = torch.tensor(list(self.input_amax.values()), dtype=torch.float32)
        return dict(zip(self.input_amax, scales(amax).tolist(), strict=True))

    def to_json(self) -> dict[str, object]:
        """The facts as plain types."""
        return asdict(self.facts)


def calibrate_inputs(
    source: Manifest, linears: Collection[str], path: Path, progress: Progress
) -> Calibration:
    """Watch the inputs of `linears` of a bundle on the prompts of the JSONL file at `path`.

    Raises:
        InvalidRequestError: the file holds no prompts, or one that is none; says the line.
        CapacityError: a prompt leaves no room for an answer.
        QuantisationError: a weight is NaN or infinite, or an input is all zeros.
        NumericalError: an activation is.
    """
    file = read_prompt_file(Path(path))
    codec = TextCodec.load(source.directory)
    generation = GenerationConfig(
        gen_length=_SETTINGS.gen_length,
        block_length=_SETTINGS.block_length,
        steps=_SETTINGS.steps,
        stop_at_eos=False,
    )
    ids = _token_ids(file, codec, source.model, generation.gen_length)
    device, dtype = pick_device(_SETTINGS.device), getattr(torch, str(source.body["dtype"]))
    weights = load_file(source.path(WEIGHTS), device=str(device))
    _check_weights(weights)
    channels = calibrate(
        source.model, weights, ids, generation, device, _SETTINGS.batch_rows, dtype, progress
    )
    facts = CalibrationFacts(
        prompts=len(ids),
        tokens=sum(map(len, ids)),
        sha256=file.sha256,
        gen_length=generation.gen_length,
        block_length=generation.block_length,
        steps=generation.steps,
    )
    amax = {name: float(channels[name].max()) for name in linears}
    _check_inputs(amax)
    return Calibration(amax, facts)


def _token_ids(
    file: PromptFile, codec: TextCodec | None, config: ModelConfig, gen_length: int
) -> list[tuple[int, ...]]:
    try:
        return prompt_ids(file.prompts, _encoder(codec), config, gen_length, file.places)
    except CapacityError as error:
        raise CapacityError(
            error.what,
            got=error.got,
            expected=error.expected,
            fix=f"shorten the prompt to at most {config.max_length - gen_length} tokens, or "
            "leave it out",
        ) from error


def _encoder(codec: TextCodec | None) -> Callable[[str], list[int]]:
    """From text to ids, as `generate` does it."""

    def encode(text: str) -> list[int]:
        if codec is None:
            raise InvalidRequestError(
                "a text prompt needs a tokenizer",
                got="a bundle without one",
                expected="prompts as lists of token ids",
                fix="tokenize the prompts first",
            )
        return codec.encode(codec.apply_chat_template(text) if codec.has_chat_template else text)

    return encode


def _check_weights(weights: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        finite = torch.isfinite(tensor)
        if not bool(finite.all()):
            raise QuantisationError(
                f"a weight of {name} is not finite",
                got=f"{int((~finite).sum())} of {tensor.numel()} values are NaN or infinite",
                expected="finite weights: activations are measured with them",
                fix="export the checkpoint again",
            )


def _check_inputs(amax: Mapping[str, float]) -> None:
    for name, value in amax.items():
        if not math.isfinite(value):
            raise NumericalError(
                f"an input of {name} is NaN or infinite",
                got=value,
                expected="finite activations",
                fix="check the checkpoint; with float16 weights, try bfloat16",
            )
        if value < ZERO_AMAX:
            raise QuantisationError(
                f"the input of {name} is zero on every prompt, so it has no static scale",
                got=f"largest magnitude {value:g}",
                expected=f"at least {ZERO_AMAX:g}",
                fix=f"calibrate with other prompts, or add --fp8-exclude {name}",
            )
