"""What a caller asks for: `GenerationConfig`.

The defaults stand here once; the command line and the server read them from the dataclass.
Nothing heavy is imported, so that `import lacache_trt` and `--help` stay instant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lacache_trt.combinations import WINDOW_CACHES, check_combinations
from lacache_trt.decoding.registry import POLICIES
from lacache_trt.errors import InvalidRequestError
from lacache_trt.results import BlockTiming as BlockTiming
from lacache_trt.results import FinishReason as FinishReason
from lacache_trt.results import GenerationResult as GenerationResult
from lacache_trt.results import StepEvent as StepEvent
from lacache_trt.setting_ranges import MAX_LENGTH as MAX_LENGTH
from lacache_trt.setting_ranges import plain_values
from lacache_trt.validation import check_choice

Remasking = Literal["low_confidence", "random"]
Cache = Literal["none", "exact", "prefix", "dual"]
Suffix = Literal["full", "dpad"]
ConfidenceDtype = Literal["float32", "float64", "bfloat16"]
Ties = Literal["first", "last"]

_NAMES = {
    "remasking": get_args(Remasking),
    "policy": POLICIES,
    "cache": get_args(Cache),
    "suffix": get_args(Suffix),
    "confidence_dtype": get_args(ConfidenceDtype),
    "ties": get_args(Ties),
}


def _default(value: float) -> Any:
    """A setting that stays None unless given, so that a policy that never reads it refuses it."""
    return field(default=None, metadata={"default": value})


@dataclass(frozen=True)
class GenerationConfig:
    """How to decode. Checked when it is made: `InvalidRequestError` says what does not fit.

    `eps`, `threshold`, `factor`, `kl_*` and `neighbour_*` are None unless given; `setting` is what
    the policy reads.

    Attributes:
        gen_length: tokens to generate. LLaDA `gen_length`, Dream `max_new_tokens`.
        block_length: tokens of one semi-autoregressive block; divides `gen_length`. LLaDA
            `block_length` (default there 128); for Dream's whole canvas set it to `gen_length`.
        steps: denoising steps of the whole generation, split evenly over the blocks. LLaDA and
            Dream `steps`. A block ends early when no mask remains; `threshold`, `factor` and
            `local_leap` need no steps and ignore them.
        temperature: LLaDA `temperature` with its policies and the accelerators' (multiplies
            Gumbel noise; confidences come from the noise-free logits); Dream `temperature` with
            Dream's (divides the logits; confidences come from the divided logits).
        cfg_scale: LLaDA `cfg_scale`; 0 switches classifier-free guidance off.
        remasking: LLaDA `remasking`: commit the most confident positions, or random ones.
        policy: which positions a step commits: LLaDA's `schedule`; Fast-dLLM's `threshold` and
            `factor`; `klass`; `local_leap`; `prophet`; Dream's `alg`: `origin`, `maskgit_plus`,
            `topk_margin`, `entropy`.
        cache: what is kept between steps. `none` runs everything at every step, `exact` keeps
            what cannot change, `prefix` and `dual` are Fast-dLLM's approximations: between full
            forwards they run the block and what follows it, or the block alone.
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
        threshold: confidence from which a position is committed: Fast-dLLM `threshold`, KLASS
            `conf_threshold`, LocalLeap's anchors. Above 1, one token per step.
        factor: Fast-dLLM `factor`.
        kl_threshold: KLASS `kl_threshold`: a position whose distribution moves less is settled.
        kl_history: KLASS `history_length`: for how many steps it has to be settled.
        neighbour_threshold: LocalLeap's relaxed threshold, near an anchor.
        neighbour_radius: LocalLeap's radius in columns.
        answer_start: Prophet: first of the answer's five columns in the generated part.
        confidence_dtype: in which dtype confidences are compared; `bfloat16` as LLaDA and Dream
            do, `float64` as Fast-dLLM does (needs logits, which costs a transfer each step).
        ties: which of two equally good positions comes first.
        refresh_every: with `prefix` and `dual`, steps between full forwards inside a block; None
            refreshes when a block begins and never inside, 1 at every step.
        commit_first: a block's first step commits its first position alone, as Fast-dLLM's Dream
            loop does; always on for Dream with `prefix` and `dual`.
        suffix: which masks behind the block the model sees: all, or DPad's sample.
        suffix_window: DPad: masks farther behind are left out.
        suffix_sigma: DPad: how many standard deviations the window spans.
        suffix_scale: DPad: factor on the normal density; the larger, the more is kept.
        suffix_seed: DPad: seeds the sample, which is the same for every row.
        eos_truncation: ODB-dLLM: cut the canvas behind the first end token that is predicted with
            this confidence when a block begins; None never cuts.
        eos_guard: ODB-dLLM: end tokens in so many first columns do not cut.
        stop_in_block: end as soon as an end token stands with no mask before it, and do not
            decode the rest of its block.
        no_empty_answer: the first position is never an end token.
        deadline_s: seconds of a batch until `DeadlineExceededError`, checked between steps.
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
    eps: float | None = _default(1e-3)
    threshold: float | None = _default(0.9)
    factor: float | None = _default(1.0)
    kl_threshold: float | None = _default(0.01)
    kl_history: int | None = _default(2)
    neighbour_threshold: float | None = _default(0.75)
    neighbour_radius: int | None = _default(4)
    answer_start: int | None = None
    confidence_dtype: ConfidenceDtype = "float32"
    ties: Ties = "first"
    refresh_every: int | None = None
    commit_first: bool = False
    suffix: Suffix = "full"
    suffix_window: int = 256
    suffix_sigma: float = 4.0
    suffix_scale: float = 2.0
    suffix_seed: int = 0
    eos_truncation: float | None = None
    eos_guard: int = 0
    stop_in_block: bool = False
    no_empty_answer: bool = False
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

    @property
    def has_window(self) -> bool:
        """Whether steps between full forwards run only a window of the canvas."""
        return self.cache in WINDOW_CACHES

    def setting(self, name: str) -> Any:
        """A setting as it is read: its default where it is None and has one."""
        value = getattr(self, name)
        metadata = self.__dataclass_fields__[name].metadata
        return metadata.get("default") if value is None else value

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
        for name, value in plain_values(vars(self)).items():
            object.__setattr__(self, name, value)
        for name, choices in _NAMES.items():
            check_choice(name, getattr(self, name), choices)
        check_combinations(self)
