"""The word problems: determinism, splits, worked answers, tokens; and a short training run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lacache_trt.demo.problems import (
    LARGEST_TOTAL,
    MIN_STEPS,
    SPLITS,
    Problem,
    Split,
    final_number,
    is_correct,
    prior_score,
    problem,
    split_digest,
    split_of,
    words,
)
from lacache_trt.errors import InvalidRequestError

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "lacache_trt" / "demo" / "tiny-llada"
COUNT = 2000
GEN_LENGTH = 64
PROMPT_LENGTH = 64
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}


@pytest.fixture(scope="module")
def problems() -> dict[Split, list[Problem]]:
    return {split: [problem(split, index) for index in range(COUNT)] for split in SPLITS}


def tokens(text: str) -> list[str]:
    """The tokenizer's rule, written a second time."""
    return re.findall(r"####|\d|[A-Za-z]+|[.?+*=-]", text)


def test_same_arguments_give_the_same_problem() -> None:
    assert problem("train", 7) == problem("train", 7)
    assert problem("train", 7) != problem("train", 8)
    assert problem("train", 7) != problem("train", 7, seed=1)


def test_generation_is_the_same_on_every_platform() -> None:
    expected = "d87e30d6a81771b104b6ee631fca6166b5ac966aaa66892e21a87f32454ceafb"
    assert split_digest("held-out", 100) == expected


def test_no_numbers_occur_in_two_splits(problems: dict[Split, list[Problem]]) -> None:
    owned = {
        split: {tuple(sorted(item.numbers)) for item in items} for split, items in problems.items()
    }
    assert owned["train"].isdisjoint(owned["tune"])
    assert owned["train"].isdisjoint(owned["held-out"])
    assert owned["tune"].isdisjoint(owned["held-out"])


def test_order_of_the_numbers_does_not_change_the_split(
    problems: dict[Split, list[Problem]],
) -> None:
    for split, items in problems.items():
        for item in items[:200]:
            assert split_of(item.numbers) == split_of(item.numbers[::-1]) == split


def test_numbers_are_those_of_the_story(problems: dict[Split, list[Problem]]) -> None:
    for item in problems["held-out"]:
        assert tuple(map(int, re.findall(r"\d+", item.question))) == item.numbers


def test_worked_answers_hold(problems: dict[Split, list[Problem]]) -> None:
    for items in problems.values():
        for item in items:
            start, *steps = item.answer_text.split(" ####")[0].split(", ")
            total = int(start)
            assert len(steps) >= MIN_STEPS >= 3
            for step, number in zip(steps, item.numbers[1:], strict=True):
                found = re.fullmatch(r"[a-z]+ ([-+*]) (\d+) = (\d+)", step)
                assert found is not None
                assert int(found[2]) == number
                total = OPERATIONS[found[1]](total, number)
                assert int(found[3]) == total
                assert 0 < total <= LARGEST_TOTAL
            assert total == item.answer
            assert is_correct(item, item.answer_text)


def test_guessing_scores_below_five_percent() -> None:
    assert prior_score("held-out") < 0.05


@pytest.mark.parametrize(
    ("text", "number"),
    [("12, first + 3 = 15 #### 15", 15), ("#### 015", 15), ("12, first + 3", None), ("####", None)],
)
def test_final_number(text: str, number: int | None) -> None:
    assert final_number(text) == number


def test_a_wrong_number_is_not_correct() -> None:
    item = problem("tune", 0)
    assert not is_correct(item, f"#### {item.answer + 1}")
    assert not is_correct(item, f"#### {item.answer}0")
    assert not is_correct(item, str(item.answer))


def test_unknown_problems_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="unknown split"):
        problem("test", 0)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="0 or more"):
        problem("tune", -1)


def test_lengths_suit_the_canvas(problems: dict[Split, list[Problem]]) -> None:
    every = [item for items in problems.values() for item in items]
    longest = max(len(tokens(item.answer_text)) for item in every)
    assert longest < GEN_LENGTH <= 1.5 * longest
    assert max(len(tokens(item.question)) for item in every) <= PROMPT_LENGTH


def test_words_cover_every_text(problems: dict[Split, list[Problem]]) -> None:
    known = set(words())
    for items in problems.values():
        for item in items:
            assert set(re.findall(r"[A-Za-z]+", item.question + item.answer_text)) <= known


def check_round_trip(directory: Path, items: list[Problem]) -> None:
    """Decoding gives back the text, with one token per digit, word and sign."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    for item in items:
        for text in (item.question, item.answer_text):
            encoding = tokenizer.encode(text)
            assert encoding.tokens == tokens(text)
            assert tokenizer.decode(encoding.ids) == text


@pytest.mark.skipif(not CHECKPOINT.is_dir(), reason="the checkpoint is not in this checkout")
def test_shipped_checkpoint(problems: dict[Split, list[Problem]]) -> None:
    check_round_trip(CHECKPOINT, problems["held-out"][:300])
    size = sum(path.stat().st_size for path in CHECKPOINT.iterdir())
    assert size <= 12 * 2**20
    report = json.loads((CHECKPOINT / "training.json").read_text())
    count = report["split_sha256_problems"]
    assert report["split_sha256"]["held-out"] == split_digest("held-out", count, report["seed"])


def test_short_training_run(tmp_path: Path, problems: dict[Split, list[Problem]]) -> None:
    safetensors = pytest.importorskip("safetensors")
    pytest.importorskip("transformers")
    sizes = ["--d-model", "128", "--layers", "2", "--mlp", "128", "--batch-size", "16"]
    counts = ["--problems", "300", "--tune-problems", "2", "--final-problems", "2"]
    limits = ["--steps", "40", "--digest-problems", "50", "--workers", "1", "--no-compile"]
    script = str(ROOT / "examples" / "train_tiny.py")
    rates = ["--learning-rate", "5e-3"]
    subprocess.run(
        [sys.executable, script, "--out", str(tmp_path), *sizes, *counts, *limits, *rates],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        timeout=240,
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("llada", ["LLaDAModelLM"])
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        dtypes = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert dtypes == {"BF16"}
    assert shapes == expected_shapes(config)
    losses = [loss for _, loss in json.loads((tmp_path / "training.json").read_text())["losses"]]
    assert losses[-1] < losses[0] - 0.5
    check_round_trip(tmp_path, problems["held-out"][:50])


def expected_shapes(config: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """LLaDA's tensor names and shapes for these sizes."""
    wide, inner, vocabulary = config["d_model"], config["mlp_hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "wte": (vocabulary, wide),
        "ln_f": (wide,),
        "ff_out": (vocabulary, wide),
    }
    for layer in range(config["n_layers"]):
        block = f"blocks.{layer}"
        shapes |= {f"{block}.{name}": (wide,) for name in ("attn_norm", "ff_norm")}
        shapes |= {
            f"{block}.{name}": (wide, wide) for name in ("q_proj", "k_proj", "v_proj", "attn_out")
        }
        shapes |= {f"{block}.{name}": (inner, wide) for name in ("ff_proj", "up_proj")}
        shapes[f"{block}.ff_out"] = (wide, inner)
    return {f"model.transformer.{name}.weight": shape for name, shape in shapes.items()}
