"""The runtime as a library: streaming, stopping, limits, closing, and what it refuses."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from built import Built
from canvases import Shape, greedy
from stub_engines import StubEngine, broken_confidence

from lacache_trt.artifacts import load_manifest
from lacache_trt.contract import graph_specs
from lacache_trt.engines.base import Capabilities
from lacache_trt.engines.builder import load_engine
from lacache_trt.errors import (
    ArtifactError,
    CancelledError,
    CapacityError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    LaCacheError,
    NumericalError,
)
from lacache_trt.generation import GenerationConfig, GenerationResult, StepEvent
from lacache_trt.model.safetensors_file import read_safetensors_header
from lacache_trt.runtime import Runtime

CONFIG = GenerationConfig(gen_length=16, block_length=8, steps=16, stop_at_eos=False)
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture
def runtime(runtimes: Any) -> Runtime:
    """A shared runtime with a tokenizer; tests leave it usable."""
    return runtimes("llada")


@pytest.fixture
def usable_after(runtime: Runtime) -> Iterator[Runtime]:
    """Whatever the test provokes, the runtime answers as before afterwards."""
    before = runtime.generate(PROMPT, CONFIG)
    yield runtime
    after = runtime.generate(PROMPT, CONFIG)
    assert before.tokens == after.tokens


def stubbed(runtime: Runtime, **changes: Any) -> tuple[StubEngine, Runtime]:
    """A runtime over a counting engine."""
    engine = StubEngine(runtime.engine, **changes)
    return engine, Runtime(engine, runtime.codec)


@pytest.mark.parametrize("cache", ["none", "exact"])
def test_one_event_per_step(runtime: Runtime, cache: Any) -> None:
    engine, counted = stubbed(runtime)
    config = GenerationConfig(
        gen_length=12, block_length=4, steps=6, stop_at_eos=False, cache=cache
    )
    events = list(counted.stream(PROMPT, config))
    result = counted.generate(PROMPT, config)
    assert isinstance(result, GenerationResult)
    assert [event.step for event in events] == list(range(6))
    assert [event.block for event in events] == [0, 0, 1, 1, 2, 2]
    assert [len(event.columns) for event in events] == [2] * 6
    written = {c: t for event in events for c, t in zip(event.columns, event.tokens, strict=True)}
    assert [written[column] for column in range(12)] == list(result.tokens)
    assert events[-1].text == result.text
    assert engine.steps == 12
    assert engine.fills == (6 if cache == "exact" else 0)
    assert engine.opened == engine.closed_sessions == 2
    assert result.forwards == 6
    assert result.tokens_per_forward == 2.0
    assert [block.forwards for block in result.blocks] == [2, 2, 2]


def test_closing_the_stream_stops_at_the_next_step(runtime: Runtime) -> None:
    engine, counted = stubbed(runtime)
    stream = counted.stream(PROMPT, CONFIG)
    next(stream)
    next(stream)
    assert (engine.steps, engine.closed_sessions) == (2, 0)
    stream.close()
    assert (engine.steps, engine.closed_sessions) == (2, 1)
    with pytest.raises(StopIteration):
        next(stream)


def test_leaving_the_loop_releases_the_caches(runtime: Runtime) -> None:
    engine, counted = stubbed(runtime)
    for _event in counted.stream(PROMPT, CONFIG):
        break
    del _event
    assert engine.steps == 1
    assert engine.closed_sessions == 1


@pytest.mark.parametrize("cache", ["none", "exact"])
def test_cancel(usable_after: Runtime, cache: Any) -> None:
    engine, counted = stubbed(usable_after)
    cancel = threading.Event()
    config = GenerationConfig(gen_length=16, block_length=8, steps=16, cache=cache)
    stream = counted.stream(PROMPT, config, cancel=cancel)
    next(stream)
    cancel.set()
    with pytest.raises(CancelledError):
        next(stream)
    with pytest.raises(CancelledError):
        counted.generate(PROMPT, config, cancel=cancel)
    assert engine.steps == 1
    assert engine.opened == engine.closed_sessions == 2


def test_deadline(usable_after: Runtime) -> None:
    engine, slow = stubbed(usable_after, delay_s=0.05)
    config = GenerationConfig(gen_length=16, block_length=8, steps=16, deadline_s=0.12)
    with pytest.raises(DeadlineExceededError) as caught:
        slow.generate(PROMPT, config)
    assert isinstance(caught.value, CancelledError)
    assert engine.steps <= 3
    assert engine.opened == engine.closed_sessions == 1
    relaxed = GenerationConfig(gen_length=8, block_length=8, steps=8, deadline_s=60)
    assert slow.generate(PROMPT, relaxed)


def test_limits_at_load(models: Any) -> None:
    with Runtime.load(models("llada").engine, max_batch=2, max_length=20) as runtime:
        assert len(runtime.generate([PROMPT[:4]] * 2, CONFIG)) == 2
        with pytest.raises(CapacityError, match="too many prompts") as caught:
            runtime.generate([PROMPT[:4]] * 3, CONFIG)
        assert (caught.value.got, caught.value.expected) == (3, "at most 2")
        with pytest.raises(CapacityError, match="longer than this runtime allows"):
            runtime.generate(PROMPT, CONFIG)
        assert runtime.generate(PROMPT[:4], CONFIG)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "8", 2**40])
@pytest.mark.parametrize("name", ["max_batch", "max_length"])
def test_absurd_limits_are_refused(runtime: Runtime, name: str, limit: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        Runtime(runtime.engine, **{name: limit})


def test_the_models_own_length_is_a_limit(usable_after: Runtime) -> None:
    longest = usable_after.engine.config.max_length
    with pytest.raises(CapacityError):
        usable_after.generate([1] * (longest - 15), CONFIG)


def test_close(models: Any) -> None:
    runtime = Runtime.load(models("llada").engine)
    runtime.generate(PROMPT, CONFIG)
    runtime.close()
    runtime.close()
    for call in (lambda: runtime.generate(PROMPT, CONFIG), lambda: next(runtime.stream(PROMPT))):
        with pytest.raises(EngineError, match="closed"):
            call()
    shape = Shape(8, 4, (2,), (0,), (8,), seed=0)
    canvas = shape.canvas(runtime.engine.config)
    with pytest.raises(EngineError, match="closed"):
        runtime.engine.session().plain(
            canvas, shape.block_columns, greedy(1, runtime.engine.config)
        )


def test_closing_stops_an_open_stream(models: Any) -> None:
    runtime = Runtime.load(models("llada").engine)
    stream = runtime.stream(PROMPT, CONFIG)
    next(stream)
    runtime.close()
    with pytest.raises(CancelledError, match="closed"):
        next(stream)


def test_closing_in_the_middle_of_a_step_is_a_cancellation(models: Any) -> None:
    """Between fill and reuse of one step the engine goes; the caller is told why."""
    runtime = Runtime.load(models("llada").engine)
    original = runtime.engine.session

    def session() -> Any:
        opened = original()
        fill = opened.fill

        def closing_fill(*inputs: Any) -> None:
            fill(*inputs)
            runtime.close()

        opened.fill = closing_fill
        return opened

    runtime.engine.session = session  # type: ignore[method-assign]
    with pytest.raises(CancelledError, match="closed"):
        runtime.generate(PROMPT, CONFIG)


@pytest.mark.parametrize("cache", ["none", "exact"])
def test_nan_confidences_are_an_error(usable_after: Runtime, cache: Any) -> None:
    engine, broken = stubbed(usable_after, change=broken_confidence)
    config = GenerationConfig(gen_length=8, block_length=8, steps=8, cache=cache)
    with pytest.raises(NumericalError, match="NaN or infinite logits"):
        broken.generate([PROMPT, PROMPT], config)
    assert engine.steps == 1
    assert engine.opened == engine.closed_sessions


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("weight", ["layers.1.down.weight", "head.weight", "embed.weight"])
@pytest.mark.parametrize(
    "options",
    [{}, {"cache": "none"}, {"policy": "origin", "temperature": 1.0}, {"cfg_scale": 1.0}],
    ids=["exact", "none", "logits", "guided"],
)
def test_broken_weights_are_a_numerical_error(
    models: Any, scratch: Path, value: float, weight: str, options: dict[str, Any]
) -> None:
    """Weights broken behind the manifest's back (hashes unchecked) reach no answer."""
    directory = poisoned_engine(models("llada"), scratch / "engine", weight, value)
    with pytest.raises(ArtifactError, match=r"weights\.safetensors"):
        load_manifest(directory, "engine")
    with Runtime(load_engine(load_manifest(directory, "engine", hashes="sizes"))) as runtime:
        config = GenerationConfig(gen_length=8, block_length=8, steps=8, **options)
        with pytest.raises(NumericalError):
            runtime.generate(PROMPT, config)


