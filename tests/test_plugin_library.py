"""The plugin library: it compiles, reads only sound programs, and launches what the kernels do."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from native_entry import NativeEntry, NativeFailure
from plugin_cases import CASES, SIZES, packed, shape_list

from lacache_trt.errors import ArtifactError, EngineError, MissingDependencyError, OutputError
from lacache_trt.plugins import abi, library
from lacache_trt.plugins.expressions import ceil_div, constant, dimension, maximum, minimum
from lacache_trt.plugins.packing import OutputRule, PluginProgram, pack


@pytest.fixture(scope="module")
def plugin_library() -> Path:
    return library.build_library()


@pytest.fixture(scope="module")
def entry(plugin_library: Path) -> NativeEntry:
    return NativeEntry(plugin_library)


# --- the compiled file ---


def test_exports_are_exactly_the_entry_points(plugin_library: Path) -> None:
    command = ["nm", "-D", "--defined-only", str(plugin_library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listing.splitlines()}
    assert names == {"getCreators", "setLoggerFinder", "lacacheTestRun"}


def test_links_with_neither_tensorrt_nor_cuda(plugin_library: Path) -> None:
    command = ["readelf", "-d", str(plugin_library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = [line for line in listing.splitlines() if "NEEDED" in line]
    assert needed
    assert not [line for line in needed if "cuda" in line or "cudart" in line or "nvinfer" in line]


def test_a_second_build_comes_from_the_cache(plugin_library: Path) -> None:
    before = plugin_library.stat().st_mtime_ns
    assert library.build_library() == plugin_library
    assert plugin_library.stat().st_mtime_ns == before


def test_build_copies_to_a_chosen_folder(plugin_library: Path, tmp_path: Path) -> None:
    target = library.build_library(out=tmp_path)
    assert target == tmp_path / library.LIBRARY_NAME
    assert target.read_bytes() == plugin_library.read_bytes()


def test_a_folder_that_is_missing_is_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "find_compiler", lambda: pytest.fail("too late"))
    with pytest.raises(OutputError, match="no folder") as caught:
        library.build_library(out=tmp_path / "none" / "x")
    assert caught.value.fix == f"create {tmp_path / 'none'} first"


def test_missing_headers_say_where_they_come_from(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError) as caught:
        library.build_library(include=tmp_path)
    assert "--include" in str(caught.value)
    assert "make plugin-headers" in str(caught.value)


def test_missing_compiler_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingDependencyError, match=r"no-such-compiler(.|\n)*g\+\+"):
        library.build_library()


def test_headers_that_do_not_compile_give_the_compilers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "NvInferRuntime.h").write_text("#error not this one\n")
    (tmp_path / "NvInferVersion.h").write_text("#define NV_TENSORRT_MAJOR 10\n")
    with pytest.raises(EngineError, match="not this one"):
        library.build_library(include=tmp_path)
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_load_needs_a_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="plugins build"):
        library.load_library(object(), tmp_path / "absent.so")


# --- expressions ---


def test_expressions_agree_with_the_library(entry: NativeEntry) -> None:
    generator = random.Random(7)
    case = CASES["AttentionFill"]
    base = case.plugin_program(torch.float16, SIZES[0], 90)
    leaves = [dimension("q", 0), dimension("k", 3), dimension("block_columns", 1)]
    operations: list[Callable[[Any, Any], Any]] = [
        lambda a, b: a + b,
        lambda a, b: a * b,
        lambda a, b: maximum(a, b),
        lambda a, b: minimum(a, b),
        lambda a, b: a < b,
        lambda a, b: a // maximum(b, 1),
        lambda a, b: ceil_div(a, maximum(b, 1)),
        lambda a, b: maximum(a - b, 0),
    ]

    def grow(depth: int) -> Any:
        if depth == 0:
            return generator.choice([*leaves, constant(generator.randrange(1, 9))])
        return generator.choice(operations)(grow(depth - 1), grow(depth - 1))

    for _ in range(20):
        sizes = {**SIZES[0], "B": generator.randrange(1, 5), "M": generator.randrange(1, 40)}
        shapes = case.shapes(sizes)
        expression = grow(4)
        out = OutputRule("fa_max", torch.float32, (expression,))
        program = PluginProgram(base.op, base.inputs, (out, *base.outputs[1:]), expression, ())
        blob = _repacked(program, base)
        described = entry.describe(blob, shape_list(base, shapes))
        assert described.outputs[0][1] == (expression.evaluate(shapes),)
        assert described.workspace == expression.evaluate(shapes)


def _repacked(program: PluginProgram, base: PluginProgram) -> bytes:
    """The program with the launches of a complete one whose outputs have the same names."""
    return pack(
        PluginProgram(
            program.op,
            program.inputs,
            (*program.outputs[:1], *base.outputs[1:]),
            program.workspace,
            base.launches,
        ),
        90,
    )


# --- damaged and foreign programs ---


def _sound(entry: NativeEntry) -> tuple[bytes, Any]:
    case, sizes = CASES["AttentionReuse"], SIZES[0]
    program = case.plugin_program(torch.float16, sizes, 90)
    blob = packed(case, torch.float16, sizes, 90)
    shapes = shape_list(program, case.shapes(sizes))
    entry.describe(blob, shapes)
    return blob, shapes


def test_truncated_programs_are_refused(entry: NativeEntry) -> None:
    blob, shapes = _sound(entry)
    lengths = [*range(64), *random.Random(1).sample(range(64, len(blob)), 200), len(blob) - 1]
    for length in lengths:
        with pytest.raises(NativeFailure, match=r"truncated|damaged"):
            entry.describe(blob[:length], shapes)


def test_programs_with_a_changed_byte_are_refused(entry: NativeEntry) -> None:
    blob, shapes = _sound(entry)
    generator = random.Random(2)
    for _ in range(300):
        damaged = bytearray(blob)
        damaged[generator.randrange(len(blob))] ^= 1 << generator.randrange(8)
        with pytest.raises(NativeFailure, match=r"damaged|another version"):
            entry.describe(bytes(damaged), shapes)


def test_garbage_behind_a_right_checksum_never_crashes(entry: NativeEntry) -> None:
    """Whoever can write a checksum can write any word; the parser must hold against all of them."""
    from lacache_trt.plugins.packing import _fnv1a

    blob, shapes = _sound(entry)
    generator = random.Random(3)
    cubin = blob.index(b"\x7fELF")
    header = blob[:cubin]
    ends = 0
    for _ in range(4000):
        words = bytearray(header)
        for _ in range(generator.randrange(1, 4)):
            at = generator.randrange(3, len(header) // 8) * 8
            choices = (0, 1, 2, 7, 64, 2**31, 2**62, -1, generator.getrandbits(63))
            value = generator.choice(choices) & (2**64 - 1)
            words[at : at + 8] = value.to_bytes(8, "little")
        body = bytes(words) + bytes(generator.randrange(0, 40) * 8)
        sealed = body + _fnv1a(bytearray(body)).to_bytes(8, "little")
        try:
            entry.describe(sealed, shapes)
        except NativeFailure:
            ends += 1
    assert ends == 4000


def test_wild_arithmetic_is_refused_when_evaluated(entry: NativeEntry) -> None:
    case, sizes = CASES["AttentionFill"], SIZES[0]
    base = case.plugin_program(torch.float16, sizes, 90)
    shapes = shape_list(base, case.shapes(sizes))
    huge = constant(2**50)
    wild = {
        "overflows": huge * (huge + dimension("q", 0)),
        "divides": constant(1) // (dimension("q", 0) - 1),
    }
    for message, expression in wild.items():
        program = PluginProgram(base.op, base.inputs, base.outputs, expression, base.launches)
        with pytest.raises(NativeFailure, match=message):
            entry.describe(pack(program, 90), shapes)


def test_another_abi_names_the_rebuild_command(
    entry: NativeEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, sizes = CASES["AttentionFill"], SIZES[0]
    program = case.plugin_program(torch.float16, sizes, 90)
    monkeypatch.setattr("lacache_trt.plugins.packing.abi_hash", lambda: abi.abi_hash() ^ 1)
    with pytest.raises(NativeFailure, match="lacache-trt build BUNDLE OUT --force"):
        entry.describe(pack(program, 90), shape_list(program, case.shapes(sizes)))


def test_wrong_ranks_are_refused(entry: NativeEntry) -> None:
    blob, shapes = _sound(entry)
    for wrong in (shapes[:-1], [*shapes[:-1], (1,)], [(-1, 4, 8, 64), *shapes[1:]]):
        with pytest.raises(NativeFailure, match="ranks"):
            entry.describe(blob, wrong)


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a driver")
def test_without_a_driver_loading_fails_and_says_so(entry: NativeEntry) -> None:
    blob, _ = _sound(entry)
    with pytest.raises(NativeFailure, match=r"libcuda\.so\.1|CUDA"):
        entry.prepare(blob)
