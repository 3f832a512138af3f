"""The ops: torch reference against float64 brute force, ONNX function against the torch reference.

Each function is executed by onnxruntime in a model of one node. Bounds, over all elements:
    attention outputs and state   max|a - b| / max|b| <= 2e-6 in float32, 2e-3 in float16
    sampler                       token equal unless the best two scores are within 2e-5;
                                  confidence and margin 2e-6, neg_entropy 2e-6 (1 + log V),
                                  absolute; five times that in guided rows, whose mixture of
                                  logits of magnitude 100 is rounded first
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from canvases import Shape, bounded, relative_error, shapes
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lacache_trt.plugins.attention.op import ATTENTION
from lacache_trt.plugins.attention_fill.op import ATTENTION_FILL
from lacache_trt.plugins.attention_reuse.op import ATTENTION_REUSE
from lacache_trt.plugins.functions import OPSET_VERSION, all_functions
from lacache_trt.plugins.sample_block import noise
from lacache_trt.plugins.sample_block.op import SAMPLE_BLOCK, gumbel_noise
from lacache_trt.plugins.spec import DOMAIN, NODE_ATTRIBUTES, VERSION, OpSpec

Array = NDArray[Any]
BOUND = {"float32": 2e-6, "float16": 2e-3}
TOKEN_GAP = 2e-5
SCORE_BOUND = 2e-6
GUIDED = 5
_TYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "int32": ir.DataType.INT32,
}
head_counts = st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 1), (6, 3)])


@cache
def one_node_session(spec: OpSpec, signature: tuple[tuple[str, int], ...]) -> ort.InferenceSession:
    """A model that is the op alone; `signature` is (dtype, rank) of each input."""
    inputs = [
        ir.Value(
            name=name,
            type=ir.TensorType(_TYPES[dtype]),
            shape=ir.Shape([f"{name}{axis}" for axis in range(rank)]),
        )
        for name, (dtype, rank) in zip(spec.inputs, signature, strict=True)
    ]
    node = ir.node(
        spec.name,
        inputs,
        NODE_ATTRIBUTES,
        domain=DOMAIN,
        outputs=[ir.Value(name=name) for name in spec.outputs],
    )
    graph = ir.Graph(
        inputs, node.outputs, nodes=[node], opset_imports={"": OPSET_VERSION, DOMAIN: VERSION}
    )
    function = all_functions()[spec.name]
    model = ir.Model(graph, ir_version=10, functions=[function])
    options = ort.SessionOptions()
    options.log_severity_level = 3
    proto = ir.serde.serialize_model(model)
    return ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run_function(spec: OpSpec, inputs: dict[str, Array]) -> list[Array]:
    """Outputs of the ONNX function."""
    signature = tuple((array.dtype.name, array.ndim) for array in inputs.values())
    return one_node_session(spec, signature).run(None, inputs)


def run_reference(spec: OpSpec, inputs: dict[str, Array]) -> list[Array]:
    """Outputs of the registered torch operator."""
    return [value.numpy() for value in spec.call(*map(torch.from_numpy, inputs.values()))]


def widened(inputs: dict[str, Array]) -> dict[str, Array]:
    """The same values with every float in float64."""
    return {
        name: array.astype(np.float64) if array.dtype.kind == "f" else array
        for name, array in inputs.items()
    }


def attention_inputs(
    shape: Shape, heads: tuple[int, int], head_dim: int, dtype: str
) -> dict[str, Array]:
    """Random q, k, v of a canvas; scores have a standard deviation of about 2."""
    rng = np.random.default_rng(shape.seed)
    queries, keys = heads

    def normal(count: int, rows: int, scale: float) -> Array:
        values = rng.standard_normal((shape.rows, count, rows, head_dim)) * scale
        return values.astype(dtype)

    return {
        "q": normal(queries, shape.length, 2.0),
        "k": normal(keys, shape.length, 1.0),
        "v": normal(keys, shape.length, 1.0),
        "valid_from": np.array(shape.valid_from, np.int32),
        "valid_to": np.array(shape.valid_to, np.int32),
        "block_columns": shape.block_columns,
    }


def brute_attention(
    q: Array, keys: list[Array], values: list[Array]
) -> tuple[float, float, Array, Array]:
    """(max, sum, accumulator, output) of one query over lists of keys and values, in float64."""
    if not keys:
        return -math.inf, 0.0, np.zeros(len(q)), np.full(len(q), np.nan)
    scores = [float(q @ key) / math.sqrt(len(q)) for key in keys]
    peak = max(scores)
    weights = [math.exp(score - peak) for score in scores]
    accumulator = sum(weight * value for weight, value in zip(weights, values, strict=True))
    return peak, sum(weights), accumulator, accumulator / sum(weights)


def columns_of(inputs: dict[str, Array], row: int) -> tuple[list[int], list[int]]:
    """Valid columns outside and inside the block of a row."""
    block = set(inputs["block_columns"][row].tolist())
    valid = range(int(inputs["valid_from"][row]), int(inputs["valid_to"][row]))
    return [c for c in valid if c not in block], [c for c in valid if c in block]


attention_cases = given(
    shape=shapes(max_rows=2, max_prompt=12),
    heads=head_counts,
    head_dim=st.sampled_from([2, 8, 16]),
)


@bounded(20)
@attention_cases
def test_attention_references_are_the_formula(
    shape: Shape, heads: tuple[int, int], head_dim: int
) -> None:
    inputs = widened(attention_inputs(shape, heads, head_dim, "float32"))
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    plain = {name: inputs[name] for name in ATTENTION.inputs}
    (out,) = run_reference(ATTENTION, plain)
    fa_max, fa_sum, fa_acc = run_reference(ATTENTION_FILL, inputs)
    reused = run_reference(ATTENTION_REUSE, reuse_inputs(inputs, (fa_max, fa_sum, fa_acc)))[0]
    group = heads[0] // heads[1]
    rng = np.random.default_rng(shape.seed)
    for row in range(shape.rows):
        outside, inside = columns_of(inputs, row)
        for column in rng.integers(0, shape.length, 4):
            for head in range(heads[0]):
                query, serving = q[row, head, column], head // group
                keys, values = k[row, serving], v[row, serving]
                every = [*outside, *inside]
                _, _, _, expected = brute_attention(
                    query, [keys[c] for c in every], [values[c] for c in every]
                )
                place = slice(head * head_dim, (head + 1) * head_dim)
                np.testing.assert_allclose(out[row, column, place], expected, atol=1e-12)
                np.testing.assert_allclose(reused[row, column, place], expected, atol=1e-12)
                peak, total, accumulator, _ = brute_attention(
                    query, [keys[c] for c in outside], [values[c] for c in outside]
                )
                at = (row, head, column)
                np.testing.assert_allclose(fa_max[at], peak, atol=1e-12)
                np.testing.assert_allclose(fa_sum[at], total, rtol=1e-12)
                np.testing.assert_allclose(fa_acc[at], accumulator, atol=1e-10)


def reuse_inputs(inputs: dict[str, Array], state: tuple[Array, ...]) -> dict[str, Array]:
    """Inputs of AttentionReuse; what q, k, v hold at the block's columns is replaced by junk."""
    block = inputs["block_columns"][:, None, :, None]
    own = {f"{name}_c": np.take_along_axis(inputs[name], block, axis=2) for name in "qkv"}
    stale = {name: inputs[name].copy() for name in "qkv"}
    for values in stale.values():
        np.put_along_axis(values, block, 77.0, axis=2)
    names = ("fa_max", "fa_sum", "fa_acc")
    geometry = {n: inputs[n] for n in ("valid_from", "valid_to", "block_columns")}
    return {**own, **stale, **dict(zip(names, state, strict=True)), **geometry}


