"""What a user mistypes: one JSON document under `--json`, and words that say what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lacache_trt.cli.main import app


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


def test_demo_keeps_in_a_directory_only(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for keep in (file, file / "below"):
        result = invoke("demo", "--keep", keep)
        assert result.exit_code == 3
        assert "fix:" in result.stderr
        assert "--keep" in result.stderr


def test_a_bundle_is_not_exported_again(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    result = invoke("export", tmp_path, tmp_path.parent / "out")
    assert result.exit_code == 2
    assert f"lacache-trt build {tmp_path}" in result.stderr


def test_a_quoted_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "manifest.json").write_text("{}")
    assert str(tmp_path / "nowhere") in invoke("inspect", "~/nowhere").stderr
    assert f"build {tmp_path}/bundle {tmp_path}/out" in invoke("export", "~/bundle", "~/out").stderr


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
