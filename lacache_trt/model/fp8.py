"""Which linears of a model are FP8: what a recipe selects, and what a manifest records of it.

A linear is named as its weight in the weights file without `.weight`: `layers.3.gate_up`. Its
weight is E4M3, [out, in]. Per group: one float32 scale per 128 x 128 block beside it (`.scale`);
the input is quantised per 1 x 128 group at run time. Groups run along the input, so only linears
whose input width is a multiple of 128 can be FP8; the output may have any width. Per channel: one
scale per output, and one static scale for the whole input (`.input_scale`), from a calibration; any
widths. The default, the FFN of all layers but the first, is LaCache's (arXiv 2607.16339).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from lacache_trt.errors import ArtifactError, InvalidRequestError
from lacache_trt.model.config import Granularity, ModelConfig, projection_sizes
from lacache_trt.model.fp8_recipe import Fp8Recipe as Fp8Recipe
from lacache_trt.model.fp8_recipe import Scope, layer_ranges

GROUP = 128
FORMAT = 1
FP8_SM = 89
"""First compute capability with FP8 tensor cores."""
_SECTION = {"format", "recipe", "linears", "excluded", "unfit", "facts"}
_OBJECTS = ("recipe", "excluded", "unfit", "facts")
_COUNTS = ("prompts", "tokens", "gen_length", "block_length", "steps")
_DIGEST = "sha256"


@dataclass(frozen=True)
class Fp8Selection:
    """What a recipe selects in one model.

    Attributes:
        linears: names of the linears that become FP8, in file order.
        excluded: linears that a pattern leaves out, and the pattern.
        unfit: linears that cannot be FP8, and why.
    """

    linears: tuple[str, ...]
    excluded: Mapping[str, str]
    unfit: Mapping[str, str]


def select_linears(config: ModelConfig, recipe: Fp8Recipe) -> Fp8Selection:
    """The linears that a recipe makes FP8.

    Raises:
        InvalidRequestError: the layers do not exist, a pattern matches nothing, or nothing is left.
    """
    chosen = _layers(config, recipe.layers)
    widths = linear_inputs(config)
    candidates = [name for name in widths if _in_scope(name, recipe.scope, chosen)]
    _check_patterns(recipe.exclude, widths)
    excluded = {
        name: pattern
        for name in candidates
        for pattern in reversed(recipe.exclude)
        if fnmatchcase(name, pattern)
    }
    unfit = {
        name: f"its input width {widths[name]} is not a multiple of {GROUP}"
        for name in candidates
        if name not in excluded and not _fits(widths[name], recipe.recipe)
    }
    linears = tuple(name for name in candidates if name not in excluded and name not in unfit)
    if not linears:
        raise InvalidRequestError(
            "no linear is left to quantise",
            got=f"scope {recipe.scope}, layers {sorted(chosen)}, {len(excluded)} excluded"
            + "".join(f"; {name}: {why}" for name, why in list(unfit.items())[:1]),
            expected="at least one"
            + (f" whose input width is a multiple of {GROUP}" if unfit else ""),
            fix="choose other layers or a larger scope, or build without --fp8",
        )
    return Fp8Selection(linears, excluded, unfit)


def linear_inputs(config: ModelConfig) -> dict[str, int]:
    """Input width of every linear of the model, in file order."""
    widths: dict[str, int] = {}
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        widths |= {prefix + name: config.hidden_size for name in projection_sizes(config, layer)}
        widths[prefix + "attn_out"] = config.query_size
        widths[prefix + "gate_up"] = config.hidden_size
        widths[prefix + "down"] = config.intermediate_size
    widths["head"] = config.hidden_size
    return widths


def fp8_section(
    recipe: Fp8Recipe,
    selection: Fp8Selection,
    facts: object,
    calibration: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """The manifest's `fp8` section.

    Args:
        recipe: what was asked for.
        selection: what it selects.
        facts: what the quantiser reports of each linear.
        calibration: what the static scales were measured on; only they have one.
    """
    return {
        "format": FORMAT,
        "recipe": recipe.to_json(),
        "linears": list(selection.linears),
        "excluded": dict(selection.excluded),
        "unfit": dict(selection.unfit),
        "facts": facts,
        **({} if calibration is None else {"calibration": dict(calibration)}),
    }


def fp8_linears(body: Mapping[str, object], config: ModelConfig) -> frozenset[str]:
    """The FP8 linears that a manifest records; none if it has no `fp8` section.

    Raises:
        ArtifactError: the section is malformed or names linears that the model does not have.
    """
    if "fp8" not in body:
        return frozenset()
    section = body["fp8"]
    if not isinstance(section, dict) or set(section) - {"calibration"} != _SECTION:
        raise _wrong_section(f"{sorted(section) if isinstance(section, dict) else section!r}")
    linears, version = section["linears"], section["format"]
    objects = all(isinstance(section[name], dict) for name in _OBJECTS)
    if version != FORMAT or not isinstance(linears, list) or not objects:
        raise _wrong_section(f"format {version!r}, linears {str(linears)[:80]}")
    recipe = _read_recipe(section["recipe"])
    _check_calibration(section.get("calibration"), recipe)
    widths = linear_inputs(config)
    wrong = [name for name in linears if not isinstance(name, str) or name not in widths]
    wrong = wrong or [name for name in linears if not _fits(widths[name], recipe.recipe)]
    if wrong or not linears or len(set(linears)) != len(linears):
        raise _wrong_section(", ".join(map(str, wrong[:8])) or f"{len(linears)} linears, repeated")
    return frozenset(linears)


def fp8_granularity(body: Mapping[str, object]) -> Granularity:
    """Who shares a scale, by a manifest whose section `fp8_linears` has read."""
    section = body.get("fp8")
    recipe = _read_recipe(section["recipe"]) if isinstance(section, dict) else Fp8Recipe()
    return recipe.recipe


def refuse_fp8_source(body: Mapping[str, object]) -> None:
    """Raise `InvalidRequestError` if a bundle that is to be quantised is FP8 already."""
    if "fp8" in body:
        raise InvalidRequestError(
            "the bundle is FP8 already",
            got="a manifest with an fp8 section",
            expected="a bundle in float32, float16 or bfloat16",
            fix="leave --fp8 out: an engine built from this bundle is FP8",
        )


def _read_recipe(data: Mapping[str, Any]) -> Fp8Recipe:
    exclude = data.get("exclude")
    try:
        recipe = Fp8Recipe(**{**data, "exclude": tuple(exclude or ())})
        if recipe.to_json() == data and all(isinstance(each, str) for each in recipe.exclude):
            return recipe
    except (TypeError, AttributeError, InvalidRequestError):
        pass
    raise _wrong_section(f"recipe {str(data)[:80]}")


def _check_calibration(found: object, recipe: Fp8Recipe) -> None:
    """Static scales come with what they were measured on, others with nothing."""
    if recipe.recipe == "per-group" and found is None:
        return
    good = (
        recipe.recipe == "per-channel"
        and isinstance(found, dict)
        and set(found) == {*_COUNTS, _DIGEST}
        and all(type(found[name]) is int and found[name] > 0 for name in _COUNTS)
        and isinstance(found[_DIGEST], str)
    )
    if not good:
        raise _wrong_section(f"recipe {recipe.recipe}, calibration {str(found)[:80]}")


def _fits(width: int, granularity: Granularity) -> bool:
    """Whether a linear with inputs of this width can be FP8."""
    return granularity == "per-channel" or width % GROUP == 0


def _wrong_section(got: str) -> ArtifactError:
    return ArtifactError(
        "the fp8 section of the manifest does not fit the model",
        got=got,
        expected=f"format {FORMAT}, a recipe, its calibration if it is per channel, and linears of "
        f"the model, per group with inputs that are a multiple of {GROUP} wide",
        fix="build again with --fp8",
    )


def _in_scope(name: str, scope: Scope, layers: Collection[int]) -> bool:
    if name == "head":
        return scope == "all"
    _, layer, kind = name.split(".")
    return int(layer) in layers and (scope != "ffn" or kind in ("gate_up", "down"))


def _layers(config: ModelConfig, text: str | None) -> frozenset[int]:
    if text is None:
        return frozenset(range(1, config.num_layers))
    chosen = {layer for low, high in layer_ranges(text) for layer in range(low, high + 1)}
    if max(chosen) >= config.num_layers:
        raise InvalidRequestError(
            "FP8 is asked for in layers that the model does not have",
            got=text,
            expected=f"layers 0 to {config.num_layers - 1}",
            fix="correct --fp8-layers",
        )
    return frozenset(chosen)


def _check_patterns(patterns: tuple[str, ...], names: Collection[str]) -> None:
    unused = [each for each in patterns if not any(fnmatchcase(name, each) for name in names)]
    if unused:
        raise InvalidRequestError(
            "a pattern of --fp8-exclude matches no linear",
            got=", ".join(unused),
            expected=f"patterns of names as {', '.join(list(names)[-4:])}",
            fix="correct or remove it",
        )
