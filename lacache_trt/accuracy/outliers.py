"""Worst errors on random models with planted outlier channels, against float64.

Large language models have a few channels that are far larger than the others, in the norms' outputs
and before the down projection. A small trained model hardly has any, so here they are planted: some
channels of each layer's norms and some columns of the up projection are multiplied by a power of
two, and the rows of the weights that read them divided by it. In real arithmetic nothing changes,
so 16 bits stay as good as they were and only the quantisation has a harder task.

The truth is the same bf16 weights in float64. An error is given in bf16 units in the last place of
the largest value of its row, so that an error beside a zero is not called infinite.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lacache_trt.accuracy.decode import on_device, predict
from lacache_trt.accuracy.models import Case, Weights, build_model, quantised_linears
from lacache_trt.accuracy.report import OutlierResult
from lacache_trt.decoding import rows
from lacache_trt.engines.base import Canvas, Int
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.config import ModelConfig, parameter_shapes, projection_sizes
from lacache_trt.model.programs import FillProgram

FACTORS = (1.0, 64.0, 4096.0)
PLANTED = 4
CACHES = ("embed", "q", "k", "v", "fa_max", "fa_sum", "fa_acc")
MODEL = ModelConfig(
    family="llada",
    hidden_size=256,
    num_layers=6,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=512,
    vocab_size=512,
    rope_theta=10000.0,
    norm_eps=1e-5,
    max_length=256,
    qkv_bias=False,
    tied_head=False,
    logit_shift=False,
    mask_id=511,
    eos_ids=(510,),
    dtype="bfloat16",
)
_PROMPTS = (24, 24)
_WIDTH = 16
_FRACTION_BITS = 7


def outlier_results(
    cases: Sequence[Case], models: int, seed: int, device: torch.device
) -> tuple[OutlierResult, ...]:
    """The worst errors of each decoded case over all models, for each planted factor.

    Cases of tiny-llada name layers; the random models have as many.
    """
    found = []
    for factor in FACTORS if models else ():
        worst: dict[str, dict[str, float]] = {}
        for index in range(models):
            for name, errors in _errors(cases, factor, seed + index, device).items():
                known = worst.setdefault(name, errors)
                worst[name] = {key: max(known[key], value) for key, value in errors.items()}
        for name, errors in worst.items():
            caches = {key: value for key, value in errors.items() if key != "logits"}
            found.append(OutlierResult(name, factor, errors["logits"], caches))
    return tuple(found)


def planted_weights(seed: int, factor: float) -> dict[str, Tensor]:
    """Random bf16 weights whose activations keep their scale, with outlier channels."""
    rng = np.random.default_rng(seed)
    values = {name: rng.standard_normal(shape) for name, shape in parameter_shapes(MODEL).items()}
    for name, value in values.items():
        if name.endswith("norm.weight"):
            value *= 0.1
            value += 1.0
        elif name != "embed.weight":
            value *= value.shape[0] ** -0.5
        if name.endswith(("down.weight", "attn_out.weight")):
            value *= (2 * MODEL.num_layers) ** -0.5
    for layer in range(MODEL.num_layers):
        prefix = f"layers.{layer}."
        norms = {"attn_norm": tuple(projection_sizes(MODEL, layer)), "ffn_norm": ("gate_up",)}
        for norm, readers in norms.items():
            channels = rng.choice(MODEL.hidden_size, PLANTED, replace=False)
            values[f"{prefix}{norm}.weight"][channels] *= factor
            for reader in readers:
                values[f"{prefix}{reader}.weight"][channels] /= factor
        channels = rng.choice(MODEL.intermediate_size, PLANTED, replace=False)
        values[prefix + "gate_up.weight"][:, MODEL.intermediate_size + channels] *= factor
        values[prefix + "down.weight"][channels] /= factor
    return {name: torch.from_numpy(value).to(torch.bfloat16) for name, value in values.items()}


def row_ulps(value: Tensor, truth: Tensor) -> float:
    """Largest |value - truth| in bf16 ulps of each row's largest |truth|; a row is [..., :]."""
    exact = truth.double()
    largest = exact.abs().amax(dim=-1, keepdim=True)
    _, exponent = torch.frexp(largest)
    ulp = torch.ldexp(torch.ones_like(largest), exponent - 1 - _FRACTION_BITS)
    return float(((value.double() - exact).abs() / ulp).max())


def _errors(
    cases: Sequence[Case], factor: float, seed: int, device: torch.device
) -> dict[str, dict[str, float]]:
    weights = {name: value.to(device) for name, value in planted_weights(seed, factor).items()}
    canvas, columns = _canvas(seed)
    amax = _calibrated(weights, *_canvas(seed + 10_000), device)
    truth = _outputs(Case("float64", torch.float64), weights, amax, canvas, columns, device)
    found = {}
    for case in cases:
        outside = not set(quantised_linears(MODEL, case)) <= set(amax)
        if not case.decoded or outside:
            continue
        got = _outputs(case, weights, amax, canvas, columns, device)
        found[case.name] = {name: row_ulps(got[name], truth[name]) for name in truth}
    return found


def _canvas(seed: int) -> tuple[Canvas, Int]:
    """Random prompts and a half decoded first block."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(0, MODEL.mask_id - 1, count).tolist()) for count in _PROMPTS]
    config = GenerationConfig(gen_length=2 * _WIDTH, block_length=_WIDTH, steps=2 * _WIDTH)
    canvas = rows.pad_left(prompts, config.gen_length, MODEL)
    first = np.zeros(len(prompts), np.int32)
    columns = rows.columns_of_blocks(first, canvas.tokens.shape[1], config)
    decoded = columns[:, : _WIDTH // 2]
    drawn = rng.integers(0, MODEL.mask_id - 1, decoded.shape).astype(np.int32)
    np.put_along_axis(canvas.tokens, decoded, drawn, axis=1)
    return canvas, columns


@torch.inference_mode()
def _calibrated(
    weights: Weights, canvas: Canvas, columns: Int, device: torch.device
) -> dict[str, Tensor]:
    model, ops = build_model(MODEL, weights, Case("bf16"), {})
    amax: dict[str, Tensor] = {}

    def watch(name: str, x: Tensor) -> None:
        amax[name] = x.float().abs().flatten(0, -2).amax(dim=0)

    ops.on_input = watch
    predict(model, on_device(canvas, device), torch.from_numpy(columns).to(device))
    return amax


@torch.inference_mode()
def _outputs(
    case: Case,
    weights: Weights,
    amax: dict[str, Tensor],
    canvas: Canvas,
    columns: Int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Logits and the caches of `fill` outside the block, where they are defined."""
    model, _ = build_model(MODEL, weights, case, amax)
    state, block = on_device(canvas, device), torch.from_numpy(columns).to(device)
    _, _, logits = predict(model, state, block, logits=True)
    before = int(columns[:, 0].min())
    caches = FillProgram(model)(*state, block)
    found = {"logits": logits}
    for name, cache in zip(CACHES, caches, strict=True):
        found[name] = cache[:, :before] if name == "embed" else cache[:, :, :before]
    return found
