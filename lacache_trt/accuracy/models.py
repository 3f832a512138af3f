"""A checkpoint as torch modules in which chosen linears run in simulated FP8.

Quantised linears multiply in float32, as the tensor cores accumulate, and round the product to the
model's dtype once; everything else is `TorchOps` in the model's dtype. So what differs between two
cases is the quantisation and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lacache_trt.accuracy.schemes import SCHEMES, Scheme, smoothing
from lacache_trt.errors import InvalidRequestError, MissingDependencyError
from lacache_trt.model.checkpoint import Checkpoint
from lacache_trt.model.config import ModelConfig, projection_sizes
from lacache_trt.model.ops import TorchOps
from lacache_trt.model.transformer import Transformer

Weights = Mapping[str, Tensor]
InputAmax = Mapping[str, Tensor]
"""The abs max [K] of every input channel of a linear, by the linear's name."""

FFN = ("gate_up", "down")
HEAD = "head"
FIRST_SCOPE_ONLY = frozenset({"moss", "smooth"})


@dataclass(frozen=True)
class Case:
    """One row of the comparison.

    Attributes:
        name: unique in a study.
        dtype: of everything that is not quantised.
        scheme: None for no quantisation.
        scope: `ffn`, `linears` or `all`.
        layers: layers whose linears are quantised.
        decoded: answers are generated too, not only single predictions.
    """

    name: str
    dtype: torch.dtype = torch.bfloat16
    scheme: Scheme | None = None
    scope: str = "ffn"
    layers: tuple[int, ...] = ()
    decoded: bool = True