def poisoned_engine(built: Built, directory: Path, weight: str, value: float) -> Path:
    """A copy of the engine directory with one weight column broken for every token."""
    shutil.copytree(built.engine, directory)
    path = directory / "weights.safetensors"
    tensor = read_safetensors_header(path)[weight]
    with open(path, "r+b") as file:
        file.seek(tensor.offset)
        values = np.frombuffer(file.read(tensor.nbytes), np.float32).copy()
        values.reshape(tensor.shape)[:, 3] = value
        file.seek(tensor.offset)
        file.write(values.tobytes())
    return directory


WRONG_PROMPTS: dict[str, Any] = {
    "none": None,
    "number": 5,
    "float": 1.5,
    "bytes": b"abc",
    "empty list": [],
    "empty text": "",
    "an empty row": [[1, 2], []],
    "float ids": [1.0, 2.0],
    "bool ids": [True, False],
    "mixed ids": [1, "a"],
    "nested too deep": [[[1]]],
    "a number among prompts": [[1, 2], 3],
    "an array without axes": np.array(5),
    "an array of floats": np.array([1.0, 2.0]),
    "an array of arrays of arrays": np.ones((1, 1, 1), np.int64),
    "negative id": [1, -1],
    "id beyond the vocabulary": [1, 97],
    "huge id": [2**70],
    "the mask id": [1, 96],
    "lone surrogate": "\ud800",
}


