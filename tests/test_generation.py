"""Whole generations of the runtime against plain float64 loops over transformers' models.

Each generation is compared step by step with `reference_decoding`. A difference is excused if, at
the first step that differs, the float64 loop itself was closer to another outcome than `TIES` says
(guidance, temperatures below 1 and alg_temp magnify rounding and the bound with it). Excused
differences of tokens are counted over the whole file: at most one in 1,000 decisions. Positions
of a saturated model tie exactly in float32 (confidence 1), so their order may differ more often;
the tokens do not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from built import SHIPPED
from canvases import bounded
from hypothesis import given
from hypothesis import strategies as st
from reference_decoding import Ids, Options, Trace, decode
from reference_model import ReferenceModel

from lacache_trt.demo.problems import is_correct, problem
from lacache_trt.demo.run import CHECKPOINT, SETTINGS
from lacache_trt.generation import GenerationConfig, GenerationResult, StepEvent
from lacache_trt.model.config import ModelConfig
from lacache_trt.runtime import Runtime

TIES = {"token": 1e-4, "rank": 1e-5, "nucleus": 1e-5, "count": 1e-9}
VOCAB = 97
LLADA = ("llada", "llada-bf16", "llada-one")
DREAM = ("dream", "dream-one")
Settings = dict[str, Any]

prompts = st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=24)
seeds = st.integers(0, 2**31 - 2)


@st.composite
def layouts(draw: st.DrawFn) -> Settings:
    """Blocks, steps and caches that fit together, whole canvas included."""
    block_length = draw(st.sampled_from([1, 2, 3, 5, 8, 13, 16]))
    blocks = draw(st.integers(1, 3))
    return {
        "block_length": block_length,
        "gen_length": blocks * block_length,
        "steps": blocks * draw(st.integers(1, block_length + 2)),
        "cache": draw(st.sampled_from(["exact", "exact", "none"])),
        "stop_at_eos": draw(st.booleans()),
        "seed": draw(seeds),
    }


@st.composite
def llada_requests(draw: st.DrawFn) -> Settings:
    """Everything that LLaDA's reference loop can be asked for."""
    return {
        **draw(layouts()),
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0])),
        "cfg_scale": draw(st.sampled_from([0.0, 0.0, 0.7, 2.0])),
        "remasking": draw(st.sampled_from(["low_confidence", "low_confidence", "random"])),
        "logits_eos_inf": draw(st.booleans()),
        "confidence_eos_eot_inf": draw(st.booleans()),
    }


@st.composite
def dream_requests(draw: st.DrawFn) -> Settings:
    """Everything that Dream's reference loop can be asked for, block-wise too."""
    policy = draw(st.sampled_from(["origin", "maskgit_plus", "topk_margin", "entropy"]))
    chosen = {
        **draw(layouts()),
        "policy": policy,
        "temperature": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "top_p": draw(st.sampled_from([None, 0.5, 0.95])),
        "top_k": draw(st.sampled_from([None, 1, 10])),
        "eps": draw(st.sampled_from([1e-3, 0.1])),
    }
    if policy != "origin":
        chosen["alg_temp"] = draw(st.sampled_from([None, 0.0, 0.5]))
    return chosen


def truth(
    reference: ReferenceModel, prompt: list[int], config: GenerationConfig, model: ModelConfig
) -> Trace:
    """The independent loop over the float64 model, for one prompt."""
    shared = {field.name: config.setting(field.name) for field in fields(Options)}
    ids = Ids(
        mask=reference.mask_id,
        ends=model.eos_ids,
        suppressed=reference.end_ids[:1] if config.logits_eos_inf else (),
        excluded=model.eos_ids if config.confidence_eos_eot_inf else (),
    )
    return decode(reference.row_logits, prompt, Options(**shared), ids)