@bounded(25)
@given(
    shape=shapes(max_rows=3, max_prompt=24),
    heads=head_counts,
    head_dim=st.sampled_from([2, 16, 64]),
    dtype=st.sampled_from(["float32", "float32", "float16"]),
)
def test_attention_functions_equal_the_references(
    shape: Shape, heads: tuple[int, int], head_dim: int, dtype: str
) -> None:
    inputs = attention_inputs(shape, heads, head_dim, dtype)
    exact = widened(inputs)
    plain = {name: inputs[name] for name in ATTENTION.inputs}
    compare(ATTENTION, plain, run_reference(ATTENTION, widened(plain)), dtype)
    state = run_reference(ATTENTION_FILL, exact)
    compare(ATTENTION_FILL, inputs, state, "float32")
    single = tuple(values.astype(np.float32) for values in state)
    reuse = reuse_inputs(inputs, single)
    compare(ATTENTION_REUSE, reuse, run_reference(ATTENTION_REUSE, widened(reuse)), dtype)


def compare(spec: OpSpec, inputs: dict[str, Array], exact: list[Array], dtype: str) -> None:
    """Function and float32 reference against the reference in float64."""
    for found in (run_function(spec, inputs), run_reference(spec, inputs)):
        for name, value, expected in zip(spec.outputs, found, exact, strict=True):
            assert value.shape == expected.shape
            finite = np.isfinite(expected)
            np.testing.assert_array_equal(value[~finite], expected[~finite], err_msg=name)
            if finite.any() and np.abs(expected[finite]).max() > 0:
                error = relative_error(value[finite], expected[finite])
                assert error <= BOUND[dtype], (spec.name, name, error)