@pytest.mark.parametrize("kind", WRONG_PROMPTS)
def test_wrong_prompts(usable_after: Runtime, kind: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        usable_after.generate(WRONG_PROMPTS[kind], CONFIG, raw=True)
    assert isinstance(caught.value, LaCacheError)
    assert isinstance(caught.value, ValueError)
    assert caught.value.expected


def test_a_wrong_prompt_among_others_is_named(runtime: Runtime) -> None:
    engine, counted = stubbed(runtime)
    with pytest.raises(InvalidRequestError, match=r"^prompt 2 of 3: "):
        counted.generate([PROMPT, [1, -1], PROMPT], CONFIG)
    assert engine.steps == 0


def test_a_stream_of_a_wrong_prompt_fails_before_its_first_event(runtime: Runtime) -> None:
    with pytest.raises(InvalidRequestError):
        runtime.stream([1, -1], CONFIG)


@pytest.mark.parametrize("prompts", [[PROMPT, PROMPT], ["one"], ("one", "two"), [np.array(PROMPT)]])
def test_a_stream_takes_one_prompt(runtime: Runtime, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="stream takes one prompt") as caught:
        runtime.stream(prompts, CONFIG)
    assert str(len(prompts)) in str(caught.value.got)


def test_a_stream_returns_what_generate_does(runtime: Runtime) -> None:
    returned: list[GenerationResult] = []

    def forwarded() -> Iterator[StepEvent]:
        returned.append((yield from runtime.stream(PROMPT, CONFIG)))

    assert list(forwarded())
    result = returned[0]
    expected = runtime.generate(PROMPT, CONFIG)
    assert isinstance(expected, GenerationResult)
    untimed = [replace(block, fill_s=0, steps_s=0) for block in expected.blocks]
    found = [replace(block, fill_s=0, steps_s=0) for block in result.blocks]
    assert found == untimed
    assert replace(result, blocks=()) == replace(expected, blocks=())


def test_chat_messages_go_in_as_the_refusal_says(runtime: Runtime) -> None:
    messages = [{"role": "user", "content": "what is 12 + 30?"}]
    with pytest.raises(InvalidRequestError) as caught:
        runtime.generate(messages, CONFIG)  # type: ignore[arg-type]
    way = str(caught.value.fix).removeprefix("pass ")
    assert way == "runtime.codec.encode(runtime.codec.apply_chat_template(messages))"
    codec = runtime.codec
    assert codec is not None
    by_hand = runtime.generate(codec.encode(codec.apply_chat_template(messages)), CONFIG)
    assert by_hand.tokens == runtime.generate(messages[0]["content"], CONFIG).tokens


@pytest.mark.parametrize("config", [{}, 0, "fast", {"gen_length": 8}, GenerationConfig])
def test_wrong_configurations(usable_after: Runtime, config: Any) -> None:
    for call in (usable_after.generate, lambda *a: next(usable_after.stream(*a))):
        with pytest.raises(InvalidRequestError, match="not a GenerationConfig"):
            call(PROMPT, config)


def test_a_seed_per_row(usable_after: Runtime) -> None:
    config = GenerationConfig(gen_length=8, block_length=8, steps=8, seed=(1, 2), temperature=1.0)
    assert len(usable_after.generate([PROMPT, PROMPT], config)) == 2
    with pytest.raises(InvalidRequestError, match="number of seeds"):
        usable_after.generate([PROMPT] * 3, config)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_cache_that_the_engine_lacks(usable_after: Runtime, cache: Any) -> None:
    engine, limited = stubbed(usable_after)
    engine.capabilities = Capabilities(caches=frozenset({"none", "exact"}), logits=True)
    config = GenerationConfig(gen_length=8, block_length=8, steps=8, cache=cache)
    with pytest.raises(InvalidRequestError, match=f"no cache='{cache}'") as caught:
        limited.generate(PROMPT, config)
    assert (caught.value.expected, caught.value.fix) == ("exact, none", "choose one of these")


def test_text_prompts(runtime: Runtime) -> None:
    codec = runtime.codec
    assert codec is not None
    text = "what is 12 + 30?"
    templated = runtime.generate(text, CONFIG)
    by_hand = runtime.generate(codec.encode(codec.apply_chat_template(text)), CONFIG)
    assert templated.tokens == by_hand.tokens
    raw = runtime.generate(text, CONFIG, raw=True)
    assert raw.tokens == runtime.generate(codec.encode(text), CONFIG).tokens
    assert raw.tokens != templated.tokens
    ends = runtime.engine.config.eos_ids
    kept = next((i for i, token in enumerate(raw.tokens) if token in ends), len(raw.tokens))
    assert raw.text == codec.decode(raw.tokens[:kept])


def test_a_list_gives_a_list(runtime: Runtime) -> None:
    assert isinstance(runtime.generate("what", CONFIG), GenerationResult)
    assert isinstance(runtime.generate((1, 2), CONFIG), GenerationResult)
    batch = runtime.generate(["what", [1, 2]], CONFIG)
    assert [type(result) for result in batch] == [GenerationResult] * 2
    assert len(runtime.generate([[1, 2]], CONFIG)) == 1


def test_text_without_a_tokenizer(runtimes: Any) -> None:
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        runtimes("llada-one").generate("hello", CONFIG)
    assert runtimes("llada-one").generate(PROMPT, CONFIG).text is None


def test_defaults(runtime: Runtime) -> None:
    result = runtime.generate(PROMPT)
    assert len(result.tokens) == GenerationConfig().gen_length


def test_arrays_of_ids_are_prompts(runtime: Runtime) -> None:
    config = GenerationConfig(gen_length=8, block_length=8, steps=8)
    expected = runtime.generate(PROMPT, config)
    assert isinstance(expected, GenerationResult)
    single = runtime.generate(np.array(PROMPT), config)
    assert isinstance(single, GenerationResult)
    assert single.tokens == expected.tokens
    for batch in ([np.array(PROMPT)], np.array([PROMPT])):
        results = runtime.generate(batch, config)
        assert isinstance(results, list)
        assert results[0].tokens == expected.tokens


@pytest.mark.parametrize(
    "call", [{"cancel": True}, {"cancel": "now"}, {"raw": "no"}, {"raw": None}]
)
def test_wrong_arguments(usable_after: Runtime, call: Any) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(call))):
        usable_after.generate(PROMPT, CONFIG, **call)


