"""Train tiny-llada, the masked-diffusion model that ships, and write it in LLaDA's format.

    PYTHONPATH=. python examples/train_tiny.py --out tiny-llada --max-seconds 540

The whole run, its data and its final evaluation included, ends within ``--max-seconds``: the
learning rate follows the clock (constant, then linear to zero). The weights are saved at every
evaluation, each file whole or absent, so a run that is cut short leaves its latest state. What was
run and measured is in ``training.json``. On a CPU, try
``--steps 20 --batch-size 8 --problems 2000 --final-problems 4``.
"""

from __future__ import annotations

import time

STARTED = time.monotonic()

import argparse  # noqa: E402  (the clock starts before the slow imports)
import copy  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import shlex  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402
from tiny.checkpoint import (  # noqa: E402
    Shape,
    build_llama,
    load_llama,
    save_static,
    save_weights,
    write_json,
)
from tiny.data import GEN_LENGTH, Dataset, load, problems_of  # noqa: E402
from tiny.decoding import accuracy  # noqa: E402
from tiny.training import Settings, Trainer  # noqa: E402

from lacache_trt.demo.problems import SPLITS, Problem, prior_score, split_digest  # noqa: E402

BLOCK_LENGTH = 32


def parse_arguments() -> argparse.Namespace:
    """The command line; defaults are those of the shipped model."""
    parser = argparse.ArgumentParser(description="train tiny-llada")
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory of the checkpoint")
    add("--init", type=Path, help="start from the weights of this directory")
    add("--seed", type=int, default=0)
    add("--max-seconds", type=float, default=540.0, help="length of the whole run")
    add("--reserve-seconds", type=float, default=60.0, help="kept for the final evaluation")
    add("--steps", type=int, help="stop after this many steps (default: only the clock)")
    add("--problems", type=int, default=2_000_000, help="training problems to generate")
    add("--workers", type=int, default=os.cpu_count() or 1)
    add("--batch-size", type=int, default=Settings.batch_size)
    add("--learning-rate", type=float, default=Settings.learning_rate)
    add("--d-model", type=int, default=Shape.d_model)
    add("--layers", type=int, default=Shape.n_layers)
    add("--mlp", type=int, default=Shape.mlp_hidden_size)
    add("--eval-seconds", type=float, default=45.0, help="time between tune evaluations")
    add("--tune-problems", type=int, default=256, help="problems of a tune evaluation")
    add("--final-problems", type=int, default=2000, help="problems of the final evaluation")
    add("--digest-problems", type=int, default=10_000, help="problems hashed for each split")
    add("--no-compile", action="store_true", help="do not try torch.compile")
    return parser.parse_args()


class Report:
    """``training.json``, rewritten as a whole after each addition; of lists, the end is printed."""

    def __init__(self, directory: Path, content: dict[str, object]) -> None:
        self.path = directory / "training.json"
        self.content = content

    def add(self, **entries: object) -> None:
        """Add entries, print them, and save."""
        self.content.update(entries)
        self.content["seconds"] = round(time.monotonic() - STARTED, 1)
        write_json(self.path, self.content)
        newest = {
            key: entry[-1] if isinstance(entry, list) else entry for key, entry in entries.items()
        }
        print(f"[{self.content['seconds']:>6}s] {json.dumps(newest)}", flush=True)


