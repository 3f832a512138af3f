"""The persistent kernel over the layers of a window, run on the CPU as it is written."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from gluon_machine import Machine
from gluon_memory import value
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from window_layers_grid import compile_for_hopper, run_on_cpu

from lacache_trt.engines.cuda.fused_window import FusedWindow, _whole_ffns, fused_window
from lacache_trt.model.config import ModelConfig, parameter_shapes
from lacache_trt.model.ops import TorchOps
from lacache_trt.model.programs import WindowProgram
from lacache_trt.model.transformer import Transformer
from lacache_trt.plugins.fp8 import quantise_blocks, quantise_groups
from lacache_trt.plugins.triton_support import SHARED_MEMORY_LIMIT, resource_usage
from lacache_trt.plugins.window_layers import attend, grid, launch, phases, stream


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's source runs as threads."""
    run_on_cpu(monkeypatch)


CONFIG = ModelConfig(
    family="llada", hidden_size=512, num_layers=3, num_heads=2, num_kv_heads=2, head_dim=128,
    intermediate_size=640, vocab_size=64, rope_theta=10000.0, norm_eps=1e-5, max_length=512,
    qkv_bias=False, tied_head=False, logit_shift=False, mask_id=63, eos_ids=(62,), dtype="bfloat16",
)  # fmt: skip
GROUPED = replace(CONFIG, num_heads=4, num_kv_heads=1, qkv_bias=True, hidden_size=640)


def random_model(config: ModelConfig, fp8: bool, seed: int = 0) -> Transformer:
    """A model of random bfloat16 weights; FP8 in the FFNs of all layers but the first."""
    torch.manual_seed(seed)
    names = [
        f"layers.{layer}.{name}"
        for layer in range(1, config.num_layers)
        for name in ("gate_up", "down")
    ]
    model = Transformer(config, TorchOps(), torch.bfloat16, names if fp8 else ())
    for name, shape in parameter_shapes(config).items():
        drawn = torch.randn(shape) * (shape[0] ** -0.5 if len(shape) == 2 else 0.1)
        drawn = (drawn if len(shape) == 2 else drawn + 1).to(torch.bfloat16)
        if fp8 and name.removesuffix(".weight") in names:
            block, scale = quantise_blocks(drawn.t().contiguous())
            model.weights[name.replace(".", "/")].data = block
            model.weights[name.replace(".weight", ".scale").replace(".", "/")].data = scale
        else:
            model.weights[name.replace(".", "/")].data = drawn
    return model.eval()


@dataclass
class Window:
    """Inputs of the layers of a window step."""

    columns: Tensor
    ranges: tuple[Tensor, Tensor]
    cached: tuple[Tensor, Tensor]
    hidden: Tensor
    cos: Tensor
    sin: Tensor


def random_window(
    model: Transformer, length: int, rows: int, start: int, valid: tuple[int, int], pads: int = 0
) -> Window:
    """A window of `rows` columns from `start`, the last `pads` of them not there."""
    config = model.config
    shape = (config.num_layers, 1, config.num_kv_heads, length, config.head_dim)
    cached = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    for tensor in cached:  # nothing may depend on what is not valid
        tensor[:, :, :, : valid[0]] = torch.nan
        tensor[:, :, :, valid[1] :] = torch.nan
        tensor[:, :, :, start : start + rows - pads] = torch.nan
    columns = torch.arange(start, start + rows, dtype=torch.int32)[None]
    columns[:, rows - pads :] = -1 if pads else columns[:, rows - pads :]
    cos, sin = model.rope_tables(columns.clamp(min=0))
    ranges = tuple(torch.tensor([bound], dtype=torch.int32) for bound in valid)
    hidden = torch.randn(1, rows, config.hidden_size).bfloat16()
    return Window(columns, (ranges[0], ranges[1]), cached, hidden, cos, sin)


def exact_model(model: Transformer) -> Transformer:
    """In float64, with the values of the FP8 weights and activations that are not quantised."""
    exact = Transformer(model.config, TorchOps(), torch.float64)
    for name, weight in exact.weights.items():
        found = model.weights[name].detach().double()
        if name.replace("/", ".").removesuffix(".weight") in model.fp8:
            scale = model.weights[name.replace("/weight", "/scale")].detach().double()
            found = found * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            found = found.t()
        weight.data = found
    return exact.eval()


