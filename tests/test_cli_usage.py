"""What a user mistypes: one JSON document under `--json`, and words that say what to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from sample_bundle import MODEL, write_bundle
from typer.testing import CliRunner, Result

from lacache_trt.accuracy.settings import AccuracySettings, ActivationSettings
from lacache_trt.artifacts import write_manifest
from lacache_trt.bench_report import BenchSettings
from lacache_trt.cli.flags import FlagGroup
from lacache_trt.cli.main import app
from lacache_trt.cli.next_step import generate_line
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.registry import ENGINES
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.errors import CheckpointError
from lacache_trt.export.options import ExportOptions
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.checkpoint import Checkpoint
from lacache_trt.model.fp8 import Fp8Recipe
from lacache_trt.policy_grid import GridSettings


def invoke(*arguments: object, stdin: str = "") -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "--json"), "ENGINES"),
        (("generate", "e", "--steps", "many", "--json"), "--steps"),
        (("build", "--json", "b", "o", "--nothing"), "--nothing"),
        (("nothing", "--json"), "nothing"),
        (("plugins", "nothing", "--json"), "nothing"),
        (("bench", "everything", "e", "--json"), "everything"),
    ],
)
def test_usage_errors_are_json_when_json_is_asked_for(
    arguments: tuple[str, ...], words: str
) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert words in error["what"]
    assert error["exit_code"] == 2
    assert "--help" in error["fix"]
    assert words in result.stderr
    plain = invoke(*(each for each in arguments if each != "--json"))
    assert (plain.exit_code, plain.stdout) == (2, "")


def test_json_behind_the_separator_is_an_argument() -> None:
    assert invoke("generate", "--nothing", "--", "--json").stdout == ""


def test_tokens_and_json_lines_exclude_each_other() -> None:
    result = invoke("generate", "e", "--tokens", "--jsonl", stdin="[5]\n")
    assert result.exit_code == 2
    assert "--tokens and --jsonl" in result.stderr


@pytest.mark.parametrize(
    "settings",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1:surrogateescape"},
    ],
    ids=["utf8_mode", "locale", "ascii", "latin"],
)
def test_what_stdout_cannot_encode_is_escaped(settings: dict[str, str], tmp_path: Path) -> None:
    """The marks of `doctor`, and a path that is no text."""
    write_bundle(folder := tmp_path / os.fsdecode(b"k\xff"))
    environment = {name: value for name, value in os.environ.items() if name[:3] != "LC_"}
    for arguments in (("doctor",), ("inspect", folder)):
        done = subprocess.run(
            [sys.executable, "-m", "lacache_trt.cli", *arguments],
            env=environment | settings,
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        expected = b"abilities" if arguments[0] == "doctor" else rb"k\udcff"
        assert expected in done.stdout


def test_demo_keeps_in_a_directory_only(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "manifest.json").write_text("{}")
    for keep in (file, file / "below", bundle):
        result = invoke("demo", "--keep", keep)
        assert result.exit_code == 3
        assert "fix:" in result.stderr
        assert "--keep" in result.stderr


def test_a_bundle_is_not_exported_again(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    result = invoke("export", tmp_path, tmp_path.parent / "out")
    assert result.exit_code == 2
    assert "is a bundle or an engine already" in result.stderr
    assert f"lacache-trt build {tmp_path}" in result.stderr
    with pytest.raises(CheckpointError, match="is a bundle or an engine already"):
        Checkpoint.open(tmp_path)


def test_a_quoted_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "manifest.json").write_text("{}")
    assert str(tmp_path / "nowhere") in invoke("inspect", "~/nowhere").stderr
    assert f"build {tmp_path}/bundle {tmp_path}/out" in invoke("export", "~/bundle", "~/out").stderr
    assert str(tmp_path / "one") in invoke("bench", "policies", "~/one", "~/two").stderr
    several = invoke("bench", "accuracy", "--engine", "~/one", "--engine", "~/two")
    assert str(tmp_path / "one") in several.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--fp8", "--no-plugins"], ["take --no-plugins", "standard operators alone, with --fp8"]),
        (["--no-plugins"], ["take --no-plugins", "standard operators alone"]),
        (["--sm", "89", "--profile", "B=1"], ["take --sm, --profile", "only tensorrt and"]),
    ],
)
def test_flags_of_tensorrt_for_another_engine(flags: list[str], words: list[str]) -> None:
    result = invoke("build", "b", "o", "--engine", "onnxruntime", *flags)
    assert result.exit_code == 2
    first, *rest = result.stderr.splitlines()
    assert first.startswith("error: the onnxruntime engine does not ")
    assert words[0] in first
    assert words[1] in rest[-1]
    assert rest[-1].lstrip().startswith("fix:")


@pytest.mark.parametrize(
    "group",
    [
        *(FlagGroup(cls) for cls in (ExportOptions, BuildOptions, TensorRTOptions, Fp8Recipe)),
        *(FlagGroup(cls) for cls in (GenerationConfig, AccuracySettings, ActivationSettings)),
        *(FlagGroup(cls) for cls in (GridSettings, BenchSettings)),
    ],
    ids=lambda group: group.cls.__name__,
)
def test_help_spells_values_as_they_are_typed(group: FlagGroup[object]) -> None:
    """Neither a flag's own choices nor the names of engines get a capital letter."""
    values = {*ENGINES, "auto"}
    for parameter in group.parameters:
        option = get_args(parameter.annotation)[1]
        own = set((option.metavar or "").split("|"))
        first = re.split(r"[ ,:;]", option.help, maxsplit=1)[0]
        assert first.lower() == first or first.lower() not in values | own, option.help
        assert "`" not in option.help
        assert "[default: (" not in option.help


