"""Ways to attend without a causal mask when each row has left pads, over the same inputs.

Token-major layout: q, k, v [B * N, H, d], as a fused projection gives them. A ragged call sees 2 B
sequences: for each row its pads and its real columns, with the boundaries
    [0, pad_0, N, N + pad_1, 2 N, ...]
in device memory. Pads attend to pads, real columns to real columns, so that no mask is needed and
every output row is written. The biased call adds -inf to the scores of the pads, [B, 1, 1, N].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lacache_trt.engines.cuda.capture import capture
from lacache_trt.plugins.attention import kernel as attention_kernel

HEADS, HEAD_DIM = 32, 128
BF16 = torch.bfloat16
L2_BYTES = 120 * 2**20
TOLERANCE = 4e-3
CHECKED_LENGTH = 320
Call = Callable[[], object]


@dataclass(frozen=True)
class RaggedCase:
    """Batch, columns, left pads of the first row (each further row has seven more), device."""

    batch: int
    length: int
    pads: int
    device: str

    def starts(self) -> Tensor:
        """First real column of each row: int32 [B]."""
        rows = torch.arange(self.batch, dtype=torch.int32, device=self.device)
        return rows * (7 if self.pads else 0) + self.pads

    def boundaries(self) -> Tensor:
        """Boundaries of the 2 B sequences: int32 [2 B + 1]."""
        return boundaries(self.starts(), self.length)


@dataclass(frozen=True)
class Inputs:
    """One set of q, k, v, token-major and head-major."""

    q: Tensor
    k: Tensor
    v: Tensor

    def heads(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views [B, H, N, d]."""
        views = (t.view(batch, -1, HEADS, HEAD_DIM).transpose(1, 2) for t in self.all())
        return tuple(views)  # type: ignore[return-value]

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three tensors."""
        return self.q, self.k, self.v


def boundaries(starts: Tensor, length: int) -> Tensor:
    """[0, start_0, N, N + start_1, 2 N, ...] as int32."""
    batch = starts.shape[0]
    bases = torch.arange(batch, device=starts.device, dtype=torch.int32) * length
    pairs = torch.stack([bases, bases + starts], dim=1).flatten()
    return torch.cat([pairs, torch.full_like(pairs[:1], batch * length)])


def make_inputs(case: RaggedCase, seed: int) -> Inputs:
    """Normal values, scores with a standard deviation of about 2."""
    generator = torch.Generator(device=case.device).manual_seed(seed)
    shape = (case.batch * case.length, HEADS, HEAD_DIM)

    def draw(scale: float) -> Tensor:
        values = torch.randn(shape, generator=generator, device=case.device)
        return (values * scale).to(BF16)

    return Inputs(draw(1.5), draw(1.5), draw(1.0))


def cudnn_padless(inputs: Inputs, batch: int, head_major: bool) -> Tensor:
    """cuDNN's SDPA on all columns, pads included."""
    q, k, v = inputs.heads(batch)
    if head_major:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return sdpa(q, k, v)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full attention by cuDNN."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def cudnn_ragged(inputs: Inputs, bounds: Tensor, longest: int) -> Tensor:
    """cuDNN over sequences whose boundaries lie in device memory: [T, H, d]."""
    return torch.ops.aten._cudnn_attention_forward(
        *inputs.all(), None, bounds, bounds, longest, longest, False, 0.0, False, False, scale=None
    )[0]


def flash_ragged(inputs: Inputs, bounds: Tensor, longest: int) -> Tensor:
    """Flash attention over the same sequences: [T, H, d]."""
    return torch.ops.aten._flash_attention_forward(
        *inputs.all(), bounds, bounds, longest, longest, 0.0, False, False
    )[0]


def bias_of(starts: Tensor, length: int) -> Tensor:
    """-inf at the pads, 0 elsewhere: [B, 1, 1, N]."""
    columns = torch.arange(length, device=starts.device)
    bias = torch.zeros(len(starts), 1, 1, length, dtype=BF16, device=starts.device)
    return bias.masked_fill_((columns < starts[:, None])[:, None, None], float("-inf"))


def cudnn_biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """cuDNN with a bias that removes the pads: [B, N, H, d]."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def ours(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """This toolkit's kernel on head-major tensors: [B, N, H d]."""
    batch, heads, length, head_dim = q.shape
    out = q.new_empty(batch, length, heads * head_dim)
    attention_kernel.launch(q, k, v, starts, ends, None, out)
    return out


