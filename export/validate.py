"""Runs exported graphs in onnxruntime beside the eager model, on random canvases.

Modes: `full` runs the bundle's own graphs (in float32) with all weights. `slice` captures the
first and the last layer with the head in the same way and runs those with their real weights, for
models that do not fit into memory twice. `auto` takes `full` where it fits. `off` does nothing.
Per output the figure is max|a - b| / max|b|; tokens must agree where the eager model is not within
the bound of a tie.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from numpy.typing import NDArray

from lacache_trt.contract import GraphSpec, graph_specs
from lacache_trt.engines.base import Int
from lacache_trt.errors import VerificationError
from lacache_trt.export.convert import convert_weights
from lacache_trt.export.graphs import PROGRAMS, capture_graph, weight_locations
from lacache_trt.export.options import OPSET, Validate
from lacache_trt.export.passes.external_weights import WeightLocation
from lacache_trt.export.passes.to_float32 import ToFloat32
from lacache_trt.export.weights import read_tensor
from lacache_trt.model.config import Dtype, ModelConfig, parameter_shapes
from lacache_trt.model.ops import TorchOps
from lacache_trt.model.transformer import Transformer
from lacache_trt.progress import Progress
from lacache_trt.siblings import SCRATCH_MARK

BOUND = 1e-4
WEIGHTS = "weights.safetensors"
_ROWS, _COLUMNS, _BLOCK = 2, 37, 7
# Graphs whose outputs are inputs of later ones.
_FEEDING = ("fill", "reuse-kv")
# Eager weights and onnxruntime's, each in float32, beside what the process holds anyway.
_FULL_COPIES, _HEADROOM_BYTES = 2.5, 2**30
Array = NDArray[Any]


def validate_bundle(
    bundle: Path,
    config: ModelConfig,
    dtype: Dtype,
    mode: Validate,
    progress: Progress,
    graphs: Sequence[str],
) -> dict[str, Any]:
    """Validate the graphs of the bundle being written; returns what was done, for the manifest.

    Raises:
        VerificationError: an output differs by more than the bound.
    """
    if mode == "off":
        return {"mode": "off"}
    chosen = mode if mode != "auto" else ("full" if _fits(config) else "slice")
    progress.start(f"validate ({chosen})", total=len(graphs))
    layers = range(config.num_layers) if chosen == "full" else _outer_layers(config)
    whole = chosen == "full"
    figures = _compare(bundle, config, dtype, tuple(layers), whole, progress, graphs)
    # Not `max`: it would pass over a NaN.
    wrong = {name: f"{figure:.2e}" for name, figure in figures.items() if not figure <= BOUND}
    if wrong:
        raise VerificationError(
            "the exported graphs do not compute what the model computes",
            got=wrong,
            expected=f"max|a - b| / max|b| <= {BOUND:g} for every output",
            fix="please report it with the checkpoint's config.json",
        )
    return {
        "mode": chosen,
        "bound": BOUND,
        "worst": max(figures.values()),
        "outputs": figures,
    }


def _fits(config: ModelConfig) -> bool:
    parameters = sum(int(np.prod(shape)) for shape in parameter_shapes(config).values())
    needed = parameters * 4 * _FULL_COPIES + _HEADROOM_BYTES
    return needed < _available_bytes()


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _outer_layers(config: ModelConfig) -> tuple[int, ...]:
    return tuple(dict.fromkeys((0, config.num_layers - 1)))


def _compare(
    bundle: Path,
    config: ModelConfig,
    dtype: Dtype,
    layers: tuple[int, ...],
    whole: bool,
    progress: Progress,
    graphs: Sequence[str],
) -> dict[str, float]:
    """Figure of every output, over the layers given."""
    sliced = replace(config, num_layers=len(layers))
    names = _source_names(sliced, layers)
    eager = _eager_model(bundle / WEIGHTS, sliced, names)
    specs = graph_specs(sliced, "float32")
    inputs = _random_inputs(sliced)
    figures: dict[str, float] = {}
    with _float32_graphs(bundle, sliced, dtype, names, whole, graphs) as directory:
        for name in graphs:
            expected = _run_eager(PROGRAMS[name](eager), specs[name], inputs)
            got = _run_graph(directory / f"{name}.onnx", specs[name], inputs)
            for key in expected:
                figures[f"{name}.{key}"] = _difference(key, got, expected, inputs)
            inputs.update(expected if name in _FEEDING else {})
            progress.advance()
    return figures


def _source_names(sliced: ModelConfig, layers: tuple[int, ...]) -> dict[str, str]:
    """Parameter of the sliced model -> tensor of the weights file."""
    names = {}
    for name in parameter_shapes(sliced):
        head, *rest = name.split(".")
        renamed = [head, str(layers[int(rest[0])]), *rest[1:]] if head == "layers" else [name]
        names[name] = ".".join(renamed)
    return names


def _eager_model(weights: Path, config: ModelConfig, names: Mapping[str, str]) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config, TorchOps(), torch.float32)
    for name, source in names.items():
        values = torch.from_numpy(read_tensor(weights, source).astype(np.float32))
        model.weights[name.replace(".", "/")] = torch.nn.Parameter(values, requires_grad=False)
    return model


def _random_inputs(config: ModelConfig) -> dict[str, Array]:
    """Two rows of different length at different blocks, one of them guided by the other."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, config.vocab_size, (_ROWS, _COLUMNS)).astype(np.int32)
    block: Int = np.add.outer(np.array([9, 23], np.int32), np.arange(_BLOCK, dtype=np.int32))
    valid_from = np.array([0, 6], np.int32)
    columns = np.arange(_COLUMNS, dtype=np.int32)
    window = np.stack([np.arange(7, 17), [*range(22, 31), -1]]).astype(np.int32)
    return {
        "tokens": tokens,
        "positions": np.maximum(columns - valid_from[:, None], 0).astype(np.int32),
        "valid_from": valid_from,
        "valid_to": np.array([_COLUMNS - 4, _COLUMNS], np.int32),
        "block_columns": block,
        "window_columns": window,
        "window_tokens": np.take_along_axis(tokens, np.maximum(window, 0), axis=1),
        "block_tokens": np.take_along_axis(tokens, block, axis=1),
        "temperature": np.array([0.0, 0.0], np.float32),
        "seed": np.array([1, 2], np.int32),
        "step": np.array([0, 3], np.int32),
        "guide_row": np.array([1, 1], np.int32),
        "cfg_scale": np.array([0.5, 0.0], np.float32),
        "suppress_ids": np.full((_ROWS, 1), config.mask_id, np.int32),
        "confidence_exclude_ids": np.full((_ROWS, 1), -1, np.int32),
        "logit_columns": block[:, :3],
    }