@bounded(10)
@given(heads=head_counts, query_rows=st.integers(1, 9), keys=st.integers(1, 40))
def test_attention_of_fewer_rows_than_keys(
    heads: tuple[int, int], query_rows: int, keys: int
) -> None:
    """The last layer's shape: M query rows, N keys."""
    shape = Shape(keys, 1, (0, 0), (0, 0), (keys, keys), seed=keys)
    inputs = attention_inputs(shape, heads, 16, "float32")
    inputs = {name: inputs[name] for name in ATTENTION.inputs}
    inputs["q"] = np.resize(inputs["q"], (2, heads[0], query_rows, 16)).astype(np.float32)
    exact = run_reference(ATTENTION, widened(inputs))
    assert exact[0].shape == (2, query_rows, heads[0] * 16)
    compare(ATTENTION, inputs, exact, "float32")


def test_no_keys_outside_the_block() -> None:
    """A canvas that is all block: the state is (-inf, 0, 0) and nothing becomes NaN."""
    shape = Shape(8, 8, (0,), (0,), (8,), seed=1)
    inputs = attention_inputs(shape, (4, 2), 16, "float32")
    for run in (run_function, run_reference):
        fa_max, fa_sum, fa_acc = run(ATTENTION_FILL, inputs)
        assert (fa_max == -np.inf).all()
        assert not fa_sum.any()
        assert not fa_acc.any()
        reuse = reuse_inputs(inputs, (fa_max, fa_sum, fa_acc))
        plain = {name: inputs[name] for name in ATTENTION.inputs}
        (out,), (expected,) = run(ATTENTION_REUSE, reuse), run(ATTENTION, plain)
        assert relative_error(out, expected) <= BOUND["float32"]


@pytest.mark.parametrize("spec", [ATTENTION, ATTENTION_FILL, ATTENTION_REUSE, SAMPLE_BLOCK])
def test_fake_shapes_are_the_real_ones(spec: OpSpec) -> None:
    shape = Shape(11, 3, (2, 5), (0, 1), (9, 11), seed=0)
    inputs = attention_inputs(shape, (4, 2), 8, "float16")
    if spec is ATTENTION:
        inputs = {name: inputs[name] for name in ATTENTION.inputs}
    if spec is ATTENTION_REUSE:
        inputs = reuse_inputs(inputs, tuple(run_reference(ATTENTION_FILL, inputs)))
    if spec is SAMPLE_BLOCK:
        inputs = sampler_inputs(3, 2, 5, 40, 1.0)
    tensors = tuple(map(torch.from_numpy, inputs.values()))
    for value, (dtype, size) in zip(spec.call(*tensors), spec.output_specs(*tensors), strict=True):
        assert (value.dtype, tuple(value.shape)) == (dtype, tuple(size))


def sampler_inputs(seed: int, rows: int, width: int, vocab: int, heat: float) -> dict[str, Array]:
    """Random logits and sampling inputs; some rows are guided, some greedy, some ids listed."""
    rng = np.random.default_rng(seed)
    guide = np.where(rng.random(rows) < 0.5, np.arange(rows), rng.integers(0, rows, rows))
    return {
        "logits": (rng.standard_normal((rows, width, vocab)) * 6).astype(np.float32),
        "positions": rng.integers(0, 4096, (rows, width)).astype(np.int32),
        "temperature": np.where(rng.random(rows) < 0.3, 0, heat).astype(np.float32),
        "seed": rng.integers(-(2**31), 2**31, rows).astype(np.int32),
        "step": rng.integers(0, 2000, rows).astype(np.int32),
        "guide_row": guide.astype(np.int32),
        "cfg_scale": (rng.random(rows) * 3).astype(np.float32),
        "suppress_ids": rng.integers(-1, vocab, (rows, int(rng.integers(1, 4)))).astype(np.int32),
        "confidence_exclude_ids": rng.integers(-1, vocab, (rows, 2)).astype(np.int32),
    }


