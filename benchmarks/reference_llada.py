"""The vanilla baseline: a denoising step of LLaDA as its published rules describe it, eager.

    python3 benchmarks/run_from_checkout.py benchmarks/reference_llada.py

transformers' Llama class without a causal mask (SDPA, no cache), logits on every row, argmax and
softmax over the vocabulary on every row, the confidences outside the block set to -inf, `topk` per
row. The softmax runs in the model's dtype, or in float64 as the code did until mid-2025
(`--softmax float64`). Random weights of LLaDA-8B's shape in bf16, batch 1, block 32.
Prints milliseconds per step beside the table of the project's first measurements, whose eager
steps moved by 20% between days: compare within one run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from llada_shape import BLOCK, random_weights, shallow
from result_file import write_result
from torch import Tensor, nn

from lacache_trt.model.config import ModelConfig

DEVICE = "cuda"
PAIRS = ((128, 256), (128, 1024), (1024, 256), (1024, 1024))
TABLE_MS = {(128, 256): 42.7, (128, 1024): 41.6, (1024, 256): 53.3, (1024, 1024): 72.4}
COMMITTED_PER_STEP = 2
WARM_UP = 4


def build_reference(config: ModelConfig, weights: Mapping[str, Tensor]) -> nn.Module:
    """transformers' Llama over copies of the weights, in its own layout; without causal mask."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_length,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    settings.is_causal = False
    with torch.device("meta"):
        network = LlamaForCausalLM(settings)
    state = llama_state(config, weights)
    network.load_state_dict(state, strict=True, assign=True)
    device = weights["embed.weight"].device
    with device:
        network.model.rotary_emb = LlamaRotaryEmbedding(settings)
    for layer in network.model.layers:
        layer.self_attn.is_causal = False
    network.requires_grad_(False)
    _check_bidirectional(network.eval(), config, device)
    return network


def llama_state(config: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """transformers' names and its [out, in] layout, contiguous copies."""

    def turned(tensor: Tensor) -> Tensor:
        return tensor.t().contiguous()

    state = {
        "model.embed_tokens.weight": weights["embed.weight"],
        "model.norm.weight": weights["norm.weight"],
        "lm_head.weight": turned(weights["head.weight"]),
    }
    sizes = [config.query_size, config.kv_size, config.kv_size]
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}.", f"model.layers.{index}."
        if ours + "qkv.weight" in weights:
            qkv = weights[ours + "qkv.weight"].split(sizes, dim=1)
        else:
            k, v = weights[ours + "kv.weight"].chunk(2, dim=1)
            qkv = (weights[ours + "q.weight"], k, v)
        for name, tensor in zip("qkv", qkv, strict=True):
            state[f"{theirs}self_attn.{name}_proj.weight"] = turned(tensor)
        gate, up = weights[ours + "gate_up.weight"].chunk(2, dim=1)
        state[theirs + "mlp.gate_proj.weight"] = turned(gate)
        state[theirs + "mlp.up_proj.weight"] = turned(up)
        state[theirs + "mlp.down_proj.weight"] = turned(weights[ours + "down.weight"])
        state[theirs + "self_attn.o_proj.weight"] = turned(weights[ours + "attn_out.weight"])
        state[theirs + "input_layernorm.weight"] = weights[ours + "attn_norm.weight"]
        state[theirs + "post_attention_layernorm.weight"] = weights[ours + "ffn_norm.weight"]
    return state


def _check_bidirectional(network: nn.Module, config: ModelConfig, device: torch.device) -> None:
    """The first column must feel the last one."""
    tokens = torch.arange(16, device=device)[None] % config.vocab_size
    changed = tokens.clone()
    changed[0, -1] = 1
    with torch.no_grad():
        first, second = (network(input_ids=t).logits[0, 0] for t in (tokens, changed))
    if torch.equal(first, second):
        raise RuntimeError("transformers' Llama still masks causally; its interface has changed")


@torch.no_grad()
def reference_step(
    network: nn.Module, x: Tensor, mask_id: int, block_end: int, quota: Tensor, softmax: torch.dtype
) -> None:
    """One step in place on x [B, N]: predict every column, commit `quota[b]` of the block's."""
    mask_index = x == mask_id
    logits = network(input_ids=x).logits
    x0 = torch.argmax(logits, dim=-1)
    p = torch.softmax(logits.to(softmax), dim=-1)
    x0_p = torch.gather(p, dim=-1, index=x0[..., None])[..., 0]
    x0_p[:, block_end:] = -torch.inf
    x0 = torch.where(mask_index, x0, x)
    confidence = torch.where(mask_index, x0_p, -torch.inf)
    transfer = torch.zeros_like(x0, dtype=torch.bool)
    for row in range(x.shape[0]):
        _, chosen = torch.topk(confidence[row], k=int(quota[row]))
        transfer[row, chosen] = True
    x[transfer] = x0[transfer]


def step_milliseconds(
    network: nn.Module, config: ModelConfig, prompt: int, generated: int, steps: int, softmax: str
) -> list[float]:
    """Wall-clock milliseconds of each step of the first blocks, after warm-up."""
    device = next(network.parameters()).device
    x = torch.full((1, prompt + generated), config.mask_id, dtype=torch.long, device=device)
    x[:, :prompt] = torch.randint(0, config.mask_id, (1, prompt), device=device)
    quota = torch.full((1,), COMMITTED_PER_STEP, device=device)
    dtype = {"model": torch.bfloat16, "float64": torch.float64}[softmax]
    times = []
    for step in range(WARM_UP + steps):
        block = step // (BLOCK // COMMITTED_PER_STEP)
        end = min(prompt + (block + 1) * BLOCK, prompt + generated)
        torch.cuda.synchronize()
        started = time.perf_counter()
        reference_step(network, x, config.mask_id, end, quota, dtype)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return times[WARM_UP:]


def measure(
    network: nn.Module,
    config: ModelConfig,
    metrics: dict[str, float],
    pairs: Sequence[tuple[int, int]] = PAIRS,
    softmax: str = "model",
    steps: int = 20,
) -> list[dict[str, object]]:
    """Median step of every (prompt, generated) pair, printed beside the table."""
    rows: list[dict[str, object]] = []
    suffix = "" if softmax == "model" else f".softmax_{softmax}"
    for prompt, generated in pairs:
        times = step_milliseconds(network, config, prompt, generated, steps, softmax)
        middle = median(times)
        metrics[f"h200.reference_step_ms{suffix}.p{prompt}.g{generated}"] = middle
        table = TABLE_MS.get((prompt, generated), float("nan"))
        print(
            f"reference P={prompt} G={generated} softmax {softmax}: {middle:.2f} ms "
            f"({min(times):.2f} to {max(times):.2f}), table {table:.1f}, "
            f"ours / table {middle / table:.2f}",
            flush=True,
        )
        rows.append({"p": prompt, "g": generated, "softmax": softmax, "ms": times})
    return rows


def main() -> int:
    """Measure the reference alone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--softmax", choices=("model", "float64", "both"), default="both")
    arguments = parser.parse_args()
    config = shallow(arguments.layers)
    torch.manual_seed(0)
    network = build_reference(config, random_weights(config, DEVICE))
    metrics: dict[str, float] = {}
    rows = []
    kinds = ("model", "float64") if arguments.softmax == "both" else (arguments.softmax,)
    for softmax in kinds:
        rows += measure(network, config, metrics, softmax=softmax, steps=arguments.steps)
    details = {"layers": arguments.layers, "rows": rows}
    write_result("reference_llada", torch.cuda.get_device_name(), metrics, details)
    return 0


if __name__ == "__main__":
    sys.exit(main())