@contextmanager
def _float32_graphs(
    bundle: Path,
    config: ModelConfig,
    dtype: Dtype,
    names: Mapping[str, str],
    whole: bool,
    graphs: Sequence[str],
) -> Iterator[Path]:
    """Directory of float32 graphs: the bundle itself, or a conversion beside it."""
    if whole and dtype == "float32":
        yield bundle
        return
    with tempfile.TemporaryDirectory(
        dir=bundle.parent, prefix=f"{bundle.name}{SCRATCH_MARK}"
    ) as temporary:
        directory = Path(temporary)
        convert_weights(
            bundle / WEIGHTS, directory / WEIGHTS, "float32", _Quiet(), set(names.values())
        )
        locations = weight_locations(directory / WEIGHTS)
        for name in graphs:
            graph = (
                ToFloat32(locations)(ir.load(bundle / f"{name}.onnx")).model
                if whole
                else _captured(config, name, {key: locations[names[key]] for key in names})
            )
            ir.save(graph, directory / f"{name}.onnx")
        yield directory


def _captured(config: ModelConfig, name: str, locations: dict[str, WeightLocation]) -> ir.Model:
    return capture_graph(config, name, "float32", OPSET, locations)


class _Quiet:
    """The conversion is part of the validation's own stage."""

    def start(self, stage: str, total: int | None = None) -> None:
        pass

    def advance(self, amount: int = 1) -> None:
        pass


def _run_eager(
    program: torch.nn.Module, spec: GraphSpec, inputs: Mapping[str, Array]
) -> dict[str, Array]:
    with torch.inference_mode():
        outputs = program(*(torch.from_numpy(inputs[tensor.name]) for tensor in spec.inputs))
    return {tensor.name: value.numpy() for tensor, value in zip(spec.outputs, outputs, strict=True)}


def _run_graph(path: Path, spec: GraphSpec, inputs: Mapping[str, Array]) -> dict[str, Array]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {tensor.name: inputs[tensor.name] for tensor in spec.inputs})
    return {tensor.name: value for tensor, value in zip(spec.outputs, outputs, strict=True)}


def _difference(
    name: str,
    outputs: Mapping[str, Array],
    references: Mapping[str, Array],
    inputs: Mapping[str, Array],
) -> float:
    """max|a - b| / max|b| over what the contract defines; fraction of clear tokens that differ."""
    got, expected = outputs[name], references[name]
    if name == "token":
        clear = references["margin"] > BOUND
        return float(np.mean((got != expected) & clear))
    if name.startswith("fa_"):
        columns = np.arange(expected.shape[2])
        defined = ~(inputs["block_columns"][:, :, None] == columns).any(axis=1)
        got, expected = np.moveaxis(got, 2, 1)[defined], np.moveaxis(expected, 2, 1)[defined]
    scale = np.abs(expected).max()
    return float(np.abs(got - expected).max() / (scale if scale > 0 else 1.0))