@pytest.mark.parametrize("directory", [None, 5, b"engine", ["engine"]])
def test_a_directory_that_is_no_path(directory: Any) -> None:
    with pytest.raises(InvalidRequestError, match="not a path"):
        Runtime.load(directory)


def test_a_directory_that_the_system_refuses() -> None:
    with pytest.raises(ArtifactError, match="not a directory"):
        Runtime.load("x" * 5000)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"engine": []}, "unknown engine"),
        ({"threads": 10**6}, "number of threads"),
        ({"threads": -1}, "number of threads"),
        ({"threads": True}, "number of threads"),
        ({"contract": {}}, "contradicts its model section"),
        ({"vocab_size": 2**20}, "contradicts its model section"),
    ],
    ids=str,
)
def test_manifests_that_were_signed_again(
    models: Any, tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    manifest = load_manifest(models("llada").engine, "engine")
    model = {name: value for name, value in changes.items() if hasattr(manifest.model, name)}
    contract = {} if "contract" in changes else manifest.contract
    forged = replace(
        manifest,
        model=replace(manifest.model, **model),
        contract=contract,
        body={**manifest.body, **changes},
    )
    with pytest.raises(ArtifactError, match=match):
        load_engine(forged)


def test_sizes_that_contradict_the_graphs(models: Any) -> None:
    manifest = load_manifest(models("llada").engine, "engine")
    model = replace(manifest.model, vocab_size=manifest.model.vocab_size + 64)
    forged = replace(manifest, model=model, contract=graph_specs(model, "float32"))
    with pytest.raises(ArtifactError, match="outputs of graph 'reuse' differ"):
        load_engine(forged)