class StudyOps(TorchOps):
    """`TorchOps` that knows which linear it computes.

    Attributes:
        rules: replaces the product of a linear, by its name.
        on_input: called with the name and the input of every linear.
        on_residual: called with the name of the linear that ended it and the residual stream.
    """

    def __init__(self) -> None:
        self.rules: dict[str, Callable[[Tensor], Tensor]] = {}
        self.on_input: Callable[[str, Tensor], None] | None = None
        self.on_residual: Callable[[str, Tensor], None] | None = None
        self._names: dict[int, str] = {}

    def learn(self, model: Transformer) -> None:
        """Remember the model's linears by the identity of their weights."""
        self._names = {
            id(value): name.replace("/", ".").removesuffix(".weight")
            for name, value in model.weights.items()
        }

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = self._product(self._names[id(weight)], x, weight)
        return product if bias is None else product + bias

    def linear_add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        name = self._names[id(weight)]
        result = residual + self._product(name, x, weight)
        if self.on_residual is not None:
            self.on_residual(name, result)
        return result

    def _product(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        if self.on_input is not None:
            self.on_input(name, x)
        rule = self.rules.get(name)
        return x @ weight if rule is None else rule(x)


def pick_device(name: str) -> torch.device:
    """The device of a setting; `MissingDependencyError` if torch does not see it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise MissingDependencyError(
            "torch sees no CUDA GPU", got="device cuda", fix="use --device cpu"
        )
    return torch.device(name)


def device_title(device: torch.device) -> str:
    """The name of the GPU, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def load_weights(checkpoint: Checkpoint, device: torch.device) -> dict[str, Tensor]:
    """Every tensor of the weights file in the checkpoint's own dtype."""
    open_files: dict[Path, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, recipe in checkpoint.recipes.items():
        parts = []
        for source in recipe.sources:
            path = checkpoint.tensors[source.name].path
            if path not in open_files:
                open_files[path] = safe_open(path, "pt")
            parts.append(open_files[path].get_tensor(source.name))
        stacked = parts[0] if len(parts) == 1 else torch.cat(parts)
        tensors[name] = (stacked.T if recipe.transpose else stacked).contiguous().to(device)
    return tensors


def linears_of(config: ModelConfig, layer: int, scope: str) -> tuple[str, ...]:
    """Names of a layer's linears in a scope; the head belongs to no layer."""
    around = () if scope == "ffn" else (*projection_sizes(config, layer), "attn_out")
    names = (*around, *FFN)
    return tuple(f"layers.{layer}.{name}" for name in names)


def quantised_linears(config: ModelConfig, case: Case) -> tuple[str, ...]:
    """Names of the linears that a case quantises."""
    if case.scheme is None:
        return ()
    names = [name for layer in case.layers for name in linears_of(config, layer, case.scope)]
    return (*names, HEAD) if case.scope == "all" else tuple(names)


def build_model(
    config: ModelConfig, weights: Weights, case: Case, amax: InputAmax
) -> tuple[Transformer, StudyOps]:
    """The model of a case; parameters that need no change are shared with other cases.

    Args:
        config: the architecture.
        weights: as `load_weights` gives them.
        case: what to quantise and how.
        amax: calibrated channels of every linear that the case quantises.
    """
    ops = StudyOps()
    with torch.device("meta"):
        model = Transformer(config, ops, case.dtype)
    tensors, amax = dict(weights), dict(amax)
    names = quantised_linears(config, case)
    if case.scheme is not None and case.scheme.smooth:
        _migrate(config, tensors, amax, names)
    for name, tensor in tensors.items():
        model.weights[name.replace(".", "/")] = nn.Parameter(tensor.to(case.dtype), False)
    if case.scheme is not None:
        for name in names:
            weight = model.weight(name + ".weight").float()
            reduced = case.scheme.weights(weight.T.contiguous()).T.contiguous()
            ops.rules[name] = partial(_quantised_product, case.scheme, reduced, amax[name])
    ops.learn(model)
    return model, ops


def _quantised_product(scheme: Scheme, weight: Tensor, amax: Tensor, x: Tensor) -> Tensor:
    """scheme(x) @ weight [in, out] in float32, rounded to x's dtype."""
    return (scheme.activations(x.float(), amax) @ weight).to(x.dtype)


def _migrate(
    config: ModelConfig, tensors: dict[str, Tensor], amax: dict[str, Tensor], names: Sequence[str]
) -> None:
    """SmoothQuant between each norm and the quantised linears that read it, in place.

    The pairs are those of the paper: the attention norm with q, k and v, the FFN norm with gate
    and up. Output and down projections have no norm before them.
    """
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        pairs = {"attn_norm": tuple(projection_sizes(config, layer)), "ffn_norm": ("gate_up",)}
        for norm, consumers in pairs.items():
            readers = [prefix + name for name in consumers if prefix + name in names]
            if not readers:
                continue
            weights = [tensors[name + ".weight"].T for name in readers]
            factor = smoothing(amax[readers[0]], weights)
            key = f"{prefix}{norm}.weight"
            tensors[key] = (tensors[key].float() / factor).to(tensors[key].dtype)
            for name in readers:
                weight = tensors[name + ".weight"]
                tensors[name + ".weight"] = (weight.float() * factor[:, None]).to(weight.dtype)
                amax[name] = amax[name] / factor


def standard_cases(
    config: ModelConfig, schemes: Sequence[str], scopes: Sequence[str]
) -> list[Case]:
    """bf16, float32, and each scheme at each scope; layer 0 apart from the `+layer0` rows.

    MOSS and SmoothQuant run at the first scope only. Each layer's sensitivity (only this layer in
    FP8) is measured with the group scheme.
    """
    later, every = tuple(range(1, config.num_layers)), tuple(range(config.num_layers))
    cases = [Case("bf16"), Case("fp32", torch.float32)]
    for scope in scopes:
        for name in schemes:
            scheme = find_scheme(name)
            if scope != scopes[0] and name in FIRST_SCOPE_ONLY:
                continue
            cases.append(Case(f"{name}.{scope}", scheme=scheme, scope=scope, layers=later))
            if name == "group":
                both = Case(f"group+layer0.{scope}", scheme=scheme, scope=scope, layers=every)
                cases.append(both)
    if "group" in schemes:
        group = SCHEMES["group"]
        cases += [
            Case(only_layer(layer), scheme=group, layers=(layer,), decoded=False) for layer in every
        ]
    return cases


def only_layer(layer: int) -> str:
    """Name of the case in which one layer's FFN alone is quantised."""
    return f"group.ffn.only{layer}"


def find_scheme(name: str) -> Scheme:
    """The scheme of this name; `InvalidRequestError` for others."""
    if name not in SCHEMES:
        known = ", ".join(("all", *SCHEMES))
        raise InvalidRequestError("unknown scheme", got=repr(name), expected=f"one of {known}")
    return SCHEMES[name]
