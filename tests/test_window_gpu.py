"""The CUDA engine's window steps on a GPU, against the same programs in float64.

Bounds as in `test_cuda_engine`: a step's logits may be at most twice as far from float64 as those
of the module run with plain torch operators in the engine's dtype.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from canvases import Shape, block_tokens, greedy
from window_cases import WindowShape

from lacache_trt.engines.base import Int, Sampling, StepOutputs
from lacache_trt.model.config import ModelConfig
from lacache_trt.model.programs import ReuseKVProgram, WindowProgram

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
gpu_models = pytest.importorskip("gpu_models")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CASES = {
    "block": WindowShape(Shape(383, 32, (190, 100), (0, 20), (383, 380), 1), (0, 0), (0, 0)),
    "suffix": WindowShape(Shape(383, 32, (127, 255), (5, 0), (383, 383), 2), (0, 0), (224, 96)),
    "with_predecessor": WindowShape(Shape(100, 8, (50,), (3,), (97,), 3), (1,), (0,)),
    "everything": WindowShape(Shape(130, 16, (40, 60), (0, 0), (130, 129), 4), (40, 60), (74, 54)),
}


class KeepingSession(gpu_models.DeviceSession):  # type: ignore[misc, name-defined]
    """`DeviceSession` with the approximate caches, their K and V put in place by hand."""

    def reuse_kv(self, tokens: Int, sampling: Sampling, logit_columns: Int) -> StepOutputs:
        """One step that keeps K and V."""
        inputs = (torch.from_numpy(tokens).cuda(), *self._geometry, *self.caches)
        outputs = self._run(ReuseKVProgram(self._model), inputs, sampling, logit_columns)
        self.kept = outputs[5:]
        return StepOutputs(*(value.cpu().numpy() for value in outputs[:5]))

    def window(
        self, tokens: Int, columns: Int, block: Int, sampling: Sampling, logit_columns: Int
    ) -> StepOutputs:
        """One step of the window."""
        window = [torch.from_numpy(array).cuda() for array in (tokens, columns)]
        ranges = self._geometry[1:]
        inputs = (*window, *ranges, torch.from_numpy(block).cuda(), *self.kept)
        outputs = self._run(WindowProgram(self._model), inputs, sampling, logit_columns)
        with torch.inference_mode():
            for kept, fresh in zip(self.kept, outputs[5:], strict=True):
                for row, places in enumerate(columns.tolist()):
                    for slot, column in enumerate(places):
                        if column >= 0:
                            kept[:, row, :, column] = fresh[:, row, :, slot]
        return StepOutputs(*(value.cpu().numpy() for value in outputs[:5]))

    def _run(
        self,
        program: torch.nn.Module,
        inputs: tuple[torch.Tensor, ...],
        sampling: Sampling,
        logit_columns: Int,
    ) -> tuple[torch.Tensor, ...]:
        extra = (*vars(sampling).values(), logit_columns)
        on_device = (torch.from_numpy(np.ascontiguousarray(array)).cuda() for array in extra)
        with torch.inference_mode():
            outputs: tuple[torch.Tensor, ...] = program(*inputs, *on_device)
        return outputs


def check(found: StepOutputs, truth: StepOutputs, rounded: StepOutputs) -> None:
    """Logits as near to float64 as plain torch operators come."""
    error = np.abs(found.logits - truth.logits.astype(np.float64))
    allowed = np.abs(rounded.logits - truth.logits.astype(np.float64))
    assert np.isfinite(found.logits).all()
    assert error.max() <= 2 * allowed.max(), (error.max(), allowed.max())
    assert np.sqrt((error**2).mean()) <= 1.5 * np.sqrt((allowed**2).mean())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", gpu_models.CONFIGS)
def test_steps_against_float64(name: str, dtype: torch.dtype, case: str) -> None:
    """fill, reuse_kv, then three windows with other tokens each time."""
    config: ModelConfig = gpu_models.CONFIGS[name]
    weights, window = gpu_models.random_weights(config, dtype), CASES[case]
    truth = KeepingSession(config, weights, torch.float64)
    rounded = KeepingSession(config, weights, dtype)
    canvas, block = window.shape.canvas(config), window.shape.block_columns
    sampling = greedy(window.shape.rows, config)
    rng = np.random.default_rng(5)
    with gpu_models.engine_of(config, weights) as engine:
        session = engine.session()
        everyone = (session, truth, rounded)
        tokens = block_tokens(canvas, block)
        for each in everyone:
            each.fill(canvas, block)
        plain = session.reuse(tokens, sampling, block)
        check(*(each.reuse_kv(tokens, sampling, block) for each in everyone))
        again = session.reuse_kv(tokens, sampling, block)
        for field, value in vars(plain).items():
            np.testing.assert_array_equal(value, getattr(again, field), err_msg=field)
        for _ in range(3):
            np.put_along_axis(
                canvas.tokens, block[:, :1], rng.integers(0, 90, (window.shape.rows, 1)), 1
            )
            inputs = (window.tokens(canvas), window.columns, block, sampling, block)
            outputs = [each.window(*inputs) for each in everyone]
            check(*outputs)
            repeated = session.window(*inputs)
            for field, value in vars(outputs[0]).items():
                np.testing.assert_array_equal(value, getattr(repeated, field), err_msg=field)
        session.close()
