"""What a caller asks for (`GenerationConfig`) and what comes back (`GenerationResult`).

The defaults stand here once; the command line and the server read them from the dataclass.
Nothing heavy is imported, so that `import lacache_trt` and `--help` stay instant.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from lacache_trt.decoding.registry import POLICIES, POLICY_SETTINGS
from lacache_trt.errors import InvalidRequestError
from lacache_trt.validation import (
    Interval,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    describe,
)

Remasking = Literal["low_confidence", "random"]
Cache = Literal["none", "exact", "prefix", "dual"]
FinishReason = Literal["stop", "length"]

MAX_LENGTH = 131_072
"""Largest gen_length, block_length and steps: the longest context that any Dream config states."""

# The noise is a hash modulo the prime 2**31 - 1, so seeds beyond it would repeat smaller ones.
SEEDS = Interval(0, 2**31 - 2)

_INTEGERS = {
    "gen_length": Interval(1, MAX_LENGTH),
    "block_length": Interval(1, MAX_LENGTH),
    "steps": Interval(1, MAX_LENGTH),
    "top_k": Interval(1, 2**31 - 1),
}
_NUMBERS = {
    "temperature": Interval(0, 100),
    "cfg_scale": Interval(0, 100),
    "top_p": Interval(0, 1, low_open=True),
    "alg_temp": Interval(0, 100),
    "eps": Interval(0, 1, low_open=True, high_open=True),
    "deadline_s": Interval(0, 7 * 24 * 3600, low_open=True),
}
_OPTIONAL = frozenset({"top_p", "top_k", "alg_temp", "deadline_s"})
_FLAGS = ("stop_at_eos", "logits_eos_inf", "confidence_eos_eot_inf")


@dataclass(frozen=True)
class GenerationConfig:
    """How to decode. Checked when it is made: `InvalidRequestError` says what does not fit.

    Attributes:
        gen_length: tokens to generate. LLaDA `gen_length`, Dream `max_new_tokens`.
        block_length: tokens of one semi-autoregressive block; divides `gen_length`. LLaDA
            `block_length` (default there 128); for Dream's whole canvas set it to `gen_length`.
        steps: denoising steps of the whole generation, split evenly over the blocks. LLaDA and
            Dream `steps`. A block ends early when no mask remains.
        temperature: LLaDA `temperature` with `schedule` (multiplies Gumbel noise; confidences
            come from the noise-free logits); Dream `temperature` with its policies (divides the
            logits; confidences come from the divided logits).
        cfg_scale: LLaDA `cfg_scale`; 0 switches classifier-free guidance off.
        remasking: LLaDA `remasking`: commit the most confident positions, or random ones.
        policy: which positions a step commits: LLaDA's `schedule`, or Dream's `alg`: `origin`,
            `maskgit_plus`, `topk_margin`, `entropy`.
        cache: what is kept between steps. `none` runs everything at every step.
        stop_at_eos: end the answer after a block that holds an end token; the reference loops of
            LLaDA and Dream have no such option (always False there).
        seed: seeds the noise: one for every row, or one per row. Neither reference has it.
        logits_eos_inf: LLaDA `logits_eos_inf`: the end token is never predicted.
        confidence_eos_eot_inf: LLaDA `confidence_eos_eot_inf`: end tokens get no confidence, so
            they are committed last.
        top_p: Dream `top_p`; None keeps the whole distribution.
        top_k: Dream `top_k`; None keeps the whole distribution.
        alg_temp: Dream `alg_temp`: draw the positions at random by confidence; None or 0 takes
            the best.
        eps: Dream `eps`: the last time step of its schedule.
        deadline_s: seconds until `DeadlineExceededError`, checked between steps.
    """

    gen_length: int = 128
    block_length: int = 32
    steps: int = 128
    temperature: float = 0.0
    cfg_scale: float = 0.0
    remasking: Remasking = "low_confidence"
    policy: str = "schedule"
    cache: Cache = "exact"
    stop_at_eos: bool = True
    seed: int | tuple[int, ...] = 0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    top_p: float | None = None
    top_k: int | None = None
    alg_temp: float | None = None
    eps: float = 1e-3
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        self.validate()

    @property
    def num_blocks(self) -> int:
        """Blocks of the generated part."""
        return self.gen_length // self.block_length

    @property
    def steps_per_block(self) -> int:
        """Most denoising steps of one block."""
        return self.steps // self.num_blocks

    def row_seeds(self, rows: int) -> tuple[int, ...]:
        """One seed per row; `InvalidRequestError` if `seed` is a tuple of another length."""
        if isinstance(self.seed, int):
            return (self.seed,) * rows
        if len(self.seed) != rows:
            raise InvalidRequestError(
                "the number of seeds is not the number of prompts",
                got=f"{len(self.seed)} seeds for {rows} prompts",
                expected="one seed, or one per prompt",
                fix="pass seed as an int, or as a tuple with one int per prompt",
            )
        return self.seed

    def validate(self) -> None:
        """Check types, ranges and combinations; numbers become plain `int` and `float`.

        Raises `InvalidRequestError`.
        """
        for name, interval in _INTEGERS.items():
            if not self._absent(name):
                self._set(name, check_integer(name, getattr(self, name), interval))
        for name, interval in _NUMBERS.items():
            if not self._absent(name):
                self._set(name, check_number(name, getattr(self, name), interval))
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        self._set("seed", _checked_seed(self.seed))
        check_choice("remasking", self.remasking, get_args(Remasking))
        check_choice("policy", self.policy, POLICIES)
        check_choice("cache", self.cache, get_args(Cache))
        self._check_blocks()
        self._check_policy_settings()

    def _absent(self, name: str) -> bool:
        return name in _OPTIONAL and getattr(self, name) is None

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_blocks(self) -> None:
        if self.gen_length % self.block_length:
            lengths = _near_multiples(self.gen_length, self.block_length)
            blocks = _near_divisors(self.gen_length, self.block_length)
            raise InvalidRequestError(
                "gen_length is not a multiple of block_length",
                got=f"gen_length={self.gen_length}, block_length={self.block_length}",
                expected="gen_length = block_length x number of blocks",
                fix=f"gen_length={lengths}, or block_length={blocks}",
            )
        if self.steps % self.num_blocks:
            raise InvalidRequestError(
                "steps is not a multiple of the number of blocks",
                got=f"steps={self.steps}, {self.num_blocks} blocks "
                f"(gen_length={self.gen_length} / block_length={self.block_length})",
                expected="the same number of steps in each block, at least one",
                fix=f"steps={_near_multiples(self.steps, self.num_blocks)}",
            )

    def _check_policy_settings(self) -> None:
        foreign = POLICY_SETTINGS - POLICIES[self.policy].settings
        for field in fields(self):
            if field.name in foreign and getattr(self, field.name) != field.default:
                readers = [name for name, spec in POLICIES.items() if field.name in spec.settings]
                raise InvalidRequestError(
                    f"{field.name} has no meaning with policy={self.policy!r}",
                    got=f"{field.name}={getattr(self, field.name)!r}",
                    expected=f"{field.name} only with policy " + ", ".join(readers),
                    fix=f"leave {field.name} out, or choose one of these policies",
                )


def _checked_seed(seed: object) -> int | tuple[int, ...]:
    if not isinstance(seed, (tuple, list)):
        return check_integer("seed", seed, SEEDS)
    if not seed:
        raise InvalidRequestError(
            "seed is empty",
            got=describe(seed),
            expected="one seed, or one per prompt",
            fix="pass seed as an int",
        )
    return tuple(check_integer(f"seed[{row}]", value, SEEDS) for row, value in enumerate(seed))


def _near_multiples(value: int, base: int) -> str:
    below = value // base * base
    return " or ".join(str(near) for near in (below, below + base) if 0 < near <= MAX_LENGTH)


def _near_divisors(value: int, near: int) -> str:
    below = next(size for size in range(min(near, value), 0, -1) if value % size == 0)
    above = next((size for size in range(near, value + 1) if value % size == 0), None)
    return f"{below} or {above}" if above else str(below)


@dataclass(frozen=True)
class StepEvent:
    """What one denoising step committed in one row.

    Attributes:
        row: index of the prompt in the request.
        step: 0 at the row's first forward.
        block: index of the row's block.
        columns: committed columns, ascending; 0 is the first generated token.
        tokens: their token ids.
        text: the answer so far without masks, or None without a tokenizer.
    """

    row: int
    step: int
    block: int
    columns: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True)
class BlockTiming:
    """Where the time of one block of one row went; a batch's rows share their steps' time.

    Attributes:
        block: index of the block.
        forwards: denoising steps that the block took.
        fill_s: seconds to compute the caches; 0 with `cache="none"`.
        steps_s: seconds of the denoising steps, policy included.
    """

    block: int
    forwards: int
    fill_s: float
    steps_s: float


@dataclass(frozen=True)
class GenerationResult:
    """The answer to one prompt.

    Attributes:
        tokens: the generated part, `gen_length` ids; after an early stop the first end id fills
            what was not decoded.
        text: its text up to the first end token, or None without a tokenizer.
        finish_reason: `stop` if an end token was generated, else `length`.
        forwards: model steps of this row.
        tokens_per_forward: tokens that the model committed, per forward.
        blocks: timings of the blocks that were decoded.
    """

    tokens: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    forwards: int
    tokens_per_forward: float
    blocks: tuple[BlockTiming, ...]
