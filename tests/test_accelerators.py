"""The runtime's accelerated loops against plain loops over transformers' models in float64.

Both sides compute the same float64 arithmetic, so tokens, steps and the number of forwards agree
without excuses: `ReferenceEngine` plays the engine, `reference_accelerators` is the truth.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from canvases import bounded
from hypothesis import given
from hypothesis import strategies as st
from reference_accelerators import Options, decode
from reference_decoding import Ids, Trace
from reference_session import CAPABILITIES, ReferenceEngine
from stale_model import StaleModel
from synthetic import make_dream, make_llada

from lacache_trt.errors import InvalidRequestError
from lacache_trt.generation import GenerationConfig, GenerationResult
from lacache_trt.model.checkpoint import read_model_config
from lacache_trt.runtime import Runtime

VOCAB = 97
Settings = dict[str, Any]
prompts = st.lists(st.integers(0, VOCAB - 8), min_size=1, max_size=12)
KEEP_ALL: Settings = {"suffix": "dpad", "suffix_sigma": 0.0, "suffix_scale": 3.0}


@pytest.fixture(scope="module")
def engines_by_family(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ReferenceEngine]:
    """A small LLaDA and a small Dream, whose end token is common enough to end answers."""
    base = tmp_path_factory.mktemp("accelerated")
    sizes = {"hidden": 48, "heads": 4, "layers": 2, "ffn": 64, "head_scale": 5.0}
    made = {
        "llada": make_llada(base / "llada", seed=11, **sizes),
        "dream": make_dream(base / "dream", seed=12, **sizes),
    }
    found = {}
    for family, path in made.items():
        model = read_model_config(path)
        # Several end tokens, so that answers end at all: random weights say each one rarely.
        ends = (*model.eos_ids, *(i for i in range(20, 32) if i not in model.eos_ids))
        found[family] = ReferenceEngine(StaleModel(path), replace(model, eos_ids=ends))
    return found


@st.composite
def requests(draw: st.DrawFn, family: str) -> Settings:
    """Any accelerated request."""
    block_length = draw(st.sampled_from([1, 2, 4, 5, 8]))
    blocks = draw(st.integers(1, 4))
    cache = draw(st.sampled_from(["none", "exact", "prefix", "prefix", "dual", "dual"]))
    policies = ["schedule", "threshold", "threshold", "factor", "klass", "local_leap"]
    chosen: Settings = {
        "block_length": block_length,
        "gen_length": blocks * block_length,
        "steps": blocks * draw(st.integers(1, block_length + 1)),
        "cache": cache,
        "policy": draw(st.sampled_from(policies)),
        "stop_at_eos": draw(st.booleans()),
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.0, 0.8])),
        "seed": draw(st.integers(0, 2**31 - 2)),
        "no_empty_answer": draw(st.booleans()),
    }
    if chosen["policy"] in ("threshold", "klass", "local_leap"):
        chosen["threshold"] = draw(st.sampled_from([0.2, 0.5, 0.9, 1.5]))
    if chosen["policy"] == "factor":
        chosen["factor"] = draw(st.sampled_from([0.3, 1.0, 3.0]))
    if chosen["policy"] == "klass":
        chosen["kl_threshold"] = draw(st.sampled_from([0.01, 0.5, 5.0]))
        chosen["kl_history"] = draw(st.integers(1, 3))
    if chosen["policy"] == "local_leap":
        chosen["neighbour_threshold"] = draw(st.sampled_from([0.2, 0.6]))
        chosen["neighbour_radius"] = draw(st.integers(0, 3))
    if cache in ("prefix", "dual"):
        chosen["refresh_every"] = draw(st.sampled_from([None, None, 1, 2, 3]))
    if family == "dream" and cache in ("prefix", "dual"):
        chosen["commit_first"] = draw(st.booleans())  # on in any case
    elif draw(st.booleans()):
        chosen["commit_first"] = True
    if draw(st.booleans()):
        chosen.update(suffix="dpad", suffix_window=draw(st.integers(1, 20)))
        chosen.update(suffix_sigma=draw(st.sampled_from([0.0, 3.0])))
        chosen.update(suffix_scale=draw(st.sampled_from([0.5, 2.0])))
        chosen.update(suffix_seed=draw(st.integers(0, 9)))
    if chosen["stop_at_eos"]:
        chosen["stop_in_block"] = draw(st.booleans())
        chosen["eos_truncation"] = draw(st.sampled_from([None, 0.05, 0.3]))
        if chosen["eos_truncation"] is not None:
            chosen["eos_guard"] = draw(st.sampled_from([0, 5]))
    return chosen


def truth(engine: ReferenceEngine, prompt: list[int], config: GenerationConfig) -> Trace:
    """The plain loop for one prompt."""
    shared = {field.name: config.setting(field.name) for field in fields(Options)}
    if engine.config.logit_shift and config.has_window:
        shared["commit_first"] = True
    ids = Ids(mask=engine.config.mask_id, ends=engine.config.eos_ids)
    return decode(engine.model, prompt, Options(**shared), ids)


def check(engine: ReferenceEngine, prompt: list[int], config: GenerationConfig) -> Trace:
    """One generation, step by step."""
    runtime = Runtime(engine)
    trace = truth(engine, prompt, config)
    events = list(runtime.stream(prompt, config))
    found = [dict(zip(event.columns, event.tokens, strict=True)) for event in events]
    assert found == trace.committed
    result = runtime.generate(prompt, config)
    assert isinstance(result, GenerationResult)
    assert list(result.tokens) == trace.tokens
    assert result.forwards == trace.forwards
    assert sum(block.forwards for block in result.blocks) == trace.forwards
    assert engine.config.mask_id not in result.tokens
    if config.no_empty_answer:
        assert result.tokens[0] not in engine.config.eos_ids
    return trace


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_every_accelerator_equals_its_plain_loop(
    family: str, engines_by_family: dict[str, ReferenceEngine]
) -> None:
    engine = engines_by_family[family]

    @bounded(60)
    @given(request=requests(family), prompt=prompts)
    def run(request: Settings, prompt: list[int]) -> None:
        check(engine, prompt, GenerationConfig(**request))

    run()


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_batch_equals_its_rows_run_alone(
    family: str, engines_by_family: dict[str, ReferenceEngine]
) -> None:
    """Rows of different lengths whose blocks take different numbers of steps."""
    engine = engines_by_family[family]
    runtime = Runtime(engine)

    @bounded(25)
    @given(
        request=requests(family),
        batch=st.lists(prompts, min_size=2, max_size=3),
        scale=st.sampled_from([0.0, 0.0, 1.0]),
    )
    def run(request: Settings, batch: list[list[int]], scale: float) -> None:
        row_seeds = tuple(request["seed"] // 2 + row for row in range(len(batch)))
        config = GenerationConfig(**{**request, "seed": row_seeds, "cfg_scale": scale})
        together = runtime.generate(batch, config)
        for row, result in enumerate(together):
            alone = runtime.generate(batch[row], replace(config, seed=row_seeds[row]))
            assert result.tokens == alone.tokens
            assert result.forwards == alone.forwards
            assert [b.forwards for b in result.blocks] == [b.forwards for b in alone.blocks]

    run()


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_refreshed_at_every_step_equals_none(
    family: str, cache: Any, engines_by_family: dict[str, ReferenceEngine]
) -> None:
    engine = engines_by_family[family]
    runtime = Runtime(engine)
    stale = 0
    for seed in range(12):
        prompt = np.random.default_rng(seed).integers(0, VOCAB - 8, 7).tolist()
        config = GenerationConfig(
            gen_length=16,
            block_length=8,
            steps=16,
            policy="threshold",
            threshold=0.4,
            cache="none",
            commit_first=family == "dream",
        )
        plain = runtime.generate(prompt, config)
        refreshed = runtime.generate(prompt, replace(config, cache=cache, refresh_every=1))
        assert refreshed.tokens == plain.tokens
        assert refreshed.forwards == plain.forwards
        stale += runtime.generate(prompt, replace(config, cache=cache)).tokens != plain.tokens
    assert stale > 0, "the approximation must be one, or this compares nothing"


@pytest.mark.parametrize("cache", ["none", "exact", "prefix", "dual"])
def test_keeping_the_whole_suffix_equals_no_dropout(
    cache: Any, engines_by_family: dict[str, ReferenceEngine]
) -> None:
    """The engine gets the very same calls, so the tokens are equal bit for bit."""
    engine = engines_by_family["llada"]
    runtime = Runtime(engine)
    rng = np.random.default_rng(5)
    batch = [rng.integers(0, VOCAB - 8, length).tolist() for length in (3, 9)]
    config = GenerationConfig(
        gen_length=24, block_length=8, steps=24, policy="threshold", threshold=0.4, cache=cache
    )
    full = [result.tokens for result in runtime.generate(batch, config)]
    kept = [result.tokens for result in runtime.generate(batch, replace(config, **KEEP_ALL))]
    few = replace(config, suffix="dpad", suffix_window=2, suffix_sigma=3.0, suffix_scale=1.0)
    dropped = [result.tokens for result in runtime.generate(batch, few)]
    assert full == kept
    assert full != dropped


@pytest.mark.parametrize("cache", ["none", "exact", "dual"])
def test_a_threshold_above_one_is_one_token_per_step(
    cache: Any, engines_by_family: dict[str, ReferenceEngine]
) -> None:
    engine = engines_by_family["llada"]
    runtime = Runtime(engine)
    for seed in range(5):
        prompt = np.random.default_rng(seed).integers(0, VOCAB - 8, 5).tolist()
        config = GenerationConfig(
            gen_length=16, block_length=8, steps=16, cache=cache, stop_at_eos=False
        )
        one = runtime.generate(prompt, config)
        high = runtime.generate(prompt, replace(config, policy="threshold", threshold=1.5))
        assert (one.tokens, one.forwards) == (high.tokens, high.forwards)
        assert high.forwards == 16


@pytest.mark.parametrize(("cache", "widths"), [("dual", {4}), ("prefix", {12, 8, 4})])
def test_windows_are_the_block_or_the_block_and_its_suffix(
    cache: Any, widths: set[int], engines_by_family: dict[str, ReferenceEngine]
) -> None:
    engine = engines_by_family["llada"]
    engine.calls.clear()
    engine.widths.clear()
    config = GenerationConfig(
        gen_length=12, block_length=4, steps=12, cache=cache, stop_at_eos=False
    )
    Runtime(engine).generate([1, 2, 3], config)
    assert engine.calls == ["fill", "reuse_kv", "window", "window", "window"] * 3
    assert set(engine.widths) == widths


def test_prophet_stops_when_the_answer_is_clear(
    engines_by_family: dict[str, ReferenceEngine],
) -> None:
    engine = engines_by_family["llada"]
    early = 0
    for seed in range(9):
        prompt = np.random.default_rng(seed).integers(0, VOCAB - 8, 6).tolist()
        for cache in ("none", "exact"):
            config = GenerationConfig(
                gen_length=16,
                block_length=8,
                steps=16,
                policy="prophet",
                answer_start=(3, 9, 11)[seed % 3],
                cache=cache,  # type: ignore[arg-type]
                stop_at_eos=False,
            )
            early += check(engine, prompt, config).forwards < 16
    assert early > 2


def test_prophet_ends_rows_of_a_batch_one_by_one(
    engines_by_family: dict[str, ReferenceEngine],
) -> None:
    engine = engines_by_family["llada"]
    rng = np.random.default_rng(1)
    batch = [rng.integers(0, VOCAB - 8, length).tolist() for length in (2, 8, 5, 6)]
    for cache in ("none", "exact"):
        config = GenerationConfig(
            gen_length=16,
            block_length=8,
            steps=16,
            policy="prophet",
            answer_start=4,
            cache=cache,  # type: ignore[arg-type]
        )
        together = Runtime(engine).generate(batch, config)
        assert len({result.forwards for result in together}) > 1
        for prompt, result in zip(batch, together, strict=True):
            alone = Runtime(engine).generate(prompt, config)
            assert (result.tokens, result.forwards) == (alone.tokens, alone.forwards)


def test_options_change_something(engines_by_family: dict[str, ReferenceEngine]) -> None:
    """The comparisons above are not vacuous."""
    engine = engines_by_family["llada"]
    rng = np.random.default_rng(2)
    batch = [rng.integers(0, VOCAB - 8, 6).tolist() for _ in range(24)]
    base = GenerationConfig(
        gen_length=24, block_length=8, steps=24, policy="threshold", threshold=0.4, cache="none"
    )

    def work(config: GenerationConfig) -> tuple[list[tuple[int, ...]], int]:
        results = Runtime(engine).generate(batch, config)
        return [r.tokens for r in results], sum(r.forwards for r in results)

    tokens, forwards = work(base)
    for change in (
        {"stop_in_block": True},
        {"eos_truncation": 0.1},
        {"no_empty_answer": True},
        {"commit_first": True},
        {"suffix": "dpad", "suffix_window": 2},
        {"cache": "dual"},
        {"confidence_dtype": "bfloat16", "policy": "schedule", "threshold": None},
    ):
        assert work(replace(base, **change)) != (tokens, forwards), change
    assert work(replace(base, stop_in_block=True))[1] < forwards
    assert work(replace(base, eos_truncation=0.1))[1] < forwards


@pytest.mark.parametrize("cut", [None, 0.05, 0.2])
def test_an_answer_stops_only_at_an_end_token_that_was_predicted(
    engines_by_family: dict[str, ReferenceEngine], cut: float | None
) -> None:
    """What is filled in behind a cut answer is no end token of the model's."""
    engine = engines_by_family["llada"]
    rng = np.random.default_rng(3)
    config = GenerationConfig(
        gen_length=24, block_length=4, steps=24, policy="threshold", threshold=0.4, cache="none",
        eos_truncation=cut,
    )  # fmt: skip
    reasons = set()
    for _ in range(24):
        runtime, prompt = Runtime(engine), rng.integers(0, VOCAB - 8, 6).tolist()
        predicted = {token for event in runtime.stream(prompt, config) for token in event.tokens}
        (result,) = runtime.generate([prompt], config)
        stopped = bool(predicted & set(engine.config.eos_ids))
        assert result.finish_reason == ("stop" if stopped else "length")
        reasons.add(result.finish_reason)
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize(
    "request_",
    [
        {"policy": "klass"},
        {"policy": "prophet", "answer_start": 0},
        {"no_empty_answer": True},
        {"policy": "threshold", "confidence_dtype": "float64"},
    ],
    ids=str,
)
def test_what_needs_logits_is_refused_without(
    request_: Settings, engines_by_family: dict[str, ReferenceEngine]
) -> None:
    engine = engines_by_family["llada"]
    mute = ReferenceEngine(engine.model, engine.config, replace(CAPABILITIES, logits=False))
    with pytest.raises(InvalidRequestError, match="read logits"):
        Runtime(mute).generate([1], GenerationConfig(**request_))