def attention_calls(case: RaggedCase) -> dict[str, list[Call]]:
    """Every way over rotating inputs larger than the L2."""
    bytes_per_set = 4 * 2 * case.batch * case.length * HEADS * HEAD_DIM
    sets = max(2, min(12, -(-2 * L2_BYTES // bytes_per_set)))
    inputs = [make_inputs(case, seed) for seed in range(sets)]
    majors = [tuple(view.contiguous() for view in each.heads(case.batch)) for each in inputs]
    starts, bounds = case.starts(), case.boundaries()
    ends, bias = torch.full_like(starts, case.length), bias_of(starts, case.length)
    calls: dict[str, list[Call]] = {
        "ours": [lambda m=m: ours(*m, starts, ends) for m in majors],
        "cudnn ragged": [lambda i=i: cudnn_ragged(i, bounds, case.length) for i in inputs],
        "cudnn biased": [lambda m=m: cudnn_biased(*m, bias) for m in majors],
        "flash ragged": [lambda i=i: flash_ragged(i, bounds, case.length) for i in inputs],
    }
    if not case.pads:
        calls["cudnn head_major"] = [lambda m=m: sdpa(*m) for m in majors]
        calls["cudnn token_major"] = [
            lambda i=i: cudnn_padless(i, case.batch, False) for i in inputs
        ]
    return calls


def reference(case: RaggedCase, inputs: Inputs, starts: Tensor) -> Tensor:
    """Float64 attention of the real columns, zeros at the pads: [B, N, H d]."""
    out = torch.zeros(case.batch, case.length, HEADS * HEAD_DIM, device=case.device).double()
    for row, views in enumerate(zip(*inputs.heads(case.batch), strict=True)):
        start = int(starts[row])
        q, k, v = (view[:, start:].double() for view in views)
        weights = (q @ k.transpose(1, 2) * HEAD_DIM**-0.5).softmax(-1)
        out[row, start:] = (weights @ v).transpose(0, 1).flatten(1)
    return out


def worst_error(got: Tensor, want: Tensor, starts: Tensor) -> float:
    """||got - want|| / ||want|| over the real columns; infinite where something is not finite."""
    got = got.reshape(want.shape).double()
    total = [(got[row, start:] - want[row, start:]) for row, start in enumerate(starts.tolist())]
    if not all(bool(part.isfinite().all()) for part in total):
        return float("inf")
    return float(sum(part.norm() ** 2 for part in total) ** 0.5 / want.norm())


def check_calls(device: str, pads: Sequence[int]) -> list[str]:
    """One line per way: error against float64, eagerly and replayed with other offsets."""
    lines = []
    for batch in (1, 3):
        for name in ("ours", "cudnn ragged", "cudnn biased", "flash ragged"):
            try:
                lines += _check_way(RaggedCase(batch, CHECKED_LENGTH, 0, device), name, pads)
            except Exception as error:
                first = (str(error).splitlines() or [""])[0][:200]
                lines.append(f"FAILED {name} b{batch}: {type(error).__name__}: {first}")
    return lines


def _check_way(case: RaggedCase, name: str, pads: Sequence[int]) -> list[str]:
    """Capture once, then replay with the offsets of each number of pads."""
    inputs = make_inputs(case, 7)
    majors = tuple(view.contiguous() for view in inputs.heads(case.batch))
    starts, bounds = case.starts(), case.boundaries()
    ends, bias = torch.full_like(starts, case.length), bias_of(starts, case.length)
    held: list[Tensor] = []
    ways: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: ours(*majors, starts, ends),
        "cudnn ragged": lambda: cudnn_ragged(inputs, bounds, case.length),
        "cudnn biased": lambda: cudnn_biased(*majors, bias),
        "flash ragged": lambda: flash_ragged(inputs, bounds, case.length),
    }
    stream = torch.cuda.Stream()
    graph = capture([lambda: held.append(ways[name]())], stream)
    lines = []
    for pad in pads:
        changed = RaggedCase(case.batch, case.length, pad, case.device)
        starts.copy_(changed.starts())
        bounds.copy_(changed.boundaries())
        bias.copy_(bias_of(starts, case.length))
        with torch.inference_mode():
            held[-1].fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.synchronize()
        error = worst_error(held[-1], reference(case, inputs, starts), starts)
        pads_finite = bool(held[-1].isfinite().all())
        verdict = "ok    " if error < TOLERANCE else "FAILED"
        lines.append(
            f"{verdict} {name} b{case.batch} pads {pad}: error {error:.2e}, "
            f"pad rows {'finite' if pads_finite else 'not finite'}"
        )
    return lines