def separate(
    model: Transformer, window: Window, dtype: torch.dtype
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The layers one op after the other."""
    keys, values = (tensor.nan_to_num(0.0).to(dtype) for tensor in window.cached)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return model.ops.attention_window(
            q, k, v, keys[layer], values[layer], window.columns, *window.ranges
        )

    last = model.config.num_layers - 1
    tables = window.cos, window.sin
    hidden, kept = WindowProgram(model)._whole_layers(
        range(last), window.hidden.to(dtype), *tables, attend
    )
    normed = model.attention_input(last, hidden)
    q, (k, v) = model.project_q(last, normed, *tables), model.project_kv(last, normed, *tables)
    hidden = model.after_attention(last, hidden, attend(last, q, k, v))
    real = int((window.columns >= 0).sum())
    return hidden, [(k[:, :, :real], v[:, :, :real]) for k, v in (*kept, (k, v))]


def fused(
    model: Transformer, window: Window, multiprocessors: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The layers in the kernel; also the window's keys and values [L, 1, Hkv, W, d] in the cache.

    Nothing else in the cache has changed, and pads have no columns.
    """
    cached = window.cached[0].clone(), window.cached[1].clone()
    run = FusedWindow(model, multiprocessors).run
    arguments = (window.columns, window.ranges, cached, window.hidden.clone())
    hidden = run(*arguments, window.columns.clamp(min=0))
    columns = window.columns[0, window.columns[0] >= 0].long()
    fresh = tuple(tensor[:, :, :, columns].clone() for tensor in cached)
    for tensor, before in zip(cached, window.cached, strict=True):
        tensor[:, :, :, columns] = before[:, :, :, columns]
        assert torch.equal(tensor.view(torch.int16), before.view(torch.int16))
    return hidden, (fresh[0], fresh[1])


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    difference = found.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


CASES = [
    # config, multiprocessors, length, rows, start, valid columns, pads
    (CONFIG, 3, 200, 32, 64, (0, 200), 0),
    (CONFIG, 5, 320, 8, 0, (0, 320), 0),
    (CONFIG, 2, 130, 32, 98, (7, 130), 0),
    (CONFIG, 7, 300, 32, 250, (3, 282), 0),
    (CONFIG, 4, 256, 16, 120, (100, 250), 4),
    (GROUPED, 5, 192, 32, 64, (0, 190), 0),
    (GROUPED, 4, 65, 1, 64, (0, 65), 0),
]


@pytest.mark.parametrize(
    ("config", "multiprocessors", "length", "rows", "start", "valid", "pads"), CASES
)
def test_layers_against_float64(
    on_cpu: None, config: ModelConfig, multiprocessors: int, length: int, rows: int, start: int,
    valid: tuple[int, int], pads: int,
) -> None:  # fmt: skip
    """No further from float64 than twice the separate ops, hidden rows, keys and values alike."""
    model = random_model(config, fp8=False)
    window = random_window(model, length, rows, start, valid, pads)
    exact, exact_kept = separate(exact_model(model), window, torch.float64)
    plain, plain_kept = separate(model, window, torch.bfloat16)
    found, fresh = fused(model, window, multiprocessors)
    assert distance(found, exact) <= 2 * distance(plain, exact) + 1e-3
    for layer in range(config.num_layers):
        for part in range(2):
            allowed = 2 * distance(plain_kept[layer][part], exact_kept[layer][part]) + 1e-3
            assert distance(fresh[part][layer], exact_kept[layer][part]) <= allowed


@pytest.mark.parametrize("config", [CONFIG, GROUPED])
def test_fp8_layers(on_cpu: None, config: ModelConfig) -> None:
    """FP8 FFNs behind a 16-bit first layer: two stacks."""
    model = random_model(config, fp8=True)
    window = random_window(model, 160, 32, 32, (0, 160))
    plain, plain_kept = separate(model, window, torch.bfloat16)
    exact, exact_kept = separate(exact_model(model), window, torch.float64)
    found, fresh = fused(model, window, 4)
    assert distance(found, exact) <= 1.1 * distance(plain, exact)
    for layer in range(config.num_layers):
        for part in range(2):
            allowed = 1.1 * distance(plain_kept[layer][part], exact_kept[layer][part]) + 1e-3
            assert distance(fresh[part][layer], exact_kept[layer][part]) <= allowed


def test_result_does_not_depend_on_the_run(on_cpu: None) -> None:
    """Bitwise: threads come in another order each time."""
    model = random_model(CONFIG, fp8=True)
    window = random_window(model, 128, 32, 96, (0, 128))
    first, first_fresh = fused(model, window, 5)
    second, second_fresh = fused(model, window, 5)
    assert torch.equal(first, second)
    assert torch.equal(first_fresh[0], second_fresh[0])


def test_layers_do_not_hold_the_model(on_cpu: None) -> None:
    """The model's ops hold them: with a cycle the weights would outlive a closed engine."""
    model = random_model(CONFIG, fp8=False)
    vars(model.ops)["fused_window"] = FusedWindow(model, 4)
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("fp8", "served"),
    [
        ((), True),
        (("layers.1.gate_up", "layers.1.down"), True),
        (("layers.1.gate_up",), False),
        (("layers.0.gate_up", "layers.1.down"), False),
        (("layers.1.gate_up", "layers.1.down", "layers.1.qkv"), False),
        (("layers.1.gate_up", "layers.1.down", "head"), False),
    ],
)
def test_what_is_fused(fp8: tuple[str, ...], served: bool) -> None:
    """Models whose FP8 linears are whole FFNs or none; on a Hopper GPU, and on no other device."""
    with torch.device("meta"):
        model = Transformer(CONFIG, TorchOps(), torch.bfloat16, fp8)
    assert fused_window(model) is None
    assert _whole_ffns(model) == served


