"""ONNX function body of SampleBlock; the rule is in `op`, the hash in `noise`."""

# mypy: ignore-errors
from __future__ import annotations

from onnxscript import script

from lacache_trt.plugins.functions import FLOAT, INT32, INT64, LACACHE
from lacache_trt.plugins.functions import FUNCTION_OPSET as op
from lacache_trt.plugins.sample_block.noise import KEYS, PRIME

SEED_KEY, STEP_KEY, POSITION_KEY, ID_KEY, LAST_KEY = KEYS


@script(LACACHE, default_opset=op)
def SampleBlock(
    logits,
    positions,
    temperature,
    seed,
    step,
    guide_row,
    cfg_scale,
    suppress_ids,
    confidence_exclude_ids,
):
    lowest = op.Constant(value_float=float("-inf"))
    infinity = op.Constant(value_float=float("inf"))
    zero = op.Constant(value_float=0.0)
    vocabulary = op.Range(
        op.Constant(value_int=0),
        op.Squeeze(op.Shape(logits, start=2, end=3)),
        op.Constant(value_int=1),
    )
    own = op.Cast(logits, to=FLOAT)
    guide = op.Gather(own, guide_row, axis=0)
    strength = op.Unsqueeze(op.Add(cfg_scale, op.Constant(value_float=1.0)), [1, 2])
    guided = op.Add(guide, op.Mul(strength, op.Sub(own, guide)))
    row_numbers = op.Range(
        op.Constant(value_int=0),
        op.Squeeze(op.Shape(logits, start=0, end=1)),
        op.Constant(value_int=1),
    )
    alone = op.Unsqueeze(op.Equal(op.Cast(guide_row, to=INT64), row_numbers), [1, 2])
    chosen = op.Where(alone, own, guided)
    suppressed = op.ReduceMax(
        op.Cast(op.Equal(op.Unsqueeze(op.Cast(suppress_ids, to=INT64), [2]), vocabulary), to=FLOAT),
        [1],
        keepdims=0,
    )
    half = op.Constant(value_float=0.5)
    scores = op.Where(op.Unsqueeze(op.Greater(suppressed, half), [1]), lowest, chosen)

    prime = op.Constant(value_int=PRIME)
    mixed = op.Mod(
        op.Add(op.Mod(op.Cast(seed, to=INT64), prime), op.Constant(value_int=SEED_KEY)), prime
    )
    square = op.Mod(op.Mul(mixed, mixed), prime)
    state = op.Mod(op.Mul(op.Mod(op.Mul(square, square), prime), mixed), prime)
    mixed = op.Mod(
        op.Add(
            op.Add(state, op.Mod(op.Cast(step, to=INT64), prime)), op.Constant(value_int=STEP_KEY)
        ),
        prime,
    )
    square = op.Mod(op.Mul(mixed, mixed), prime)
    state = op.Unsqueeze(op.Mod(op.Mul(op.Mod(op.Mul(square, square), prime), mixed), prime), [1])
    mixed = op.Mod(
        op.Add(
            op.Add(state, op.Mod(op.Cast(positions, to=INT64), prime)),
            op.Constant(value_int=POSITION_KEY),
        ),
        prime,
    )
    square = op.Mod(op.Mul(mixed, mixed), prime)
    state = op.Unsqueeze(op.Mod(op.Mul(op.Mod(op.Mul(square, square), prime), mixed), prime), [2])
    mixed = op.Mod(op.Add(op.Add(state, vocabulary), op.Constant(value_int=ID_KEY)), prime)
    square = op.Mod(op.Mul(mixed, mixed), prime)
    state = op.Mod(op.Mul(op.Mod(op.Mul(square, square), prime), mixed), prime)
    mixed = op.Mod(op.Add(state, op.Constant(value_int=LAST_KEY)), prime)
    square = op.Mod(op.Mul(mixed, mixed), prime)
    state = op.Mod(op.Mul(op.Mod(op.Mul(square, square), prime), mixed), prime)
    bits = op.Cast(op.Div(state, op.Constant(value_int=256)), to=FLOAT)
    uniform = op.Mul(op.Add(bits, half), op.Constant(value_float=1.1920928955078125e-07))
    noise = op.Neg(op.Log(op.Neg(op.Log(uniform))))
    heat = op.Unsqueeze(temperature, [1, 2])
    noisy = op.Where(op.Greater(heat, zero), op.Add(scores, op.Mul(heat, noise)), scores)
    best = op.ArgMax(noisy, axis=2, keepdims=1)

    excluded = op.ReduceMax(
        op.Cast(
            op.Equal(op.Unsqueeze(op.Cast(confidence_exclude_ids, to=INT64), [2]), vocabulary),
            to=FLOAT,
        ),
        [1],
        keepdims=0,
    )
    # A broken logit stays, even of an excluded id: it has to reach the confidence.
    removed = op.And(op.Unsqueeze(op.Greater(excluded, half), [1]), op.Less(scores, infinity))
    kept = op.Where(removed, lowest, scores)
    peak = op.ReduceMax(kept, [2], keepdims=1)
    shifted = op.Sub(kept, peak)
    powers = op.Exp(shifted)
    total = op.ReduceSum(powers, [2], keepdims=1)
    log_total = op.Log(total)
    picked = op.GatherElements(shifted, best, axis=2)
    confidence = op.Squeeze(op.Exp(op.Sub(picked, log_total)), [2])
    top, _unused = op.TopK(shifted, op.Constant(value_ints=[2]), axis=2)
    odds = op.Div(op.Exp(top), total)
    margin = op.Squeeze(
        op.Neg(op.Sub(op.Slice(odds, [1], [2], [2]), op.Slice(odds, [0], [1], [2]))), [2]
    )
    entropy_terms = op.Where(
        op.Equal(powers, zero), zero, op.Mul(powers, op.Sub(shifted, log_total))
    )
    neg_entropy = op.Div(op.ReduceSum(entropy_terms, [2], keepdims=0), op.Squeeze(total, [2]))
    token = op.Cast(op.Squeeze(best, [2]), to=INT32)
    return token, confidence, margin, neg_entropy