def brute_sample(inputs: dict[str, Array], row: int, place: int) -> tuple[int, Array, float]:
    """Token, (confidence, margin, neg_entropy) and the gap of the best two scores, in float64."""
    logits = inputs["logits"].astype(np.float64)
    guide = int(inputs["guide_row"][row])
    x = logits[row, place].copy()
    if guide != row:
        x = logits[guide, place] + (float(inputs["cfg_scale"][row]) + 1) * (
            x - logits[guide, place]
        )
    x[[i for i in inputs["suppress_ids"][row] if i >= 0]] = -math.inf
    heat = float(inputs["temperature"][row])
    noisy = x.copy()
    if heat > 0:
        key = (inputs["seed"][row], inputs["step"][row], inputs["positions"][row, place])
        noisy += heat * noise.gumbel(*key, np.arange(len(x)))
    token = int(np.argmax(noisy))
    second, first = np.sort(noisy)[-2:]
    y = x.copy()
    y[[i for i in inputs["confidence_exclude_ids"][row] if i >= 0]] = -math.inf
    p = np.exp(y - y.max())
    p /= p.sum()
    ranked = np.sort(p)[::-1]
    entropy = float(sum(value * math.log(value) for value in p if value > 0))
    return token, np.array([p[token], ranked[0] - ranked[1], entropy]), float(first - second)


@bounded(60)
@given(
    seed=st.integers(0, 2**31 - 1),
    rows=st.integers(1, 4),
    width=st.integers(1, 64),
    vocab=st.integers(6, 400),
    heat=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
)
def test_sampler(seed: int, rows: int, width: int, vocab: int, heat: float) -> None:
    inputs = sampler_inputs(seed, rows, width, vocab, heat)
    bound = np.array([1.0, 1.0, 1 + math.log(vocab)]) * SCORE_BOUND
    for run in (run_reference, run_function):
        token, *scores = run(SAMPLE_BLOCK, inputs)
        assert token.dtype == np.int32
        for row, place in np.ndindex(rows, width):
            expected, expected_scores, gap = brute_sample(inputs, row, place)
            if token[row, place] != expected:
                assert gap < TOKEN_GAP
                continue
            found = np.array([score[row, place] for score in scores])
            allowed = bound * (1 if inputs["guide_row"][row] == row else GUIDED)
            assert (np.abs(found - expected_scores) <= allowed).all(), (found, expected_scores)


