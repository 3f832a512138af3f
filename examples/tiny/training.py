"""One training step, its learning rate and the running average of the weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from tiny.checkpoint import Shape
from tiny.data import GEN_LENGTH, Dataset, model_inputs
from tiny.objective import draw_hidden, masked_loss
from tiny.vocabulary import MASK, build_tokenizer


@dataclass(frozen=True)
class Settings:
    """Optimizer settings: AdamW, a short warm-up, constant, then linear to zero."""

    batch_size: int = 512
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    clip_norm: float = 1.0
    warmup_steps: int = 200
    decay_share: float = 0.4
    average_decay: float = 0.999
    seed: int = 0


class Trainer:
    """The model in training, its running average, and the optimizer."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        average: LlamaForCausalLM,
        shape: Shape,
        data: Dataset,
        settings: Settings,
    ) -> None:
        device = data.prompts.device
        self.model, self.average, self.shape = model, average.train(False), shape
        self.data, self.settings = data, settings
        self.bf16 = device.type == "cuda"
        self.steps = 0
        self.losses: list[tuple[int, float]] = []
        self._device = device
        self._mask_id = build_tokenizer().token_to_id(MASK)
        self._generator = torch.Generator(device).manual_seed(settings.seed)
        self._optimizer = _optimizer(model, settings)
        self._loss_sum = torch.zeros((), device=device)
        self._loss_steps = 0

    def compile(self) -> str:
        """Compile the decoder layers if that works here and changes nothing; say what happened."""
        state = self._generator.get_state()
        with torch.no_grad():
            expected = float(self._loss())
        layers = list(self.model.model.layers)
        for layer in layers:
            layer.compile(dynamic=False)
        try:
            self._generator.set_state(state)
            loss = self._loss()
            loss.backward()
            problem = "" if abs(float(loss.detach()) - expected) < 0.01 * expected else "other loss"
        except Exception as error:  # any compiler failure; eager training does the same work
            problem = f"{type(error).__name__}: {str(error)[:200]}"
        self.model.zero_grad(set_to_none=True)
        self._generator.set_state(state)
        if not problem:
            return "decoder layers"
        for layer in layers:
            layer._compiled_call_impl = None
        return f"failed, trained eagerly: {problem}"

    def step(self, progress: float) -> None:
        """One optimizer step; ``progress`` in 0..1 places it on the learning-rate curve."""
        settings = self.settings
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate * self.rate(progress)
        loss = self._loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        decay = min(settings.average_decay, self.steps / (self.steps + 9))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.parameters()), list(self.model.parameters()), 1 - decay
            )
        self._loss_sum += loss.detach()
        self._loss_steps += 1

    def rate(self, progress: float) -> float:
        """The learning rate as a share of its peak."""
        warmup = min(1.0, (self.steps + 1) / self.settings.warmup_steps)
        return warmup * min(1.0, max(0.0, 1.0 - progress) / self.settings.decay_share)

    def wait(self) -> None:
        """Let the device catch up, so that the clock tells the truth."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def describe(self, progress: float) -> str:
        """A line for the log; also records the mean loss since the line before."""
        mean = float(self._loss_sum) / max(1, self._loss_steps)
        if mean != mean:
            raise ArithmeticError(f"the loss is NaN at step {self.steps}; lower --learning-rate")
        self.losses.append((self.steps, round(mean, 5)))
        self._loss_sum.zero_()
        self._loss_steps = 0
        rate = self.settings.learning_rate * self.rate(progress)
        return f"step {self.steps} loss {mean:.4f} lr {rate:.2e} progress {progress:.3f}"

    def recent_loss(self) -> float:
        """The loss of the latest log line."""
        return self.losses[-1][1]

    def _loss(self) -> Tensor:
        """The loss of a fresh random batch."""
        data, device = self.data, self._device
        rows = torch.randint(
            len(data), (self.settings.batch_size,), device=device, generator=self._generator
        )
        answers = data.answers[rows].long()
        drawn = draw_hidden(data.answer_lengths[rows], GEN_LENGTH, self._generator)
        canvas = answers.masked_fill(drawn.hidden, self._mask_id)
        tokens = torch.cat([data.prompts[rows].long(), canvas], dim=1)
        inputs = model_inputs(
            data.prompt_lengths[rows], torch.bfloat16 if self.bf16 else torch.float32
        )
        with self._autocast():
            logits = self.model(
                input_ids=tokens,
                position_ids=inputs.positions,
                attention_mask=inputs.attention_mask,
                logits_to_keep=GEN_LENGTH,
            ).logits
        return masked_loss(logits, answers, drawn.weight)

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if self.bf16 else nullcontext()


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the norms' gains alone."""
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=fused)
