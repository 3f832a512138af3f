"""What is exported and lowered beforehand, since only TensorRT itself runs on the GPU machine.

`lowered_graphs` makes the graphs of a model at several fixed sizes over a weights file that exists
only as a layout: the GPU machine writes it, with random numbers of LLaDA-8B's shape or with
tiny-llada's weights. `tiny_reference` makes those, and ONNX Runtime's traces of the held-out
problems; `tiny_fp8` makes the same for FP8, with its graphs.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import onnx_ir as ir
import traces
from llada_shape import shallow

from lacache_trt.artifacts import Manifest, load_manifest
from lacache_trt.contract import graph_specs
from lacache_trt.contract_json import contract_to_json
from lacache_trt.demo.problems import problem
from lacache_trt.demo.run import CHECKPOINT
from lacache_trt.engines.builder import DERIVED, build_engine, load_engine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.tensorrt.layout import GRAPHS, WEIGHTS_FILE
from lacache_trt.engines.tensorrt.legacy_directory import fixed_profile
from lacache_trt.engines.tensorrt.legacy_lowering import lower_model
from lacache_trt.engines.tensorrt.profiles import Profile
from lacache_trt.export.exporter import export_bundle
from lacache_trt.export.graphs import capture_graph
from lacache_trt.export.options import ExportOptions
from lacache_trt.export.passes.external_weights import WeightLocation
from lacache_trt.export.weights import plan_layout
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.checkpoint import Checkpoint
from lacache_trt.model.config import DTYPE_BYTES, Dtype, ModelConfig, parameter_shapes
from lacache_trt.model.fp8 import Fp8Recipe
from lacache_trt.text import TextCodec

SM = 90
OPSET = 23
PROBLEMS, GENERATED, BATCH = 32, 64, 4
BLOCKS = (8, 32, 64)
FP8_BLOCKS = SHARED_BLOCKS = (32,)
TINY_LENGTH = 128  # the held-out prompts have up to 63 tokens
LENGTHS = (384, 1152)
FACTS = "model.json"
_ONNX = {"float16": ir.DataType.FLOAT16, "float32": ir.DataType.FLOAT}


def decoding(block: int) -> GenerationConfig:
    """One token a step, exact caches, to the end of the canvas."""
    return GenerationConfig(
        gen_length=GENERATED, block_length=block, steps=GENERATED, stop_at_eos=False
    )


def held_out(codec: TextCodec) -> list[list[int]]:
    """The prompts of the held-out problems as token ids."""
    texts = [problem("held-out", index).question for index in range(PROBLEMS)]
    if codec.has_chat_template:
        texts = [codec.apply_chat_template(text) for text in texts]
    return [codec.encode(text) for text in texts]


def tiny_reference(folder: Path) -> None:
    """tiny-llada's float16 weights, the held-out prompts and ONNX Runtime's traces."""
    with tempfile.TemporaryDirectory() as temporary:
        manifest = _tiny_bundle(Path(temporary) / "bundle")
        codec = TextCodec.load(manifest.directory)
        if codec is None:
            raise RuntimeError("tiny-llada has lost its tokenizer")
        prompts = held_out(codec)
        data = manifest.path(WEIGHTS_FILE).read_bytes()
        start = plan_layout(parameter_shapes(manifest.model), "float16").data_start
        (folder / "weights.float16").write_bytes(data[start:])
        (folder / "prompts.json").write_text(json.dumps(prompts))
        out = Path(temporary) / "engine"
        build_engine(manifest.directory, out, BuildOptions(engine="onnxruntime", threads=1))
        _traces(out, prompts, BLOCKS, folder)


def tiny_fp8(folder: Path) -> None:
    """tiny-llada with FP8 in its FFNs, at one block length: weights, graphs, ONNX Runtime's trace.

    The prompts are `tiny_reference`'s.
    """
    with tempfile.TemporaryDirectory() as temporary:
        manifest = _tiny_bundle(Path(temporary) / "bundle")
        codec = TextCodec.load(manifest.directory)
        if codec is None:
            raise RuntimeError("tiny-llada has lost its tokenizer")
        out = Path(temporary) / "engine"
        options = BuildOptions(engine="onnxruntime", threads=1, fp8=Fp8Recipe())
        build_engine(manifest.directory, out, options)
        derived = load_manifest(out / DERIVED, "bundle", hashes="sizes")
        shutil.copyfile(derived.path(WEIGHTS_FILE), folder / WEIGHTS_FILE)
        for graph in GRAPHS:
            for block in FP8_BLOCKS:
                profile = fixed_profile((_tiny_profile(block),), manifest.model.max_length)
                target = folder / f"bk{block}"
                target.mkdir(exist_ok=True)
                model = ir.load(derived.path(f"{graph}.onnx"))
                lower_model(model, SM, _sizes(profile)).write(target / f"{graph}.onnx")
                _write_facts(target, manifest.model, "float16", profile)
        _traces(out, held_out(codec), FP8_BLOCKS, folder)


def _tiny_bundle(folder: Path) -> Manifest:
    export_bundle(str(CHECKPOINT), folder, ExportOptions(dtype="float16", validate="off"))
    return load_manifest(folder, "bundle")


def _traces(
    engine_directory: Path, prompts: list[list[int]], blocks: Sequence[int], folder: Path
) -> None:
    with load_engine(load_manifest(engine_directory, "engine")) as engine:
        for block in blocks:
            trace = traces.generate_traced(engine, prompts, decoding(block), BATCH)
            traces.save(folder / f"onnxruntime.bk{block}.npz", trace)


def tiny_graphs(folder: Path) -> None:
    """tiny-llada's graphs in float16 at every block length."""
    _tiny_graphs(folder, BLOCKS, False)


