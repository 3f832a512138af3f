"""What `doctor` says of packages, extras and GPUs."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lacache_trt import doctor
from lacache_trt.cli.main import app
from lacache_trt.doctor_extras import EXTRAS
from lacache_trt.gpus import Gpu, GpuReport

FP8_LINES = ("✓ fp8", "✗ fp8")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_doctor() -> None:
    result = invoke("doctor", "--json")
    report = json.loads(result.stdout)
    abilities = {ability["name"]: ability for ability in report["abilities"]}
    assert result.exit_code == 0
    assert abilities["run onnxruntime"]["works"]
    assert {"export", "run tensorrt", "run tensorrt-rtx", "run cuda"} <= set(abilities)
    assert {package["name"] for package in report["packages"]} >= {"torch", "onnxruntime"}
    assert "abilities" in invoke("doctor").stdout


def test_doctor_gives_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", missing)
    report = doctor.examine()
    export = next(ability for ability in report.abilities if ability.name == "export")
    assert not export.works
    assert export.fix == f'{sys.executable} -m pip install "lacache-trt[export]"'
    for extra in report.extras:
        assert not any(extra.versions.values())
        assert extra.install == f'{sys.executable} -m pip install "lacache-trt[{extra.name}]"'


def test_doctor_lists_the_extras_of_the_project() -> None:
    tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    promised = project["project"]["optional-dependencies"]
    promised.pop("dev")
    export = promised["export"]
    narrower = promised["fp8"]
    narrower.remove("lacache-trt[export]")
    named = {re.split(r"[<>=]", each)[0] for each in narrower}
    narrower += [each for each in export if re.split(r"[<>=]", each)[0] not in named]
    found = {extra: {f"{k}{v}" for k, v in needs.items()} for extra, (_, needs) in EXTRAS.items()}
    assert found == {extra: set(needs) for extra, needs in promised.items()}


@pytest.mark.parametrize(
    ("transformers", "inside"),
    [("5", True), ("5.14.9", True), ("5.15.0", False), ("5.24.0", False), ("4.57.1", False)],
)
def test_doctor_says_what_is_outside_its_bounds(
    monkeypatch: pytest.MonkeyPatch, transformers: str, inside: bool
) -> None:
    versions = {"transformers": transformers, "nvidia-modelopt": "0.47", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(doctor, "version", lambda name: versions.get(name, "9.8.7"))
    (fp8,) = (extra for extra in doctor.examine().extras if extra.name == "fp8")
    assert fp8.outside == ({} if inside else {"transformers": ">=5.0,<5.15"})
    assert (fp8.install is None) is inside
    (line,) = (each for each in invoke("doctor").stdout.splitlines() if each[2:7] in FP8_LINES)
    assert line.startswith("  ✓" if inside else "  ✗")
    assert (f"transformers {transformers} is outside >=5.0,<5.15" in line) is not inside


def test_doctor_shows_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(name: str) -> str:
        if name == "huggingface-hub":
            raise PackageNotFoundError(name)
        return "9.8.7"

    monkeypatch.setattr(doctor, "version", lookup)
    hub, plots = (
        next(extra for extra in doctor.examine().extras if extra.name == name)
        for name in ("hub", "plots")
    )
    assert (hub.versions, plots.versions) == ({"huggingface-hub": None}, {"matplotlib": "9.8.7"})
    assert plots.install is None
    lines = invoke("doctor").stdout.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("  ✗ hub "))
    assert "missing huggingface-hub" in lines[place]
    assert lines[place + 1].strip() == f'{sys.executable} -m pip install "lacache-trt[hub]"'
    assert any(line.startswith("  ✓ plots ") and "matplotlib 9.8.7" in line for line in lines)


@pytest.mark.parametrize(
    ("capabilities", "works", "words"),
    [
        ([], False, "no driver"),
        (["8.0"], False, "GPU 8.0 is sm_80; FP8 needs sm_89"),
        (["8.9"], True, "GPU 8.9, sm_89"),
        (["8.6", "9.0"], True, "GPU 9.0, sm_90"),
        (["12.0"], True, "sm_120"),
    ],
)
def test_doctor_says_whether_the_gpu_has_fp8(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[str], works: bool, words: str
) -> None:
    cards = tuple(Gpu(f"GPU {each}", each, 2**30) for each in capabilities)
    report = GpuReport(None, None, cards, None if cards else "no driver")
    monkeypatch.setattr(doctor, "find_gpus", lambda: report)
    found = json.loads(invoke("doctor", "--json").stdout)["abilities"]
    (fp8,) = (ability for ability in found if ability["name"] == "FP8 on the GPU")
    assert fp8["works"] is works
    assert words in fp8["reason"]
