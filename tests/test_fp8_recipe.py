"""Which linears an FP8 recipe selects, and how the manifest's section is read back."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
from canvases import bounded
from hypothesis import given
from hypothesis import strategies as st
from sample_bundle import MODEL

from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.errors import ArtifactError, InvalidRequestError
from lacache_trt.model.config import fp8_dtypes, parameter_shapes
from lacache_trt.model.fp8 import (
    Fp8Recipe,
    fp8_linears,
    fp8_section,
    linear_inputs,
    select_linears,
)

WIDE = replace(MODEL, hidden_size=128, head_dim=32, num_layers=4, intermediate_size=256)
PARTS = ("qkv", "q", "kv", "attn_out", "gate_up", "down")


def test_the_default_is_the_ffn_of_all_layers_but_the_first() -> None:
    selection = select_linears(WIDE, Fp8Recipe())
    expected = [f"layers.{layer}.{part}" for layer in (1, 2, 3) for part in ("gate_up", "down")]
    assert list(selection.linears) == expected
    assert not selection.excluded
    assert not selection.unfit


@bounded(200)
@given(
    scope=st.sampled_from(["ffn", "linears", "all"]),
    layers=st.sets(st.integers(0, 3), min_size=1),
    exclude=st.lists(
        st.sampled_from(["layers.1.*", "*.down", "head", "layers.?.kv", "*gate*"]),
        max_size=2,
        unique=True,
    ),
    hidden=st.sampled_from([64, 128, 256]),
    ffn=st.sampled_from([96, 128, 384]),
)
def test_every_linear_has_exactly_one_reason(
    scope: Any, layers: set[int], exclude: list[str], hidden: int, ffn: int
) -> None:
    """In scope and layers: selected, excluded or unfit. Otherwise: none of them."""
    config = replace(WIDE, hidden_size=hidden, head_dim=hidden // 4, intermediate_size=ffn)
    text = ",".join(map(str, sorted(layers)))
    recipe = Fp8Recipe(scope=scope, layers=text, exclude=tuple(exclude))
    expected = set()
    for name, width in linear_inputs(config).items():
        _, _, part = name.rpartition(".")
        inside = name == "head" or int(name.split(".")[1]) in layers
        wanted = {"ffn": ("gate_up", "down"), "linears": PARTS, "all": (*PARTS, "head")}[scope]
        if not inside or part not in wanted or any(fnmatchcase(name, each) for each in exclude):
            continue
        if width % 128 == 0:
            expected.add(name)
    if not expected:
        with pytest.raises(InvalidRequestError, match="no linear is left"):
            select_linears(config, recipe)
        return
    selection = select_linears(config, recipe)
    assert set(selection.linears) == expected
    assert not set(selection.linears) & (set(selection.excluded) | set(selection.unfit))
    assert all(linear_inputs(config)[name] % 128 for name in selection.unfit)
    section = fp8_section(recipe, selection, {})
    assert fp8_linears({"fp8": section}, config) == expected


@bounded(60)
@given(names=st.sets(st.sampled_from(sorted(linear_inputs(WIDE)))))
def test_an_fp8_linear_is_stored_transposed_with_its_scales(names: set[str]) -> None:
    before, after = parameter_shapes(WIDE), parameter_shapes(WIDE, names)
    dtypes = fp8_dtypes(names)
    assert set(after) - set(before) == {f"{name}.scale" for name in names}
    for name in names:
        inputs, outputs = before[name + ".weight"]
        assert after[name + ".weight"] == (outputs, inputs)
        assert after[name + ".scale"] == (-(-outputs // 128), inputs // 128)
        assert dtypes[name + ".weight"] == "float8_e4m3fn"
        assert dtypes[name + ".scale"] == "float32"
    others = set(before) - {name + ".weight" for name in names}
    assert all(after[name] == before[name] for name in others)
    # A scale follows its weight, so that one sweep through the file reads both.
    order = list(after)
    assert all(order.index(f"{name}.scale") == order.index(f"{name}.weight") + 1 for name in names)


@pytest.mark.parametrize("text", ["", "1-", "-1", "a", "3-1", "1,,2", "1-2-3", "1.5", "٣", "9" * 9])
def test_layers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="these are not layers"):
        Fp8Recipe(layers=text)


def test_layers_may_be_numbers_and_ranges() -> None:
    chosen = select_linears(WIDE, Fp8Recipe(layers="0, 2-3", exclude=("*.down",))).linears
    assert chosen == ("layers.0.gate_up", "layers.2.gate_up", "layers.3.gate_up")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Fp8Recipe(layers="4"), "layers that the model does not have"),
        (Fp8Recipe(exclude=("layers.9.*",)), "matches no linear"),
        (Fp8Recipe(exclude=("*",)), "no linear is left"),
    ],
)
def test_a_recipe_that_does_not_suit_the_model_is_refused(recipe: Fp8Recipe, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        select_linears(WIDE, recipe)


def test_a_model_of_one_layer_has_nothing_to_quantise_by_default() -> None:
    with pytest.raises(InvalidRequestError, match="no linear is left"):
        select_linears(replace(WIDE, num_layers=1), Fp8Recipe())


@pytest.mark.parametrize("name", ["scope", "recipe", "scales", "quantiser"])
def test_unknown_choices_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"unknown FP8 {name}"):
        Fp8Recipe(**{name: "other"})


def test_fp8_without_plugins_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="needs the plugins"):
        BuildOptions(tensorrt=TensorRTOptions(plugins=False), fp8=Fp8Recipe())


def good_section() -> dict[str, Any]:
    """A section as it is written."""
    return fp8_section(Fp8Recipe(), select_linears(WIDE, Fp8Recipe()), {})


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"linears": None},
        {"linears": []},
        {"linears": ["layers.1.down", "layers.1.down"]},
        {"linears": ["layers.1.swiglu"]},
        {"linears": ["layers.9.down"]},
        {"linears": [["layers.1.down"]]},
        {"recipe": {}},
        {"recipe": {**Fp8Recipe().to_json(), "scope": "most"}},
        {"recipe": {**Fp8Recipe().to_json(), "exclude": [1]}},
        {"recipe": {**Fp8Recipe().to_json(), "more": 1}},
        {"facts": []},
        {"extra": 1},
    ],
)
def test_a_malformed_section_is_refused(change: dict[str, Any]) -> None:
    assert fp8_linears({"fp8": good_section()}, WIDE)
    with pytest.raises(ArtifactError, match="fp8 section"):
        fp8_linears({"fp8": {**good_section(), **change}}, WIDE)


@pytest.mark.parametrize("section", [None, [], "fp8", 8])
def test_a_section_that_is_no_object_is_refused(section: object) -> None:
    with pytest.raises(ArtifactError, match="fp8 section"):
        fp8_linears({"fp8": section}, WIDE)


def test_linears_whose_inputs_do_not_fit_are_refused() -> None:
    section = {**good_section(), "linears": ["layers.1.down"]}
    with pytest.raises(ArtifactError, match="fp8 section"):
        fp8_linears({"fp8": section}, replace(WIDE, intermediate_size=96))


def test_no_section_means_no_fp8() -> None:
    assert fp8_linears({}, WIDE) == frozenset()