def is_near_tie(trace: Trace, config: GenerationConfig, step: int | None = None) -> bool:
    """Whether the float64 loop was close to another outcome, at this step or at any."""
    smallest = min(1.0, config.temperature or 1.0, config.alg_temp or 1.0)
    magnified = (1 + 2 * config.cfg_scale) / smallest
    return any(
        decision.gap < TIES[decision.kind] * magnified
        for decision in trace.decisions
        if step is None or decision.step == step
    )


def first_difference(events: list[StepEvent], trace: Trace) -> int | None:
    """The first step that commits something else, or None."""
    found = [dict(zip(event.columns, event.tokens, strict=True)) for event in events]
    if found == trace.committed:
        return None
    pairs = zip(found, trace.committed, strict=False)
    differing = (step for step, (one, other) in enumerate(pairs) if one != other)
    return next(differing, min(len(found), len(trace.committed)))


def check_against_truth(
    runtime: Runtime,
    reference: ReferenceModel,
    prompt: list[int],
    config: GenerationConfig,
    tally: Counter[str],
) -> None:
    """One generation, streamed; counts decisions and excused differences in `tally`."""
    events = list(runtime.stream(prompt, config))
    trace = truth(reference, prompt, config, runtime.engine.config)
    tally["generations"] += 1
    tally["decisions"] += max(1, len(trace.decisions))
    step = first_difference(events, trace)
    result = runtime.generate(prompt, config)
    assert isinstance(result, GenerationResult)
    if step is not None:
        assert is_near_tie(trace, config, step), (step, events, trace)
        tally["reordered"] += 1
        tally["excused"] += list(result.tokens) != trace.tokens
        return
    assert [event.step for event in events] == list(range(trace.forwards))
    assert list(result.tokens) == trace.tokens
    assert result.forwards == trace.forwards
    ended = any(token in runtime.engine.config.eos_ids for token in trace.tokens)
    assert result.finish_reason == ("stop" if ended else "length")
    assert sum(block.forwards for block in result.blocks) == trace.forwards
    assert reference.mask_id not in result.tokens


def run_property(
    examples: int,
    requests: st.SearchStrategy[Settings],
    runtime: Runtime,
    reference: ReferenceModel,
    tally: Counter[str],
) -> None:
    """Random requests against the truth."""

    @bounded(examples)
    @given(request=requests, prompt=prompts)
    def check(request: Settings, prompt: list[int]) -> None:
        check_against_truth(runtime, reference, prompt, GenerationConfig(**request), tally)

    check()


@pytest.fixture(scope="module")
def tally() -> Counter[str]:
    """Decisions and excused differences of all tests of this file."""
    return Counter()


@pytest.mark.parametrize("name", LLADA)
def test_llada(name: str, runtimes: Any, references: Any, tally: Counter[str]) -> None:
    run_property(60, llada_requests(), runtimes(name), references(name), tally)


@pytest.mark.parametrize("name", DREAM)
def test_dream(name: str, runtimes: Any, references: Any, tally: Counter[str]) -> None:
    run_property(60, dream_requests(), runtimes(name), references(name), tally)


def test_each_family_takes_the_other_policies(
    runtimes: Any, references: Any, tally: Counter[str]
) -> None:
    run_property(15, dream_requests(), runtimes("llada"), references("llada"), tally)
    run_property(15, llada_requests(), runtimes("dream"), references("dream"), tally)


@pytest.mark.parametrize("cache", ["none", "exact"])
@pytest.mark.parametrize("name", ["llada", "dream"])
def test_schedules(
    name: str, cache: str, runtimes: Any, references: Any, tally: Counter[str]
) -> None:
    """LLaDA's schedule over several blocks: one token a step, uneven splits, all at once."""
    for gen_length, block_length, steps in [
        (32, 8, 32),
        (32, 8, 12),
        (24, 24, 7),
        (30, 10, 3),
        (64, 64, 4),
        (6, 1, 6),
        (8, 4, 20),
    ]:
        config = GenerationConfig(
            gen_length=gen_length,
            block_length=block_length,
            steps=steps,
            cache=cache,  # type: ignore[arg-type]
            stop_at_eos=False,
        )
        for seed in range(2):
            rng = np.random.default_rng(seed)
            prompt = rng.integers(0, VOCAB - 6, 5 + 14 * seed).tolist()
            check_against_truth(runtimes(name), references(name), prompt, config, tally)