def tiny_shared(folder: Path) -> None:
    """The same at one block length with its large weights as inputs."""
    _tiny_graphs(folder, SHARED_BLOCKS, True)


def _tiny_graphs(folder: Path, blocks: Sequence[int], share_weights: bool) -> None:
    config = replace(Checkpoint.open(CHECKPOINT).config, dtype="float16")
    profiles = {f"bk{block}": _tiny_profile(block) for block in blocks}
    lowered_graphs(config, "float16", profiles, folder, share_weights)


def _tiny_profile(block: int) -> str:
    return f"B={BATCH},N={TINY_LENGTH},Bk={block}"


def _sizes(profile: Profile) -> dict[str, int]:
    return {symbol: value.tuned for symbol, value in profile.ranges.items()}


def llada_8b(folder: Path, layers: int, share_weights: bool) -> None:
    """Graphs of LLaDA-8B's shape in float16 at every length.

    The embedding table is an input of either kind, for it is too large to be a constant.
    """
    config = replace(shallow(layers), dtype="float16")
    profiles = {f"n{length}": f"B=1,N={length},Bk=32" for length in LENGTHS}
    lowered_graphs(config, "float16", profiles, folder, share_weights)


def lowered_graphs(
    config: ModelConfig,
    dtype: Dtype,
    profiles: Mapping[str, str],
    folder: Path,
    share_weights: bool,
) -> None:
    """The lowered graphs at each profile, by name, and the layout of their weights."""
    shapes = parameter_shapes(config)
    layout = plan_layout(shapes, dtype)
    locations = {
        name: WeightLocation(
            file=WEIGHTS_FILE,
            offset=layout.offsets[name],
            nbytes=DTYPE_BYTES[dtype] * prod(shape),
            dtype=_ONNX[dtype],
            shape=shape,
        )
        for name, shape in shapes.items()
    }
    for graph in GRAPHS:
        model = capture_graph(config, graph, dtype, OPSET, locations)
        path = folder / "symbolic.onnx"
        ir.save(model, path)
        for name, text in profiles.items():
            profile = fixed_profile((text,), config.max_length)
            target = folder / name
            target.mkdir(exist_ok=True)
            lowered = lower_model(ir.load(path), SM, _sizes(profile), share_weights)
            lowered.write(target / f"{graph}.onnx")
            _write_facts(target, config, dtype, profile)
        path.unlink()
    (folder / "weights.header").write_bytes(layout.header)
    facts = {"offsets": layout.offsets, "size": layout.size, "shapes": shapes}
    (folder / "weights.json").write_text(json.dumps(facts))


def _write_facts(folder: Path, model: ModelConfig, dtype: Dtype, profile: Profile) -> None:
    contract = {name: graph_specs(model, dtype)[name] for name in GRAPHS}
    facts = {
        "model": model.to_json(),
        "dtype": dtype,
        "profile": profile.to_json(),
        "contract": contract_to_json(contract),
    }
    (folder / FACTS).write_text(json.dumps(facts))
