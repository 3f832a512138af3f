"""What `bench` writes and compares with is checked before anything is measured."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from sample_bundle import write_bundle
from typer.testing import CliRunner, Result

from lacache_trt.bench import workload_facts
from lacache_trt.bench_report import BenchReport, BenchSettings
from lacache_trt.cli.main import app
from lacache_trt.cli.output import Output
from lacache_trt.cli.result_files import ResultFiles
from lacache_trt.errors import OutputError
from lacache_trt.generation import GenerationConfig

DECODING = ("--gen-length", 8, "--block-length", 4, "--steps", 4)
CONFIG = GenerationConfig(gen_length=8, block_length=4, steps=4)
MEASURED = "measured after all"
VERBS: dict[str, tuple[object, ...]] = {
    "generate": ("engine", *DECODING),
    "step": ("engine", *DECODING),
    "kernels": ("engine", *DECODING),
    "policies": ("engine",),
    "accuracy": (),
    "activations": (),
}
PLOTS = ("policies", "activations")


@pytest.fixture(autouse=True)
def measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measurement ends the test that gets to it."""

    def measure(*_: Any, **__: Any) -> None:
        raise RuntimeError(MEASURED)

    for name in (
        "bench.bench_engine",
        "bench_steps.bench_steps",
        "engines.cuda.kernel_times.bench_kernels",
        "bench_policies.bench_policies",
        "accuracy.study.compare_schemes",
        "accuracy.activations.record",
    ):
        monkeypatch.setattr(f"lacache_trt.{name}", measure)


def invoke(verb: str, *flags: object) -> Result:
    arguments = ("bench", verb, *VERBS[verb], *flags, "--json")
    return CliRunner().invoke(app, [str(each) for each in arguments])


def error(result: Result) -> dict[str, str]:
    assert MEASURED not in str(result.exception)
    found: dict[str, str] = json.loads(result.stdout)["error"]
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_a_result_file_that_cannot_be_written_is_refused_first(verb: str, tmp_path: Path) -> None:
    assert MEASURED in str(invoke(verb, "--save-result", tmp_path / "r.json").exception)
    found = error(invoke(verb, "--save-result", tmp_path / "none" / "r.json"))
    assert (found["type"], found["what"]) == (
        "OutputError",
        "the report has no folder to be written to",
    )
    assert found["fix"] == f"create {tmp_path / 'none'} first"
    for folder in (tmp_path, ""):
        found = error(invoke(verb, "--save-result", folder))
        assert (found["type"], found["what"]) == (
            "OutputError",
            "the report is to be written to a folder",
        )
        assert found["expected"]
        assert found["fix"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", PLOTS)
def test_a_picture_that_cannot_be_drawn_is_refused_first(verb: str, tmp_path: Path) -> None:
    assert error(invoke(verb, "--plot", tmp_path / "none" / "p.png"))["type"] == "OutputError"
    (tmp_path / "folder.png").mkdir()
    assert error(invoke(verb, "--plot", tmp_path / "folder.png"))["type"] == "OutputError"
    found = error(invoke(verb, "--plot", tmp_path / "p.gif"))
    assert (found["type"], found["what"]) == ("InvalidRequestError", "the picture is a PNG")
    assert found["fix"] == f"name it {tmp_path / 'p.png'}"


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_inside_of_an_artefact_is_refused_first(verb: str, tmp_path: Path) -> None:
    """At any depth; a manifest of another program does not count."""
    bundle = tmp_path / "bundle"
    write_bundle(bundle)
    (bundle / "deep").mkdir()
    for folder in (bundle, bundle / "deep"):
        found = error(invoke(verb, "--save-result", folder / "r.json"))
        assert found["type"] == "OutputError"
        assert f"in {bundle.resolve()}, which holds a manifest.json" in found["got"]
        assert str(tmp_path.resolve() / "r.json") in found["fix"]
    if verb in PLOTS:
        assert error(invoke(verb, "--plot", bundle / "p.png"))["type"] == "OutputError"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "manifest.json").write_text("{}")
    saved = tmp_path / "site" / "r.json"
    assert MEASURED in str(invoke(verb, "--save-result", saved).exception)


