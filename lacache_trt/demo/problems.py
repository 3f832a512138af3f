"""Grade-school word problems with worked answers, generated from (split, index, seed).

A problem tells how a quantity changes in four to six steps. Its answer is a running total, each
step's result being the left operand of the next one, and ends with the final number after "####"
(the mark that GSM8K uses, https://arxiv.org/abs/2110.14168):

    Tom has 45 pens. First he buys 38 more pens. Then he has 4 times as many. Next Ann gives him
    7 pens. Later he loses 60 pens. How many pens does Tom have now?
    45, first + 38 = 83, then * 4 = 332, next + 7 = 339, later - 60 = 279 #### 279

A step needs the result before it, so committing many tokens per forward pass without looking at
confidence costs accuracy. Totals stay within 0..999 and only totals below 100 are multiplied, so
the arithmetic suits a model of five million parameters.

Splits: sha256 over the sorted numbers of the story decides (80% train, 10% tune, 10% held-out), so
no set of numbers occurs in two splits, whatever its order, operators or story. Random draws use
``Random.random()`` alone, the only method whose values Python promises to keep between versions
(https://docs.python.org/3/library/random.html#notes-on-reproducibility).
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from lacache_trt.errors import InvalidRequestError

Split = Literal["train", "tune", "held-out"]
Operator = Literal["+", "-", "*"]
Item = TypeVar("Item")

SPLITS: tuple[Split, ...] = get_args(Split)
MIN_STEPS = 4
MAX_STEPS = 6
LARGEST_TOTAL = 999
ORDINALS = ("First", "Then", "Next", "Later", "Afterwards", "Finally")
ANSWER_MARK = "####"

_ANSWER = re.compile(rf"{ANSWER_MARK}\s*(\d+)")


@dataclass(frozen=True)
class Step:
    """One change of the total: the operator, its right operand and what it gives."""

    operator: Operator
    operand: int
    result: int


@dataclass(frozen=True)
class Problem:
    """A question, its worked answer, the final number, and the numbers that choose the split."""

    question: str
    answer_text: str
    answer: int
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Story:
    """Sentence templates around one kind of owner; fields: name, he, him, friend, n, item."""

    owners: tuple[tuple[str, str, str], ...]
    items: tuple[str, ...]
    starts: tuple[str, ...]
    changes: dict[Operator, tuple[str, ...]]
    questions: tuple[str, ...]


FRIENDS = ("Ben", "Mia", "Sam", "Zoe", "Leo", "Eva")

STORIES: tuple[Story, ...] = (
    Story(
        owners=(
            ("Tom", "he", "him"),
            ("Max", "he", "him"),
            ("Ali", "he", "him"),
            ("Ann", "she", "her"),
            ("Lucy", "she", "her"),
            ("Rosa", "she", "her"),
        ),
        items=("pens", "cards", "coins", "marbles", "stickers", "shells", "beads", "stamps"),
        starts=("{name} has {n} {item}.", "{name} starts with {n} {item}."),
        changes={
            "+": (
                "{he} buys {n} more {item}.",
                "{he} finds {n} more {item}.",
                "{friend} gives {him} {n} {item}.",
            ),
            "-": (
                "{he} gives {friend} {n} {item}.",
                "{he} loses {n} {item}.",
                "{he} sells {n} {item}.",
            ),
            "*": ("{he} has {n} times as many.", "{he} owns {n} times as many."),
        },
        questions=("How many {item} does {name} have now?", "How many {item} now?"),
    ),
    Story(
        owners=(("shop", "it", "it"), ("bakery", "it", "it"), ("market", "it", "it")),
        items=("apples", "buns", "cakes", "pies", "lemons", "eggs"),
        starts=("The {name} has {n} {item}.", "A {name} stores {n} {item}."),
        changes={
            "+": ("{he} orders {n} more {item}.", "{friend} brings {n} more {item}."),
            "-": ("{he} sells {n} {item}.", "{friend} buys {n} {item}."),
            "*": ("the stock grows {n} times bigger.", "{he} holds {n} times as many."),
        },
        questions=("How many {item} does the {name} have?", "How many {item} now?"),
    ),
    Story(
        owners=(("library", "it", "it"), ("school", "it", "it"), ("club", "it", "it")),
        items=("books", "maps", "games", "chairs"),
        starts=("The {name} owns {n} {item}.", "A {name} has {n} {item}."),
        changes={
            "+": ("{he} receives {n} more {item}.", "{friend} returns {n} {item}."),
            "-": ("{he} lends {n} {item}.", "{friend} borrows {n} {item}."),
            "*": ("{he} has {n} times as many.",),
        },
        questions=("How many {item} does the {name} have?", "How many {item} now?"),
    ),
)


def problem(split: Split, index: int, seed: int = 0) -> Problem:
    """The problem with this index in this split; the same arguments always give the same one."""
    if split not in SPLITS:
        known = ", ".join(SPLITS)
        raise InvalidRequestError("unknown split", got=split, expected=f"one of {known}")
    if index < 0:
        raise InvalidRequestError("no problem has this index", got=index, expected="0 or more")
    digest = hashlib.sha256(f"{seed}/{split}/{index}".encode()).digest()
    rng = random.Random(int.from_bytes(digest[:8], "big"))
    while True:
        start, steps = _draw_steps(rng)
        numbers = (start, *(step.operand for step in steps))
        if split_of(numbers) == split:
            break
    return Problem(_tell(rng, start, steps), _work(start, steps), steps[-1].result, numbers)


def split_of(numbers: Sequence[int]) -> Split:
    """The split that owns these numbers, in whatever order they come."""
    text = ",".join(str(number) for number in sorted(numbers))
    bucket = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 10
    if bucket == 0:
        return "held-out"
    return "tune" if bucket == 1 else "train"


def final_number(generated_text: str) -> int | None:
    """The number after the first "####", or None where the text has none."""
    found = _ANSWER.search(generated_text)
    return int(found.group(1)) if found else None


def is_correct(problem: Problem, generated_text: str) -> bool:
    """Whether the final number of a generated answer is exactly the right one."""
    return final_number(generated_text) == problem.answer


def prior_score(split: Split, count: int = 10_000, seed: int = 0) -> float:
    """Accuracy on a split of always answering train's commonest final number, per step count.

    The guesser sees how many steps the story has and nothing else; it is the best guess from the
    answer prior, so a model that scores near it has learned no arithmetic.
    """
    seen: dict[int, Counter[int]] = {}
    for known in (problem("train", index, seed) for index in range(count)):
        seen.setdefault(len(known.numbers), Counter())[known.answer] += 1
    guess = {length: answers.most_common(1)[0][0] for length, answers in seen.items()}
    asked = (problem(split, index, seed) for index in range(count))
    return sum(guess.get(len(item.numbers)) == item.answer for item in asked) / count


def split_digest(split: Split, count: int = 10_000, seed: int = 0) -> str:
    """sha256 over the first problems of a split: questions and answers, one per line."""
    digest = hashlib.sha256()
    for item in (problem(split, index, seed) for index in range(count)):
        digest.update(f"{item.question}\t{item.answer_text}\n".encode())
    return digest.hexdigest()


def words() -> tuple[str, ...]:
    """Every word that a question or an answer can hold, sorted."""
    found = set(ORDINALS) | {ordinal.lower() for ordinal in ORDINALS}
    found.update(FRIENDS)
    for story in STORIES:
        found.update(word for owner in story.owners for word in owner)
        found.update(story.items)
        for template in _templates(story):
            found.update(re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}", " ", template)))
    return tuple(sorted(found))


def _templates(story: Story) -> Iterable[str]:
    yield from story.starts
    yield from story.questions
    for changes in story.changes.values():
        yield from changes


def _between(rng: random.Random, low: int, high: int) -> int:
    """An integer in low..high, both included."""
    return low + int(rng.random() * (high - low + 1))


def _pick(rng: random.Random, choices: Sequence[Item]) -> Item:
    return choices[int(rng.random() * len(choices))]


def _draw_steps(rng: random.Random) -> tuple[int, tuple[Step, ...]]:
    """A start and its steps; every total lies in 1..999 and every operand is at least 2."""
    start = total = _between(rng, 5, 99)
    steps = []
    for _ in range(_between(rng, MIN_STEPS, MAX_STEPS)):
        step = _draw_step(rng, total)
        steps.append(step)
        total = step.result
    return start, tuple(steps)


def _draw_step(rng: random.Random, total: int) -> Step:
    if 2 <= total <= 99 and rng.random() < 0.4:
        operand = _between(rng, 2, 9)
        return Step("*", operand, total * operand)
    adds = total < 10 or (total + 99 <= LARGEST_TOTAL and rng.random() < 0.5)
    if adds:
        operand = _between(rng, 2, 99)
        return Step("+", operand, total + operand)
    operand = _between(rng, 2, min(99, total - 1))
    return Step("-", operand, total - operand)


def _tell(rng: random.Random, start: int, steps: Sequence[Step]) -> str:
    """The story: where it starts, one sentence per step, and the question."""
    story = _pick(rng, STORIES)
    name, he, him = _pick(rng, story.owners)
    item = _pick(rng, story.items)
    sentences = [_pick(rng, story.starts).format(name=name, n=start, item=item)]
    for ordinal, step in zip(ORDINALS, steps, strict=False):
        told = _pick(rng, story.changes[step.operator])
        friend = _pick(rng, FRIENDS)
        fields = {"he": he, "him": him, "friend": friend, "n": step.operand, "item": item}
        sentences.append(f"{ordinal} {told.format(**fields)}")
    sentences.append(_pick(rng, story.questions).format(name=name, item=item))
    return " ".join(sentences)


def _work(start: int, steps: Sequence[Step]) -> str:
    """The worked answer: the running total, then the final number after the mark."""
    worked = [str(start)]
    for ordinal, step in zip(ORDINALS, steps, strict=False):
        worked.append(f"{ordinal.lower()} {step.operator} {step.operand} = {step.result}")
    return f"{', '.join(worked)} {ANSWER_MARK} {steps[-1].result}"
