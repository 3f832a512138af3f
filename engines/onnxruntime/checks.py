"""What an engine directory for ONNX Runtime must satisfy before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnxruntime as ort

from lacache_trt.artifacts import Manifest
from lacache_trt.contract import GraphSpec, known_contract
from lacache_trt.errors import ArtifactError
from lacache_trt.validation import describe

MAX_THREADS = 1024
_ORT_TYPES = {"int32": "tensor(int32)", "float32": "tensor(float)"}


def check_manifest(manifest: Manifest) -> None:
    """What the manifest says of the graphs must follow from its model section."""
    expected = known_contract(manifest.contract, manifest.model, "float32")
    differing = sorted(
        name
        for name in expected.keys() | manifest.contract.keys()
        if manifest.contract.get(name) != expected.get(name)
    )
    if differing:
        raise ArtifactError(
            "the contract of the manifest contradicts its model section",
            got=f"other tensors in {', '.join(map(repr, differing))}",
            expected="the tensors that follow from the model's sizes",
            fix="build the engine again",
        )
    threads = manifest.body.get("threads")
    if threads is not None and (type(threads) is not int or not 0 <= threads <= MAX_THREADS):
        raise ArtifactError(
            "the manifest has an invalid number of threads",
            got=describe(threads),
            expected=f"null, or an integer from 0 to {MAX_THREADS}",
            fix="build the engine again",
        )


def check_contract(session: ort.InferenceSession, spec: GraphSpec) -> None:
    """Names, dtypes, ranks and fixed sizes of the file must be those of the manifest."""
    for side, nodes, tensors in (
        ("inputs", session.get_inputs(), spec.inputs),
        ("outputs", session.get_outputs(), spec.outputs),
    ):
        got = {node.name: (node.type, _fixed_sizes(node.shape)) for node in nodes}
        expected = {
            tensor.name: (_ORT_TYPES[tensor.dtype], _fixed_sizes(tensor.shape))
            for tensor in tensors
        }
        if got != expected:
            differing = sorted({name for name, _ in got.items() ^ expected.items()})
            raise ArtifactError(
                f"the {side} of graph {spec.name!r} differ from the manifest",
                got={name: got.get(name) for name in differing},
                expected={name: expected.get(name) for name in differing},
                fix="build the engine again",
            )


def _fixed_sizes(shape: Sequence[Any]) -> tuple[int | None, ...]:
    """The sizes that are numbers; None for symbolic ones."""
    return tuple(size if isinstance(size, int) else None for size in shape)
