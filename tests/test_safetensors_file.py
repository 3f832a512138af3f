"""The safetensors header reader against the library that defines the format."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from lacache_trt.errors import CheckpointError
from lacache_trt.model.safetensors_file import read_safetensors_header


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_flipped_header_bytes_never_escape_the_error_type(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("flip") / "x.safetensors"
    save_file({"a": np.zeros((3, 2), np.float32), "b": np.ones(5, np.float16)}, path)
    content = bytearray(path.read_bytes())
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    position = data.draw(st.integers(0, header_bytes - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        tensors = read_safetensors_header(path)
    except CheckpointError:
        return
    for tensor in tensors.values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(content)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=6),
    dtype=st.sampled_from([np.float32, np.float16, np.int64, np.uint8, np.bool_]),
)
def test_reader_agrees_with_the_library_that_wrote_the_file(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], dtype: type
) -> None:
    path = tmp_path_factory.mktemp("agree") / "x.safetensors"
    rng = np.random.default_rng(0)
    arrays = {
        f"t{index}": rng.integers(0, 2, shape).astype(dtype) for index, shape in enumerate(shapes)
    }
    save_file(arrays, path)
    content = path.read_bytes()
    found = read_safetensors_header(path)
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        tensor = found[name]
        assert tensor.shape == array.shape
        assert content[tensor.offset : tensor.offset + tensor.nbytes] == array.tobytes()