@pytest.mark.parametrize("verb", PLOTS)
def test_one_file_for_two_things_is_refused_first(verb: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    both = ("--plot", tmp_path / "x.png", "--save-result", tmp_path / "link" / "x.png")
    found = error(invoke(verb, *both))
    assert found["type"] == "InvalidRequestError"
    assert found["what"] == "the report and the picture are one file"


def test_a_file_that_may_not_be_written_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tests may run as root, who may write everywhere: refuse in the same words.
    monkeypatch.setattr("lacache_trt.output_file.os.access", lambda path, mode: False)
    found = error(invoke("accuracy", "--save-result", tmp_path / "r.json"))
    assert (found["type"], found["what"]) == ("OutputError", "no permission to write the report")


@pytest.mark.parametrize("verb", ["generate", "step", "kernels"])
def test_what_is_compared_with_is_read_first(verb: str, tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    assert error(invoke(verb, "--compare", old))["what"] == "cannot read old.json"
    old.write_text("[]")
    assert error(invoke(verb, "--compare", old))["what"] == "old.json is not a JSON object"
    facts = workload_facts(BenchSettings(repeats=9), CONFIG)
    old.write_text(json.dumps({"workload": facts}))
    assert MEASURED in str(invoke(verb, "--compare", old).exception)
    old.write_text(json.dumps({"workload": {**facts, "batch": 99}}))
    found = error(invoke(verb, "--compare", old))
    assert found["what"] == "old.json was measured on another workload"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> BenchReport:
    """What `bench generate` finds."""
    facts = workload_facts(BenchSettings(), CONFIG)
    found = BenchReport("cuda", "device", "1", {}, facts, (), ())
    monkeypatch.setattr("lacache_trt.bench.bench_engine", lambda *_: found)
    return found


def test_a_result_that_does_not_compare_is_kept(tmp_path: Path, report: BenchReport) -> None:
    """Which engine it is shows only when it is open."""
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(asdict(replace(report, engine="onnxruntime"))))
    found = error(invoke("generate", "--compare", old, "--save-result", new))
    assert found["what"] == "old.json was measured on another engine"
    assert json.loads(new.read_text())["engine"] == "cuda"


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_result_that_cannot_be_saved_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: BenchReport
) -> None:
    """As the one document of stdout, and the report of last time stays."""
    saved = tmp_path / "r.json"
    saved.write_text("precious")
    monkeypatch.setattr(os, "fsync", no_room)
    result = invoke("generate", "--save-result", saved)
    assert result.exit_code == 3
    assert json.loads(result.stdout) == json.loads(json.dumps(asdict(report)))
    assert "error: the report could not be written" in result.stderr
    assert "MiB free" in result.stderr
    assert saved.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [saved]


def test_a_result_is_saved_whole(tmp_path: Path, report: BenchReport) -> None:
    """Through a link, with the permissions of what it replaces; a device is written to."""
    saved, link = tmp_path / "r.json", tmp_path / "link.json"
    saved.write_text("old")
    saved.chmod(0o640)
    link.symlink_to(saved)
    result = invoke("generate", "--save-result", link)
    assert json.loads(saved.read_text()) == json.loads(result.stdout)
    assert (saved.stat().st_mode & 0o777, link.is_symlink()) == (0o640, True)
    assert sorted(tmp_path.iterdir()) == [link, saved]
    assert invoke("generate", "--save-result", os.devnull).exit_code == 0
    assert Path(os.devnull).is_char_device()
    result = invoke("generate", "--save-result", "/dev/full")
    assert (result.exit_code, json.loads(result.stdout)["engine"]) == (3, "cuda")


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "full"), ValueError("of the plot")])
def test_a_picture_that_fails_loses_no_result(tmp_path: Path, failure: Exception) -> None:
    picture, saved = tmp_path / "p.png", tmp_path / "r.json"
    picture.write_text("precious")

    def draw(path: Path) -> None:
        path.write_text("half")
        raise failure

    files, shown = ResultFiles.checked(saved, picture), []
    assert files.draw(draw) is None
    with pytest.raises(OutputError if isinstance(failure, OSError) else ValueError):
        files.deliver(Output(), {"number": 1}, lambda: shown.append(True))
    assert (shown, json.loads(saved.read_text())) == ([True], {"number": 1})
    assert picture.read_text() == "precious"
    assert sorted(tmp_path.iterdir()) == [picture, saved]