def test_quantising_is_the_ops() -> None:
    """Bit for bit, groups of zeros, tiny and infinite values too."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 128, generator=generator) * torch.logspace(-30, 30, 64)[:, None]
    values[:4] = torch.tensor([0.0, -0.0, 1e-38, 3e38])[:, None]
    values[5, 7] = float("inf")
    found, scale = Machine([grid, stream, phases]).quantise(value(values))
    expected, expected_scale = quantise_groups(values)
    assert torch.equal(scale, expected_scale[:, 0])
    assert torch.equal(found.view(torch.int8), expected.view(torch.int8))


@given(tiles=st.integers(1, 300), steps=st.integers(1, 200), programs=st.integers(1, 140))
def test_shares_cover_every_step_once(tiles: int, steps: int, programs: int) -> None:
    """The fixed runs, who owns a step, and how many parts a tile of columns can have."""
    total = tiles * steps
    if programs > total:
        programs = total
    machine = Machine([grid])
    starts = [machine.first_step(total, program, programs) for program in range(programs + 1)]
    assert (starts[0], starts[-1]) == (0, total)
    assert starts == sorted(set(starts))
    for step in {0, total // 3, total // 2, total - 1}:
        program = machine.owner(total, step, programs)
        assert starts[program] <= step < starts[program + 1]
    for tile in {0, tiles // 2, tiles - 1}:
        first = machine.owner(total, tile * steps, programs)
        last = machine.owner(total, tile * steps + steps - 1, programs)
        assert last - first + 1 <= launch.most_parts(tiles, programs)


@given(low=st.integers(0, 3000), columns=st.integers(0, 5000), chunks=st.integers(1, 8))
def test_chunks_cover_the_columns(low: int, columns: int, chunks: int) -> None:
    """In turn and about alike, the last one with least."""
    share = Machine([grid, stream, attend]).share_of_keys
    shares = [share(low, low + columns, chunk, chunks) for chunk in range(chunks)]
    covered = low // 128 * 128
    for first, pairs in (share for share in shares if share[1]):
        assert first == covered
        covered += 128 * pairs
    assert covered >= low + columns
    counts = [pairs for _, pairs in shares]
    assert max(counts) - min(counts) <= 2
    assert counts[-1] == min(counts)


def test_what_it_serves() -> None:
    """LLaDA-8B and Dream-7B on an H100; not widths without whole tiles, nor too few programs."""
    llada = launch.LayerSizes(4096, 4096, 4096, 12288, True, False, 1e-5)
    dream = launch.LayerSizes(3584, 3584, 512, 18944, True, True, 1e-6)
    assert launch.serves(llada, 132)
    assert launch.serves(dream, 132)
    assert not launch.serves(replace(llada, hidden=4000), 132)
    assert not launch.serves(llada, 16)


@pytest.mark.parametrize("fp8", [False, True])
def test_compiles_for_hopper(fp8: bool) -> None:
    """Ahead of time, within the registers and the shared memory of SM 90."""
    compiled = compile_for_hopper(fp8)
    assert compiled.metadata.shared <= SHARED_MEMORY_LIMIT[90]
    registers, stack = resource_usage(compiled.asm["cubin"])
    assert registers <= 168
    assert stack <= 64  # each read of a spilled value misses: see `unknown_zero`
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("config", "multiprocessors", "length", "rows", "start", "valid", "pads"), CASES
)
def test_layers_on_a_gpu(
    fp8: bool, config: ModelConfig, multiprocessors: int, length: int, rows: int, start: int,
    valid: tuple[int, int], pads: int,
) -> None:  # fmt: skip
    """The kernel itself, with few programs and with as many as there are, twice alike."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs SM 90")
    model = random_model(config, fp8)
    window = random_window(model, length, rows, start, valid, pads)
    plain, plain_kept = separate(model, window, torch.bfloat16)
    exact, exact_kept = separate(exact_model(model), window, torch.float64)
    factor = 1.1 if fp8 else 2
    there = model.cuda()
    on_device = Window(*(moved(part) for part in vars(window).values()))
    for programs in (multiprocessors, 132):
        found, fresh = fused(there, on_device, programs)
        again, fresh_again = fused(there, on_device, programs)
        assert distance(found.cpu(), exact) <= factor * distance(plain, exact) + 1e-3
        assert torch.equal(found, again)
        for layer in range(config.num_layers):
            for part in range(2):
                kept = exact_kept[layer][part]
                allowed = factor * distance(plain_kept[layer][part], kept) + 1e-3
                assert distance(fresh[part][layer].cpu(), kept) <= allowed
                assert torch.equal(fresh[part][layer], fresh_again[part][layer])


def moved(part: Any) -> Any:
    """To the GPU."""
    return tuple(tensor.cuda() for tensor in part) if isinstance(part, tuple) else part.cuda()