def test_help_of_build_and_accuracy() -> None:
    build = " ".join(invoke("build", "--help").stdout.split())
    assert "--engine <str> tensorrt, tensorrt-rtx, cuda or onnxruntime; auto is" in build
    assert "--weights embedded|shared embedded in each plan" in build
    assert "--fp8-scope ffn|linears|all ffn (gate-up and down)" in build
    assert "--threads <int> Threads of an engine" in build
    accuracy = " ".join(invoke("bench", "accuracy", "--help").stdout.split())
    assert "[default: 64,8]" in accuracy


def test_onnxruntime_is_told_to_report_nothing(tmp_path: Path) -> None:
    """With a home folder that cannot be written it would warn on stderr."""
    script = (
        "import sys\n"
        "from lacache_trt.cli.main import main\n"
        "sys.argv = ['lacache-trt', '--version']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "import onnxruntime\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HOME": "/proc/nowhere"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("lacache-trt ")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("longest", "profile", "words"),
    [
        (4096, None, "--gen-length 128 --steps 128"),
        (256, None, "--gen-length 64 --steps 64"),
        (200, None, "--gen-length 32 --steps 32"),
        (100, None, "--gen-length 25 --block-length 25 --steps 25"),
        (2, None, "--gen-length 1 --block-length 1 --steps 1"),
        (4096, {"N": [64, 64, 256], "Bk": [8, 32, 32]}, "--gen-length 64 --steps 64"),
        (4096, {"N": [64, 512, 512], "Bk": [16, 16, 16]}, "128 --block-length 16 --steps 128"),
        (256, {"N": [64, 64, 256], "Bk": [64, 64, 64]}, "64 --block-length 64 --steps 64"),
    ],
)
def test_the_lengths_that_build_suggests_suit_the_engine(
    tmp_path: Path, longest: int, profile: dict[str, list[int]] | None, words: str
) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "weights").touch()
    model = replace(MODEL, max_length=longest).to_json()
    profiles = {} if profile is None else {"profiles": [profile]}
    write_manifest(engine, "engine", {"model": model, **profiles})
    line = generate_line(engine)
    assert line.startswith(f'lacache-trt generate {engine} "your question" --gen-length ')
    assert line.endswith(words)
    numbers = dict(re.findall(r"--([\w-]+) (\d+)", line))
    settings = {name.replace("-", "_"): int(number) for name, number in numbers.items()}
    assert GenerationConfig(**settings).gen_length <= max(1, longest // 4)


def test_build_and_export_suggest_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lacache_trt.engines import builder
    from lacache_trt.export import exporter

    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "weights").touch()
    write_manifest(engine, "engine", {"model": MODEL.to_json()})
    built = builder.BuildReport(engine, "onnxruntime", 1.0, 1)
    monkeypatch.setattr(builder, "build_engine", lambda *arguments: built)
    said = invoke("build", "b", engine, "--engine", "onnxruntime").stdout
    assert f"next: {generate_line(engine)}\n" in said
    exported = SimpleNamespace(out=tmp_path / "b", seconds=1.0, validation={})
    monkeypatch.setattr(exporter, "export_bundle", lambda *arguments: exported)
    said = invoke("export", "model", tmp_path / "b").stdout
    assert f"next: lacache-trt build {tmp_path / 'b'} ENGINE --engine NAME" in said


def test_folders_that_are_no_checkpoint_and_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "notes.md").touch()
    said = invoke("export", tmp_path, tmp_path.parent / "out").stderr
    assert f"{tmp_path} holds no config.json" in said
    assert "is it a checkpoint?" in said
    assert "download" not in said
    said = invoke("build", tmp_path, tmp_path.parent / "out", "--engine", "onnxruntime").stderr
    assert f"{tmp_path} holds no manifest.json" in said


def test_an_engine_that_looks_like_one_is_suggested() -> None:
    said = invoke("build", "b", "o", "--engine", "onnxruntme").stderr
    assert "unknown engine" in said
    assert "did you mean 'onnxruntime'?" in said


def test_the_grid_says_what_to_leave_out() -> None:
    said = invoke("bench", "policies", "e", "--policies", "schedule,treshold").stderr
    assert "fix:      leave out treshold" in said


def test_tables_in_a_pipe_have_no_blanks_at_the_ends(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle")
    for arguments in (("inspect", tmp_path / "bundle"), ("doctor",)):
        lines = invoke(*arguments).stdout.splitlines()
        assert len(lines) > 20
        assert lines == [line.rstrip() for line in lines]
