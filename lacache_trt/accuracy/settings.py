"""What `bench accuracy` and `bench activations` are told. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lacache_trt.errors import InvalidRequestError
from lacache_trt.validation import Interval, check_choice, check_integer

SCOPES = ("ffn", "linears", "all")
DEVICES = ("auto", "cpu", "cuda")
_COUNTS = {
    "problems": Interval(2, 1_000_000),
    "calibration_problems": Interval(1, 10_000),
    "batch_rows": Interval(1, 65_536),
    "resamples": Interval(100, 100_000),
    "seed": Interval(0, 2**31 - 2),
    "outlier_models": Interval(0, 100),
}


@dataclass(frozen=True)
class AccuracySettings:
    """What to compare and on how much.

    Attributes:
        problems: held-out problems.
        steps: denoising steps of a whole answer of 64 tokens. Fewer steps commit more tokens at
            once, which is harder.
        schemes: names of the schemes, or all.
        scopes: linears that are quantised: ffn, linears (also the projections around attention)
            and all (also the head).
        calibration_problems: tune problems whose activations set the static scales.
        batch_rows: rows decoded together.
        resamples: bootstrap resamples.
        outlier_models: random models with planted outlier channels.
        seed: seeds masks, resamples and random models.
        device: `auto` is the GPU if torch sees one.
    """

    problems: int = 64
    steps: int | tuple[int, ...] = (64, 8)
    schemes: str = "all"
    scopes: str = "ffn"
    calibration_problems: int = 64
    batch_rows: int = 512
    resamples: int = 2000
    outlier_models: int = 2
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        for name, interval in _COUNTS.items():
            check_integer(name, getattr(self, name), interval)
        for scope in self.scope_names:
            check_choice("scope", scope, SCOPES)
        check_choice("device", self.device, DEVICES)
        named = {
            "schemes": split_names(self.schemes),
            "scopes": self.scope_names,
            "steps": self.step_counts,
        }
        for name, values in named.items():
            _check_list(name, values)

    @property
    def scope_names(self) -> tuple[str, ...]:
        """The scopes, one by one."""
        return split_names(self.scopes)

    @property
    def step_counts(self) -> tuple[int, ...]:
        """The numbers of steps, one by one."""
        return (self.steps,) if isinstance(self.steps, int) else tuple(self.steps)


@dataclass(frozen=True)
class ActivationSettings:
    """What to decode while the activations are watched.

    Attributes:
        problems: tune problems that are decoded, if no prompts are given.
        gen_length: tokens to generate; divided into two or more blocks.
        block_length: tokens of one block.
        steps: denoising steps of the whole generation.
        batch_rows: rows decoded together.
        device: `auto` is the GPU if torch sees one.
    """

    problems: int = 32
    gen_length: int = 64
    block_length: int = 32
    steps: int = 64
    batch_rows: int = 64
    device: str = "auto"

    def __post_init__(self) -> None:
        check_integer("problems", self.problems, Interval(1, 100_000))
        check_integer("batch_rows", self.batch_rows, Interval(1, 65_536))
        check_choice("device", self.device, DEVICES)


def _check_list(name: str, values: Sequence[object]) -> None:
    if not values:
        raise InvalidRequestError(
            f"nothing to compare: {name} is empty",
            expected="one or more, separated by commas",
            fix=f"name some, or leave {name} out",
        )
    twice = sorted({str(value) for value in values if values.count(value) > 1})
    if twice:
        raise InvalidRequestError(
            f"{name} has the same twice",
            got=", ".join(twice),
            expected="each once",
            fix="name each once",
        )


def split_names(text: str) -> tuple[str, ...]:
    """`a,b` as its parts, without empty ones."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
