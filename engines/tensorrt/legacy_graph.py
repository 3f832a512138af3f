"""A lowered graph and its files; a machine that only builds and runs needs nothing but this."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lacache_trt.contract import TensorSpec
from lacache_trt.errors import ArtifactError


@dataclass(frozen=True)
class LoweredGraph:
    """What TensorRT 8.5 gets.

    Attributes:
        data: the ONNX model, its weights still in a file beside it.
        types: contract's name of the type of every value, by the value's name.
        absent: inputs and outputs of the contract that are empty at the fixed sizes and were
            left out.
        shared: weights that are inputs, behind those of the contract.
    """

    data: bytes
    types: Mapping[str, str]
    absent: tuple[str, ...]
    shared: tuple[TensorSpec, ...] = ()

    def write(self, path: Path) -> None:
        """The model at `path`, the rest beside it."""
        path.write_bytes(self.data)
        shared = [(spec.name, spec.shape, spec.dtype) for spec in self.shared]
        facts = {"types": self.types, "absent": self.absent, "shared": shared}
        _facts(path).write_text(json.dumps(facts))

    @classmethod
    def read(cls, path: Path) -> LoweredGraph:
        """What `write` wrote.

        Raises:
            ArtifactError: a file is missing.
        """
        if not path.is_file() or not _facts(path).is_file():
            raise ArtifactError("a lowered graph is incomplete", got=path, fix="lower it again")
        facts = json.loads(_facts(path).read_text())
        shared = tuple(TensorSpec(name, tuple(dims), kind) for name, dims, kind in facts["shared"])
        return cls(path.read_bytes(), facts["types"], tuple(facts["absent"]), shared)


def _facts(path: Path) -> Path:
    return path.with_suffix(".types.json")