@pytest.mark.parametrize("name", ["llada", "dream", "dream-one"])
def test_a_batch_equals_its_rows_run_alone(
    name: str, runtimes: Any, references: Any, tally: Counter[str]
) -> None:
    """Different lengths, a seed per row, noise, guidance, early ends: whatever the company."""
    runtime, reference = runtimes(name), references(name)
    requests = (
        llada_requests() if name == "llada" else st.one_of(llada_requests(), dream_requests())
    )

    @bounded(25)
    @given(request=requests, batch=st.lists(prompts, min_size=2, max_size=4))
    def check(request: Settings, batch: list[list[int]]) -> None:
        row_seeds = tuple(request["seed"] // 2 + row for row in range(len(batch)))
        config = GenerationConfig(**{**request, "seed": row_seeds})
        for row, result in enumerate(runtime.generate(batch, config)):
            single = replace(config, seed=row_seeds[row])
            alone = runtime.generate(batch[row], single)
            tally["decisions"] += len(alone.tokens)
            if result.tokens != alone.tokens:
                trace = truth(reference, batch[row], single, runtime.engine.config)
                assert is_near_tie(trace, single), (row, request, batch)
                tally["excused"] += 1
            else:
                assert result.forwards == alone.forwards
                assert result.finish_reason == alone.finish_reason
                assert result.text == alone.text

    check()


@pytest.mark.parametrize("cache", ["none", "exact"])
def test_the_order_of_a_batch_does_not_matter(cache: Any, runtimes: Any) -> None:
    runtime: Runtime = runtimes("llada")
    rng = np.random.default_rng(3)
    batch = [rng.integers(0, VOCAB - 6, length).tolist() for length in (3, 17, 1, 9)]
    config = GenerationConfig(
        gen_length=24, block_length=8, steps=9, temperature=0.8, seed=(1, 2, 3, 4), cache=cache
    )
    forward = runtime.generate(batch, config)
    backward = runtime.generate(batch[::-1], replace(config, seed=(4, 3, 2, 1)))
    assert [r.tokens for r in forward] == [r.tokens for r in backward[::-1]]


def test_none_and_exact_give_the_same_tokens(
    runtimes: Any, references: Any, tally: Counter[str]
) -> None:
    for name, requests in (("llada", llada_requests()), ("dream", dream_requests())):
        compare_caches(runtimes(name), references(name), requests, tally)


def compare_caches(
    runtime: Runtime,
    reference: ReferenceModel,
    requests: st.SearchStrategy[Settings],
    tally: Counter[str],
) -> None:
    """Both caches on the same request."""

    @bounded(20)
    @given(request=requests, prompt=prompts)
    def check(request: Settings, prompt: list[int]) -> None:
        config = GenerationConfig(**{**request, "cache": "exact"})
        exact = runtime.generate(prompt, config)
        plain = runtime.generate(prompt, replace(config, cache="none"))
        tally["decisions"] += len(exact.tokens)
        if exact.tokens != plain.tokens:
            trace = truth(reference, prompt, config, runtime.engine.config)
            assert is_near_tie(trace, config)
            tally["excused"] += 1

    check()


@pytest.mark.skipif(not (CHECKPOINT / "config.json").is_file(), reason="no model ships")
def test_the_model_that_ships(runtimes: Any, references: Any, tally: Counter[str]) -> None:
    """A trained model: the float64 loop agrees, `exact` equals `none`, and answers are right."""
    runtime, reference = runtimes(SHIPPED), references(SHIPPED)
    asked = [problem("held-out", index) for index in range(8)]
    for one, steps in zip(asked[:2], (8, 16), strict=True):
        prompt = runtime.codec.encode(one.question)
        few = replace(SETTINGS, steps=steps)
        check_against_truth(runtime, reference, prompt, few, tally)
    questions = [one.question for one in asked]
    exact = runtime.generate(questions, SETTINGS)
    plain = runtime.generate(questions, replace(SETTINGS, cache="none"))
    assert [result.tokens for result in exact] == [result.tokens for result in plain]
    right = sum(is_correct(one, result.text) for one, result in zip(asked, exact, strict=True))
    assert right >= 6


CHANGES: dict[str, Settings] = {
    "temperature": {"temperature": 1.0},
    "seed": {"temperature": 1.0, "seed": 5},
    "cfg_scale": {"cfg_scale": 2.0},
    "remasking": {"remasking": "random"},
    "steps": {"steps": 3},
    "block_length": {"block_length": 24, "steps": 24},
    "logits_eos_inf": {"logits_eos_inf": True},
    "confidence_eos_eot_inf": {"confidence_eos_eot_inf": True},
    "policy": {"policy": "entropy"},
    "top_k": {"policy": "maskgit_plus", "temperature": 3.0, "top_k": 2},
    "alg_temp": {"policy": "maskgit_plus", "alg_temp": 2.0},
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_setting_changes_something(change: str, runtimes: Any) -> None:
    """The comparisons above are not vacuous: each setting changes some of forty answers."""
    runtime: Runtime = runtimes("llada")
    base: Settings = {"gen_length": 24, "block_length": 8, "steps": 24, "stop_at_eos": False}
    rng = np.random.default_rng(0)
    batch = [rng.integers(0, VOCAB - 6, 9).tolist() for _ in range(40)]
    before = dict(CHANGES[change])
    before.pop(change)
    first = runtime.generate(batch, GenerationConfig(**{**base, **before}))
    second = runtime.generate(batch, GenerationConfig(**{**base, **CHANGES[change]}))
    assert [r.tokens for r in first] != [r.tokens for r in second]


def test_end_options(runtimes: Any) -> None:
    """`logits_eos_inf` never says the end token; an early stop fills the rest with it."""
    runtime: Runtime = runtimes("llada")
    model = runtime.engine.config
    rng = np.random.default_rng(1)
    batch = [rng.integers(0, VOCAB - 6, 7).tolist() for _ in range(60)]
    config = GenerationConfig(gen_length=24, block_length=8, steps=24)
    answers = runtime.generate(batch, config)
    full = runtime.generate(batch, replace(config, stop_at_eos=False))
    never = runtime.generate(batch, replace(config, stop_at_eos=False, logits_eos_inf=True))
    assert not any(model.eos_ids[0] in answer.tokens for answer in never)
    assert_early_stops(answers, full, model)


def assert_early_stops(
    answers: list[GenerationResult], full: list[GenerationResult], model: ModelConfig
) -> None:
    """Whole blocks of eight up to the one with an end token, then the first end token."""
    stopped = 0
    for answer, whole in zip(answers, full, strict=True):
        hits = [place for place, token in enumerate(whole.tokens) if token in model.eos_ids]
        cut = (hits[0] // 8 + 1) * 8 if hits else 24
        assert answer.tokens == whole.tokens[:cut] + model.eos_ids[:1] * (24 - cut)
        assert len(answer.blocks) == cut // 8
        assert answer.finish_reason == ("stop" if hits else "length")
        stopped += cut < 24
    assert stopped >= 2


def test_excused_differences_are_rare(tally: Counter[str]) -> None:
    """Comes last: what the tests above have counted."""
    if tally["decisions"] < 5000:
        pytest.skip("counts the whole file")
    assert tally["excused"] * 1000 <= tally["decisions"], tally