def first_entries(arguments: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """What is known before training: the command and what it runs on."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "seed": arguments.seed,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "gen_length": GEN_LENGTH,
        "problems": arguments.problems,
    }


def describe_data(count: int, seed: int) -> dict[str, object]:
    """Hashes of the first problems of each split, and what guessing would score."""
    return {
        "split_sha256": {split: split_digest(split, count, seed) for split in SPLITS},
        "split_sha256_problems": count,
        "prior_score": {split: prior_score(split, count, seed) for split in SPLITS[1:]},
    }


def train(trainer: Trainer, arguments: argparse.Namespace, report: Report, tune: Dataset) -> None:
    """Step until the clock or ``--steps`` says stop; evaluate and save on the way."""
    texts = problems_of("tune", len(tune), arguments.seed)
    began = last_evaluation = last_print = time.monotonic()
    budget = arguments.max_seconds - arguments.reserve_seconds - (began - STARTED)
    history: list[dict[str, float]] = []
    while True:
        now = time.monotonic()
        progress = max(
            (now - began) / budget, trainer.steps / arguments.steps if arguments.steps else 0.0
        )
        if progress >= 1.0:
            break
        trainer.step(progress)
        if trainer.steps % 20 == 0 or arguments.steps:
            trainer.wait()
        if now - last_print > 5.0 or trainer.steps == 1:
            last_print = now
            print(f"[{now - STARTED:6.1f}s] {trainer.describe(progress)}", flush=True)
        if now - last_evaluation > arguments.eval_seconds:
            history.append(evaluate_now(trainer, tune, texts))
            save_weights(arguments.out, trainer.average.state_dict(), trainer.shape)
            report.add(history=history)
            last_evaluation = time.monotonic()
    print(trainer.describe(1.0), flush=True)
    save_weights(arguments.out, trainer.average.state_dict(), trainer.shape)
    report.add(steps=trainer.steps, train_seconds=round(time.monotonic() - began, 1))
    report.add(losses=trainer.losses)


def evaluate_now(trainer: Trainer, tune: Dataset, texts: list[Problem]) -> dict[str, float]:
    """Tune accuracy of the averaged weights: one and eight tokens per forward."""

    def score(steps: int) -> float:
        return accuracy(
            trainer.average, tune, texts, steps=steps, block_length=BLOCK_LENGTH, bf16=trainer.bf16
        )

    return {
        "step": trainer.steps,
        "loss": trainer.recent_loss(),
        "tune": score(GEN_LENGTH),
        "tune_8_per_forward": score(GEN_LENGTH // 8),
    }


def evaluate_saved(
    arguments: argparse.Namespace, shape: Shape, device: torch.device, report: Report
) -> None:
    """Score the saved file: its bf16 weights, computed in float32 without TF32."""
    model = load_llama(arguments.out, shape, device)
    report.add(evaluated="bf16 weights of model.safetensors, float32 arithmetic without TF32")
    count = arguments.final_problems
    plan = [
        ("held-out", count, BLOCK_LENGTH, GEN_LENGTH),
        ("held-out", count, BLOCK_LENGTH, GEN_LENGTH // 8),
        ("tune", count // 2, BLOCK_LENGTH, GEN_LENGTH),
        ("tune", count // 2, BLOCK_LENGTH, GEN_LENGTH // 8),
        ("tune", count // 2, 8, GEN_LENGTH),
        ("tune", count // 2, 16, GEN_LENGTH),
        ("tune", count // 2, GEN_LENGTH, GEN_LENGTH),
    ]
    scores: list[dict[str, object]] = []
    for split, problems, block_length, steps in plan:
        data = load(split, problems, arguments.seed, workers=1).to(device)
        texts = problems_of(split, problems, arguments.seed)
        found = accuracy(model, data, texts, steps=steps, block_length=block_length, bf16=False)
        scores.append(
            {
                "split": split,
                "problems": problems,
                "block_length": block_length,
                "steps": steps,
                "accuracy": found,
            }
        )
        report.add(scores=scores)


def main() -> int:
    """Train, save, evaluate, report."""
    arguments = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = Shape(arguments.d_model, arguments.layers, arguments.mlp)
    torch.manual_seed(arguments.seed)
    torch.backends.cuda.enable_cudnn_sdp(False)
    save_static(
        arguments.out,
        shape,
        {
            "gen_length": GEN_LENGTH,
            "block_length": BLOCK_LENGTH,
            "steps": GEN_LENGTH,
            "remasking": "low_confidence",
            "temperature": 0.0,
        },
    )
    report = Report(arguments.out, first_entries(arguments, device))
    report.add(**describe_data(arguments.digest_problems, arguments.seed))
    data = load("train", arguments.problems, arguments.seed, arguments.workers).to(device)
    tune = load("tune", arguments.tune_problems, arguments.seed, workers=1).to(device)
    model = (
        build_llama(shape)
        if arguments.init is None
        else load_llama(arguments.init, shape, torch.device("cpu"))
    )
    model = model.to(device).train()
    settings = Settings(arguments.batch_size, arguments.learning_rate, seed=arguments.seed)
    trainer = Trainer(model, copy.deepcopy(model), shape, data, settings)
    report.add(parameters=sum(weight.numel() for weight in model.parameters()))
    compiled = "not asked for" if arguments.no_compile else trainer.compile()
    report.add(rows=len(data), torch_compile=compiled)
    train(trainer, arguments, report, tune)
    evaluate_saved(arguments, shape, device, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
