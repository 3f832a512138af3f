"""A Hugging Face checkpoint directory, checked before anything is read from it.

Symlinks: the hub's cache keeps `snapshots/<commit>/<file>` as links into `blobs/` beside
`snapshots/`. A link is followed if what it ends at lies inside of the checkpoint directory or, for
a directory under `snapshots/`, inside of that `blobs/`; every other link is refused, since a
checkpoint from elsewhere could otherwise make the exporter read any file of the machine.
Dtypes: F32, F16 and BF16 may be mixed, with E4M3 as in `quantised_layout`. `ModelConfig.dtype` is
what config.json names, else the one dtype of all tensors but E4M3 ones, else float32, which holds
all exactly.
Pickle files (`.bin`, `.pt`, `.pth`, `.ckpt`) are never opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from lacache_trt.errors import CheckpointError
from lacache_trt.model.config import Dtype, ModelConfig
from lacache_trt.model.config_values import ConfigValues
from lacache_trt.model.families import model_config
from lacache_trt.model.hub import resolve_model as resolve_model
from lacache_trt.model.json_file import read_json_object
from lacache_trt.model.quantised_layout import split_scales, take_layout
from lacache_trt.model.safetensors_file import (
    E4M3,
    FLOAT_DTYPES,
    StoredTensor,
    read_safetensors_header,
)
from lacache_trt.model.tensor_map import TensorRecipe, tensor_recipes
from lacache_trt.model.tokenizer_facts import read_tokenizer_facts
from lacache_trt.publish import MANIFEST_NAME

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 2**20
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Frequencies that old exporters stored; they follow from rope_theta.
_DERIVED = re.compile(r"(?:.*\.)?rotary_emb\.(?:inv_freq|cos_cached|sin_cached)")
_MAX_LISTED = 200


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files exist and whose tensors are exactly those its config asks for.

    Attributes:
        directory: absolute.
        revision: commit of the hub's repository, known if the directory is a snapshot of the
            hub's cache.
        config: the architecture.
        tensors: where each tensor of the checkpoint lies, by its own name.
        recipes: how each tensor of the weights file is made of them.
        scales: those of the checkpoint's FP8 weights, by the weight's name.
    """

    directory: Path
    revision: str | None
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    recipes: Mapping[str, TensorRecipe]
    scales: Mapping[str, StoredTensor] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Read config.json and all headers; no weights are read.

        Errors: `UnsupportedModelError` for other models, `CheckpointError` for everything wrong
        with the files; missing, unexpected and misshapen tensors are named in one error.
        """
        root = checked_directory(directory)
        config = read_model_config(root)
        layout = take_layout(_read_config(root))[1]
        tensors, scales = split_scales(_stored_tensors(root), layout)
        recipes = tensor_recipes(config)
        _check_tensors(root, config, tensors, recipes, scales)
        used = {source.name for recipe in recipes.values() for source in recipe.sources}
        tensors = {name: tensor for name, tensor in tensors.items() if name in used}
        if ConfigValues(_read_config(root), config.family).dtype() is None:
            config = replace(config, dtype=_common_dtype(tensors))
        scales = {name: scale for name, scale in scales.items() if name in used}
        return cls(root, _snapshot_commit(root), config, tensors, recipes, scales)


def checked_directory(directory: str | Path) -> Path:
    """The absolute directory; `CheckpointError` if it is none."""
    root = Path(directory).expanduser()
    if not root.is_dir():
        raise CheckpointError(
            "no such checkpoint directory",
            got=str(directory),
            expected="a directory with config.json and safetensors files",
            fix="check the path, or give a hub id such as owner/name",
        )
    if (root / MANIFEST_NAME).is_file() and not (root / CONFIG_FILE).exists():
        raise CheckpointError(
            "this is a bundle or an engine already, not a checkpoint",
            got=f"{directory}, which holds a {MANIFEST_NAME} and no {CONFIG_FILE}",
            expected="a directory with config.json and safetensors files",
            fix="name the checkpoint that it was exported from; `lacache-trt build` takes a bundle",
        )
    return root.resolve()


def read_model_config(root: Path) -> ModelConfig:
    """The architecture alone, from config.json, generation_config.json and tokenizer files."""
    raw, _ = take_layout(_read_config(root))
    generation = root / "generation_config.json"
    return model_config(
        raw,
        tokenizer=read_tokenizer_facts(root, contained_file),
        generation=(
            read_json_object(contained_file(root, generation.name), MAX_CONFIG_BYTES)
            if generation.exists()
            else None
        ),
    )


def contained_file(root: Path, name: str) -> Path:
    """The real path of a file of the checkpoint.

    Errors: `CheckpointError` if `name` is more than a plain file name or leads, through a symlink,
    out of the directory and of the hub cache's blobs.
    """
    plain = name not in ("", ".", "..") and "\x00" not in name
    if not plain or PurePosixPath(name).name != name or PureWindowsPath(name).name != name:
        raise CheckpointError(
            "a file name leads out of the checkpoint",
            got=repr(name[:200]),
            expected="the plain name of a file in the directory",
            fix="do not use this checkpoint: its index was made or changed by hand",
        )
    try:
        real = (root / name).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint lacks {name}",
            got=f"{type(error).__name__} for {root / name}",
            expected="a file",
            fix="download the checkpoint again",
        ) from error
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(home) for home in homes):
        raise CheckpointError(
            f"{name} is a symlink that leads out of the checkpoint",
            got=str(real),
            expected=f"a file inside of {root}",
            fix="copy the file into the directory",
        )
    return real


def _read_config(root: Path) -> dict[str, Any]:
    if not os.path.lexists(root / CONFIG_FILE):
        raise CheckpointError(
            f"{root} holds no {CONFIG_FILE}",
            got="a folder without it",
            expected=f"a checkpoint: {CONFIG_FILE} and safetensors files",
            fix="is it a checkpoint? name the folder that holds these files",
        )
    return read_json_object(contained_file(root, CONFIG_FILE), MAX_CONFIG_BYTES)


def _stored_tensors(root: Path) -> dict[str, StoredTensor]:
    if (root / SINGLE_FILE).is_symlink() or (root / SINGLE_FILE).exists():
        return read_safetensors_header(contained_file(root, SINGLE_FILE))
    if (root / INDEX_FILE).is_symlink() or (root / INDEX_FILE).exists():
        return _sharded_tensors(root)
    found = sorted(path.name for path in root.iterdir())
    pickles = [name for name in found if name.endswith(PICKLE_SUFFIXES)]
    shards = [name for name in found if name.endswith(".safetensors")]
    fix = f"download {INDEX_FILE} too" if shards else "download the weights"
    if pickles:
        fix = "convert the pickle files to safetensors first; pickle can run code and is not read"
    raise CheckpointError(
        "the checkpoint has no weights that can be read",
        got=", ".join((pickles or shards or found)[:10]) or "an empty directory",
        expected=f"{SINGLE_FILE}, or {INDEX_FILE} and its shards",
        fix=fix,
    )


def _sharded_tensors(root: Path) -> dict[str, StoredTensor]:
    index = read_json_object(contained_file(root, INDEX_FILE))
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise CheckpointError(
            f"{INDEX_FILE} has no weight_map",
            got=str(weight_map)[:80],
            expected="an object from tensor names to file names",
            fix="download the index again",
        )
    shards = {
        shard: read_safetensors_header(contained_file(root, shard))
        for shard in sorted(set(weight_map.values()))
    }
    misplaced = [name for name, shard in weight_map.items() if name not in shards[shard]]
    unlisted = [name for shard in shards for name in shards[shard] if weight_map.get(name) != shard]
    if misplaced or unlisted:
        raise CheckpointError(
            f"{INDEX_FILE} and the shards disagree",
            got="; ".join(
                f"{label}: {_listed(names)}"
                for label, names in (
                    ("not in the shard that the index names", misplaced),
                    ("in a shard that the index does not name", unlisted),
                )
                if names
            ),
            expected="each tensor once, in the shard that the index names",
            fix="download index and shards of one revision",
        )
    return {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}


def _check_tensors(
    root: Path,
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    recipes: Mapping[str, TensorRecipe],
    scales: Mapping[str, StoredTensor],
) -> None:
    shapes = {source.name: source.shape for recipe in recipes.values() for source in recipe.sources}
    problems = {
        "missing": [name for name in shapes if name not in tensors],
        "unexpected": [
            name for name in tensors if name not in shapes and not _DERIVED.fullmatch(name)
        ],
        "wrong shape": [
            f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
            for name, shape in shapes.items()
            if name in tensors and tensors[name].shape != shape
        ],
        "wrong dtype": [
            f"{name} {tensors[name].dtype}"
            for name in shapes
            if name in tensors and name not in scales and tensors[name].dtype not in FLOAT_DTYPES
        ],
    }
    if any(problems.values()):
        tied = " (its head is tied to the embedding)" if config.tied_head else ""
        raise CheckpointError(
            f"the tensors of {root.name} are not those that its config.json asks for",
            got="; ".join(f"{kind}: {_listed(names)}" for kind, names in problems.items() if names),
            expected=f"the {len(shapes)} tensors of a {config.num_layers}-layer {config.family} "
            f"model{tied} in F32, F16 or BF16",
            fix="use config.json and weights of one revision; quantised or fused weights and "
            "adapters must be converted first",
        )


def _common_dtype(tensors: Mapping[str, StoredTensor]) -> Dtype:
    dtypes = {FLOAT_DTYPES[tensor.dtype] for tensor in tensors.values() if tensor.dtype != E4M3}
    return dtypes.pop() if len(dtypes) == 1 else "float32"


def _snapshot_commit(root: Path) -> str | None:
    cached = root.parent.name == "snapshots" and _COMMIT.fullmatch(root.name)
    return root.name if cached else None


def _listed(names: list[str]) -> str:
    """All names; only a list too long to be read is cut, and says so."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
