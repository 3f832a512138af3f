"""The FP8 flags of `build`, and what `inspect` shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_fp8_weights import write_directory
from typer.testing import CliRunner, Result

from lacache_trt.cli.main import app
from lacache_trt.engines import builder
from lacache_trt.engines.cuda.fp8 import Fp8Table
from lacache_trt.engines.options import BuildOptions
from lacache_trt.model.fp8 import Fp8Recipe


def run(*arguments: str) -> Result:
    """What a command line does."""
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[BuildOptions]:
    """The options of every build that is asked for; nothing is built."""
    found: list[BuildOptions] = []

    def record(bundle: Path, out: Path, chosen: BuildOptions, progress: Any) -> Any:
        found.append(chosen)
        return builder.BuildReport(out, chosen.engine, 1.0, 2, ("layers.1.down is not FP8: why",))

    monkeypatch.setattr(builder, "build_engine", record)
    # It reads the lengths of what would have been built.
    monkeypatch.setattr("lacache_trt.cli.next_step.generate_line", lambda out: f"generate {out}")
    return found


def test_the_flags_make_the_recipe(options: list[BuildOptions]) -> None:
    flags = ["--fp8-scope", "linears", "--fp8-layers", "1-2", "--fp8-scales", "mse"]
    more = ["--fp8-exclude", "*.down", "--fp8-exclude", "layers.2.*", "--fp8-quantiser", "modelopt"]
    done = run("build", "b", "o", "--engine", "onnxruntime", "--fp8", *flags, *more)
    assert done.exit_code == 0
    expected = Fp8Recipe(
        scope="linears",
        layers="1-2",
        exclude=("*.down", "layers.2.*"),
        scales="mse",
        quantiser="modelopt",
    )
    assert options[0].fp8 == expected


def test_per_channel_takes_a_calibration_and_needs_no_plugins(options: list[BuildOptions]) -> None:
    flags = ["--fp8", "--fp8-recipe", "per-channel", "--calibration", "a.jsonl", "--no-plugins"]
    done = run("build", "b", "o", "--engine", "tensorrt-rtx", "--sm", "89", *flags)
    assert done.exit_code == 0, done.stderr
    assert options[0].fp8 == Fp8Recipe(recipe="per-channel")
    assert options[0].calibration == Path("a.jsonl")
    assert not options[0].tensorrt.plugins


def test_without_the_flag_nothing_is_quantised(options: list[BuildOptions]) -> None:
    assert run("build", "b", "o", "--engine", "onnxruntime").exit_code == 0
    assert options[0].fp8 is None


def test_warnings_are_printed_and_in_the_json(options: list[BuildOptions]) -> None:
    done = run("build", "b", "o", "--engine", "onnxruntime", "--fp8", "--json")
    assert json.loads(done.stdout)["warnings"] == ["layers.1.down is not FP8: why"]
    assert "warning: layers.1.down is not FP8: why" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fp8-scope", "all"], "add --fp8"),
        (["--fp8", "--fp8-scope", "most"], "unknown FP8 scope"),
        (["--fp8", "--fp8-recipe", "per-channel"], "add --calibration FILE.jsonl"),
        (["--fp8", "--calibration", "a.jsonl"], "nothing here needs a calibration"),
        (["--calibration", "a.jsonl"], "without --fp8"),
        (["--fp8", "--fp8-recipe", "per-row"], "unknown FP8 recipe"),
        (["--fp8", "--fp8-layers", "x"], "these are not layers"),
    ],
)
def test_flags_that_mean_nothing_are_refused(
    options: list[BuildOptions], flags: list[str], message: str
) -> None:
    done = run("build", "b", "o", "--engine", "onnxruntime", *flags)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not options


def test_fp8_without_plugins_is_refused(options: list[BuildOptions]) -> None:
    flags = ["--engine", "tensorrt-rtx", "--sm", "89", "--fp8", "--no-plugins"]
    done = run("build", "b", "o", *flags)
    assert done.exit_code == 2
    assert "needs the plugins" in done.stderr
    assert "--fp8-recipe per-channel --calibration FILE.jsonl" in done.stderr


def test_inspect_shows_recipe_and_kernels(tmp_path: Path) -> None:
    table = Fp8Table({(128, 768): {32: "triton", 2048: "cublaslt"}})
    engine = write_directory(tmp_path / "engine", fp8_gemms=table.to_json())
    directory = str(engine)
    shown = run("inspect", directory).stdout
    assert "layers.1.gate_up" in shown
    assert "4 in 2 of 3 layers" in shown
    assert "cublaslt" in shown
    found = json.loads(run("inspect", directory, "--json").stdout)
    assert found["fp8"]["recipe"]["scope"] == "ffn"
    assert Fp8Table.from_json(found["fp8_gemms"]) == table


def test_help_names_every_flag() -> None:
    shown = run("build", "--help").stdout
    for flag in ("", "-scope", "-layers", "-exclude", "-recipe", "-scales", "-quantiser"):
        assert f"--fp8{flag}" in shown
    assert "--calibration" in shown
