"""What the documentation says is run: marked blocks, command lines, links, make targets.

A block that a machine without a GPU can run stands under `<!-- tested -->` in the README. All are
run, the shell block before the Python one, in a folder that holds only the checkpoint they name.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from lacache_trt.cli.main import app
from lacache_trt.demo.run import CHECKPOINT

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
SECONDS = 400
"""For one block; all of them together take less on two quiet cores."""
FOREIGN_FLAGS = {"--dynamicPlugins"}
"""Flags in sentences that belong to other programs."""

_FENCE = re.compile(r"^(<!-- tested -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_TARGET = re.compile(r"^([\w-]+):", re.MULTILINE)
_MAKE = re.compile(r"make [a-z]")
_FLAG = re.compile(r"--?[a-z]")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    text: str
    tested: bool


def blocks(page: Path) -> list[Block]:
    found = _FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Block(match[2], match[3], bool(match[1])) for match in found]


def snippets(page: Path) -> Iterator[str]:
    """Every shell line of a page, fenced or between backticks in a sentence."""
    for block in blocks(page):
        if block.language == "bash":
            yield from block.text.replace("\\\n", " ").splitlines()
    yield from (" ".join(code.split()) for code in _INLINE.findall(prose(page)))


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


# Blocks that run


@dataclass
class Reader:
    """Does what the README says, in one folder."""

    folder: Path

    def run(self, block: Block) -> str:
        """What the block prints on stdout."""
        if block.language == "python":
            # In a folder of its own: a script's folder comes first among the import paths.
            script = self.folder / "service" / "snippet.py"
            script.parent.mkdir(exist_ok=True)
            script.write_text(block.text, encoding="utf-8")
            return self._call([sys.executable, str(script)])
        return self._call(["bash", "-euo", "pipefail", "-c", block.text])

    def _call(self, command: list[str]) -> str:
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        result = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
        return result.stdout


def block_with(text: str) -> Block:
    (block,) = (block for block in blocks(README) if block.tested and text in block.text)
    return block


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A folder with the checkpoint where a checkout has it."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(CHECKPOINT, folder / CHECKPOINT.relative_to(ROOT))
    return Reader(folder)


@pytest.fixture(scope="module")
def shell_output(reader: Reader) -> str:
    """What the block that makes `tiny-engine` prints."""
    return reader.run(block_with("lacache-trt export"))


def test_no_marked_block_is_forgotten() -> None:
    assert [block.tested for block in blocks(README)].count(True) == 3
    assert README.read_text(encoding="utf-8").count("<!-- tested -->") == 3


def test_commands_for_the_model_that_ships(shell_output: str, reader: Reader) -> None:
    (promised,) = re.findall(r"^The answer is `([^`]+)`", prose(README), re.MULTILINE)
    assert promised.endswith("#### 16")
    assert promised in shell_output.splitlines()
    assert "passed" in shell_output
    for name in ("tiny-bundle", "tiny-engine"):
        assert (reader.folder / name / "manifest.json").is_file()


@pytest.mark.usefixtures("shell_output")
def test_python_snippet(reader: Reader) -> None:
    whole, *events = reader.run(block_with("Runtime.load")).splitlines()
    answer, forwards, reason = whole.rsplit(" ", 2)
    assert answer.endswith("#### 20")
    assert reason == "stop"
    assert len(events) == int(forwards)
    assert events[-1].endswith(answer)


def test_doctor(reader: Reader) -> None:
    printed = reader.run(block_with("lacache-trt doctor"))
    assert re.search(r"✓ run onnxruntime +ONNX Runtime", printed), printed


# What is only mentioned


def command_lines() -> list[Any]:
    """Each command line of `lacache-trt` that a page shows, with the page's name."""
    return [
        pytest.param(line, id=f"{page.name}: {line[:60]}")
        for page in PAGES
        for line in dict.fromkeys(snippets(page))
        if line.startswith("lacache-trt ")
    ]


@pytest.mark.parametrize("line", command_lines())
def test_verb_and_flags_exist(line: str) -> None:
    command: Any = get_command(app)
    arguments = shlex.split(line, comments=True)[1:]
    while hasattr(command, "commands") and arguments and not _FLAG.match(arguments[0]):
        name, *arguments = arguments
        if name == "VERB":
            return
        assert name in command.commands
        command = command.commands[name]
    assert {word.split("=")[0] for word in arguments if _FLAG.match(word)} <= flags_of(command)


def flags_of(command: Any) -> set[str]:
    own = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    return own.union({"--help"}, *map(flags_of, getattr(command, "commands", {}).values()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_in_sentences_exist(page: Path) -> None:
    code = [code for code in _INLINE.findall(prose(page)) if code.startswith("--")]
    flags = {code.split()[0] for code in code} - FOREIGN_FLAGS
    assert flags <= flags_of(get_command(app))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target.split("#")[0] for target in _LINK.findall(prose(page)) if "://" not in target]
    missing = [target for target in targets if target and not (page.parent / target).exists()]
    assert not missing


def test_make_targets_exist() -> None:
    existing = set(_TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    named = {line.split()[1] for page in PAGES for line in snippets(page) if _MAKE.match(line)}
    assert named
    assert named <= existing
