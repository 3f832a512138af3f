"""A file of prompts that is none says what one is and how to make it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lacache_trt.cli.main import app
from lacache_trt.cli.prompts import read_prompts
from lacache_trt.errors import InvalidRequestError
from lacache_trt.prompt_file import read_prompt_file

KINDS = 'a string, token ids, or {"prompt": ...}'


def refused(path: Path) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        read_prompt_file(path)
    assert caught.value.expected
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "nothing"])
def test_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    places = {"device": Path("/dev/null"), "nothing": Path("")}
    error = refused(places.get(kind, tmp_path / kind))
    words = {"pipe": "a pipe", "device": "a device", "folder": "a directory"}
    assert words.get(kind, "a directory") in str(error.got)
    assert "is not a regular file" in error.what
    assert not error.what.startswith(" ")
    assert KINDS in str(error.expected)
    assert "write one line a prompt" in str(error.fix)


def test_the_fix_is_a_line_that_can_be_read(tmp_path: Path) -> None:
    fix = str(refused(tmp_path).fix)
    line = fix[fix.index('"') : fix.rindex('"') + 1]
    (tmp_path / "prompts.jsonl").write_text(line + "\n")
    assert read_prompt_file(tmp_path / "prompts.jsonl").prompts == (json.loads(line),)


@pytest.mark.parametrize(
    ("data", "what", "fix"),
    [
        (b"What is 12 + 30?\n", "line 1 of p.jsonl is not JSON", "double quotes"),
        (b'\xef\xbb\xbf"text"\n', "line 1 of p.jsonl is not JSON", "without a byte order mark"),
        (b"[3]\n3\n", "line 2 of p.jsonl holds no prompt", "a string or token ids"),
        (b"\xff", "p.jsonl is not UTF-8 text", "UTF-8"),
        (b"\n", "p.jsonl holds no prompt", "write one line a prompt"),
    ],
)
def test_lines_that_are_no_prompts(tmp_path: Path, data: bytes, what: str, fix: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(data)
    error = refused(tmp_path / "p.jsonl")
    assert error.what == what
    assert fix in str(error.fix)


def test_the_command_line_says_so(tmp_path: Path) -> None:
    arguments = ["bench", "activations", "--calibration", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert KINDS in json.loads(result.stdout)["error"]["expected"]


def test_other_fields_of_a_data_set_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"steps": 7, "prompt": "What?", "answer": "That."}\n')
    assert read_prompt_file(tmp_path / "p.jsonl").prompts == ("What?",)


def test_lines_to_generate_from_have_no_settings_of_their_own() -> None:
    line = '{"prompt": "a", "gen_length": 8, "id": 3}'
    with pytest.raises(InvalidRequestError, match="line 1 has settings of its own") as caught:
        read_prompts(line, tokens=False, jsonl=True)
    assert caught.value.got == "gen_length"
    assert read_prompts('{"prompt": "a", "id": 3}', tokens=False, jsonl=True) == ["a"]


def test_a_prompt_that_names_a_file_is_answered_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.txt"
    assert read_prompts(str(path), tokens=False, jsonl=False) == [str(path)]
    assert capsys.readouterr().err == ""
    path.touch()
    assert read_prompts(str(path), tokens=False, jsonl=False) == [str(path)]
    assert f"to read that file: < {path}" in capsys.readouterr().err
