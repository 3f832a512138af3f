"""Architecture of a diffusion language model, independent of the checkpoint's own key names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from lacache_trt.errors import ArtifactError

Dtype = Literal["float32", "float16", "bfloat16"]
Granularity = Literal["per-group", "per-channel"]
"""Who shares a scale in an FP8 linear; see `lacache_trt.model.fp8`."""
DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
INPUT_SCALE = ".input_scale"
"""Behind a linear's name: the static scale of its input, a float32 of shape []."""


@dataclass(frozen=True)
class ModelConfig:
    """A transformer without causal mask: RMSNorm, rotate-half RoPE, GQA, SwiGLU.

    Attributes:
        family: `llada` or `dream`; decides decoding conventions, not the arithmetic.
        hidden_size: D, width of the residual stream.
        num_layers: L.
        num_heads: Hq, query heads.
        num_kv_heads: Hkv, key and value heads; divides `num_heads`.
        head_dim: d.
        intermediate_size: F, width of the SwiGLU.
        vocab_size: V, rows of the embedding and columns of the head.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of every RMSNorm.
        max_length: longest canvas (prompt and generated part) the model was made for.
        qkv_bias: q, k and v projections have a bias.
        tied_head: the head's weights are the embedding's.
        logit_shift: position p is predicted by the hidden state of p - 1 (Dream).
        mask_id: token id of a position that is not decoded yet.
        eos_ids: token ids that end an answer; the first one fills what follows it.
        dtype: dtype of the checkpoint's weights.
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    norm_eps: float
    max_length: int
    qkv_bias: bool
    tied_head: bool
    logit_shift: bool
    mask_id: int
    eos_ids: tuple[int, ...]
    dtype: Dtype

    @property
    def query_size(self) -> int:
        """Width of the concatenated query heads, Hq * d."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the concatenated key (or value) heads, Hkv * d."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Width of the fused projection: queries, then keys, then values."""
        return self.query_size + 2 * self.kv_size

    def cache_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes that one column of one row holds in the exact caches (paper section 3.2).

        EmbedCache D elements, RoPECache (Hq + 2 Hkv) d elements, FACache Hq (d + 2) fp32.
        """
        elements = self.hidden_size + self.qkv_size
        return elements * element_bytes + self.num_heads * (self.head_dim + 2) * 4

    def to_json(self) -> dict[str, Any]:
        """Plain types only, the inverse of `from_json`."""
        return {**asdict(self), "eos_ids": list(self.eos_ids)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelConfig:
        """Read what `to_json` wrote; `ArtifactError` names missing and unknown keys."""
        names = {field.name for field in fields(cls)}
        if set(data) != names:
            raise ArtifactError(
                "model section of the manifest has the wrong keys",
                got=f"missing {sorted(names - set(data))}, unknown {sorted(set(data) - names)}",
                expected=sorted(names),
                fix="export the bundle again with this version",
            )
        return cls(**{**data, "eos_ids": tuple(data["eos_ids"])})


def projection_sizes(config: ModelConfig, layer: int) -> dict[str, int]:
    """Name and output width of a layer's attention input projections, in file order."""
    if 0 < layer == config.num_layers - 1:
        return {"q": config.query_size, "kv": 2 * config.kv_size}
    return {"qkv": config.qkv_size}


def parameter_shapes(
    config: ModelConfig, fp8: Collection[str] = (), granularity: Granularity = "per-group"
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the weights file, in file order.

    Linear weights are stored [in, out]; `qkv` and `gate_up` are fused along the output. The last
    layer of a deeper model keeps `q` apart from `kv`: it needs keys and values of every row but
    queries only of the rows that the head reads. The linears named in `fp8` are stored [out, in],
    each followed by the scales of its 128 x 128 blocks, or of its output channels. In the second
    case the scales of the inputs end the file: one float32 would shift all that follows it.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    per_channel = granularity == "per-channel"
    for name, shape in _half_shapes(config).items():
        linear = name.removesuffix(".weight")
        if linear in fp8:
            shapes[name] = shape[::-1]
            blocks = (-(-shape[1] // 128), -(-shape[0] // 128))
            shapes[linear + ".scale"] = shape[1:] if per_channel else blocks
        else:
            shapes[name] = shape
    inputs = [name.removesuffix(".scale") for name in shapes if name.endswith(".scale")]
    return shapes | ({name + INPUT_SCALE: () for name in inputs} if per_channel else {})


def fp8_dtypes(fp8: Collection[str], granularity: Granularity = "per-group") -> dict[str, str]:
    """Dtype of the tensors of FP8 linears, which do not have the model's."""
    scales = (".scale", INPUT_SCALE) if granularity == "per-channel" else (".scale",)
    parts = {".weight": "float8_e4m3fn", **dict.fromkeys(scales, "float32")}
    return {linear + part: dtype for linear in fp8 for part, dtype in parts.items()}


def _half_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """`parameter_shapes` of a model without FP8."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        prefix = f"layers.{index}."
        shapes[prefix + "attn_norm.weight"] = (hidden,)
        for name, width in projection_sizes(config, index).items():
            shapes[prefix + name + ".weight"] = (hidden, width)
            if config.qkv_bias:
                shapes[prefix + name + ".bias"] = (width,)
        shapes[prefix + "attn_out.weight"] = (config.query_size, hidden)
        shapes[prefix + "ffn_norm.weight"] = (hidden,)
        shapes[prefix + "gate_up.weight"] = (hidden, 2 * ffn)
        shapes[prefix + "down.weight"] = (ffn, hidden)
    shapes["norm.weight"] = (hidden,)
    shapes["head.weight"] = (hidden, config.vocab_size)
    return shapes