@bounded(30)
@given(
    seed=st.integers(-(2**31), 2**31 - 1),
    step=st.integers(0, 2**31 - 1),
    position=st.integers(0, 2**31 - 1),
)
def test_noise_bits_are_the_documented_hash(seed: int, step: int, position: int) -> None:
    """The hash in Python integers, in NumPy, in torch, and in the function, bit for bit."""
    vocab = 50
    bits = []
    for identity in range(vocab):
        state = 0
        for word, key in zip((seed, step, position, identity, 0), noise.KEYS, strict=True):
            state = pow(state + word + key, 5, noise.PRIME)
        bits.append(state >> 8)
    np.testing.assert_array_equal(noise.gumbel_bits(seed, step, position, np.arange(vocab)), bits)
    uniform = (np.array(bits, np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    expected = -np.log(-np.log(uniform.astype(np.float64)))
    words = (torch.tensor([word], dtype=torch.int32) for word in (seed, step))
    drawn = gumbel_noise(*words, torch.tensor([[position]], dtype=torch.int32), vocab)
    np.testing.assert_allclose(drawn[0, 0].numpy(), expected, atol=4e-6)
    # With logits that undo the noise of one id at a time, the function reveals its own noise.
    inputs = sampler_inputs(0, 1, 1, vocab, 1.0)
    inputs |= {
        "positions": np.array([[position]], np.int32),
        "temperature": np.ones(1, np.float32),
        "seed": np.array([seed], np.int32),
        "step": np.array([step], np.int32),
        "guide_row": np.zeros(1, np.int32),
        "suppress_ids": np.full((1, 1), -1, np.int32),
    }
    for target in (0, 7, vocab - 1):
        inputs["logits"] = -expected.astype(np.float32)[None, None].copy()
        inputs["logits"][0, 0, target] += 1e-4
        assert run_function(SAMPLE_BLOCK, inputs)[0][0, 0] == target


@pytest.mark.parametrize("run", [run_reference, run_function])
def test_ties_take_the_lowest_id(run: Any) -> None:
    inputs = sampler_inputs(1, 2, 3, 30, 0.0)
    inputs["guide_row"] = np.arange(2, dtype=np.int32)
    inputs["suppress_ids"] = np.array([[4], [-1]], np.int32)
    inputs["logits"][:] = -1.0
    inputs["logits"][:, :, [4, 9, 20, 29]] = 3.5
    token = run(SAMPLE_BLOCK, inputs)[0]
    assert token.tolist() == [[9] * 3, [4] * 3]


@pytest.mark.parametrize("run", [run_reference, run_function])
@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("listed", ["not", "suppressed", "excluded"])
def test_a_broken_logit_makes_the_scores_nan(
    run: Any, heat: float, value: float, listed: str
) -> None:
    """Unless the id is suppressed, which removes its logit whatever it is."""
    inputs = sampler_inputs(2, 2, 3, 30, heat)
    inputs["temperature"][:] = heat
    inputs["guide_row"] = np.arange(2, dtype=np.int32)
    inputs["suppress_ids"] = np.full((2, 1), 11 if listed == "suppressed" else -1, np.int32)
    inputs["confidence_exclude_ids"] = np.full((2, 1), 11 if listed == "excluded" else -1, np.int32)
    inputs["logits"][1, 2, 11] = value
    _, *scores = run(SAMPLE_BLOCK, inputs)
    broken = np.zeros((2, 3), bool)
    broken[1, 2] = listed != "suppressed"
    for score in scores:
        np.testing.assert_array_equal(np.isnan(score), broken)


@pytest.mark.parametrize("run", [run_reference, run_function])
def test_minus_infinity_is_a_probability_of_zero(run: Any) -> None:
    inputs = sampler_inputs(2, 1, 1, 8, 0.0)
    inputs |= {
        "guide_row": np.zeros(1, np.int32),
        "suppress_ids": np.full((1, 1), -1, np.int32),
        "confidence_exclude_ids": np.full((1, 1), 5, np.int32),
    }
    inputs["logits"][:] = -np.inf
    inputs["logits"][0, 0, [3, 5]] = [1.0, 2.0]
    token, confidence, margin, neg_entropy = run(SAMPLE_BLOCK, inputs)
    assert token.item() == 5
    assert (confidence.item(), margin.item(), abs(neg_entropy.item())) == (0.0, 1.0, 0.0)


@bounded(15)
@given(seed=st.integers(0, 2**31 - 1), rows=st.integers(2, 4), heat=st.sampled_from([0.0, 1.3]))
def test_a_batch_samples_what_its_rows_sample_alone(seed: int, rows: int, heat: float) -> None:
    inputs = sampler_inputs(seed, rows, 5, 60, heat)
    inputs["guide_row"] = np.arange(rows, dtype=np.int32)
    together = run_function(SAMPLE_BLOCK, inputs)
    for row in range(rows):
        alone = {name: array[row : row + 1] for name, array in inputs.items()}
        alone["guide_row"] = np.zeros(1, np.int32)
        token, *scores = run_function(SAMPLE_BLOCK, alone)
        np.testing.assert_array_equal(together[0][row], token[0])
        for batched, single in zip(together[1:], scores, strict=True):
            np.testing.assert_allclose(batched[row], single[0], atol=SCORE_BOUND)


def test_large_logits_do_not_overflow() -> None:
    inputs = sampler_inputs(3, 2, 4, 50, 0.0)
    inputs["logits"] *= np.float32(1e4)
    for run in (run_reference, run_function):
        for score in run(SAMPLE_BLOCK, inputs)[1:]:
            assert np.isfinite(score).all()
