"""Nothing that is raised inside of TensorRT's calls gets lost: signals, errors of callbacks."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic import make_llada

from lacache_trt.artifacts import Manifest, load_manifest
from lacache_trt.engines.tensorrt import legacy_build
from lacache_trt.engines.tensorrt.building import build_plans
from lacache_trt.engines.tensorrt.interrupts import Interrupts, interrupts_kept
from lacache_trt.engines.tensorrt.legacy_build import LegacyTarget, build_legacy_plan
from lacache_trt.engines.tensorrt.legacy_graph import LoweredGraph
from lacache_trt.engines.tensorrt.logger import new_logger
from lacache_trt.engines.tensorrt.monitor import new_monitor
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.errors import EngineError
from lacache_trt.export.exporter import export_bundle
from lacache_trt.export.options import ExportOptions
from lacache_trt.progress import SilentProgress

TENSORRT_RTX = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="TensorRT-RTX is not installed"
)
PROFILE = "B=1:1:1,N=16:32:64,Bk=4:8:8,S=1:1:1,E=1:1:1,R=0:0:4"


def binding(callback: Any) -> None:
    """What the bindings do with an exception of a callback."""
    with suppress(BaseException):
        callback()


class Broken(SilentProgress):
    """Fails like a log whose disk is full."""

    def advance(self, amount: int = 1) -> None:
        raise OSError("no space left")


def test_a_signal_is_raised_behind_the_call() -> None:
    before = signal.getsignal(signal.SIGINT)
    reached: list[bool] = []

    def call() -> None:
        with interrupts_kept() as interrupts:
            binding(lambda: signal.raise_signal(signal.SIGINT))
            reached.append(interrupts.kept)

    with pytest.raises(KeyboardInterrupt):
        call()
    assert reached == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_goes_before_the_error_that_it_leads_to() -> None:
    def call() -> None:
        with interrupts_kept():
            binding(lambda: signal.raise_signal(signal.SIGINT))
            raise EngineError("TensorRT could not build")

    with pytest.raises(KeyboardInterrupt):
        call()
    with pytest.raises(EngineError), interrupts_kept():
        raise EngineError("TensorRT could not build")


def test_a_handler_that_raises_nothing_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with interrupts_kept() as interrupts:
            signal.raise_signal(signal.SIGTERM)
            assert seen == [signal.SIGTERM]
            assert not interrupts.kept
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_keep_too() -> None:
    caught: list[BaseException] = []

    def work() -> None:
        try:
            with interrupts_kept() as interrupts:
                interrupts.keep(OSError("first"))
                interrupts.keep(OSError("second"))
        except OSError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [str(error) for error in caught] == ["first"]


def test_the_monitor_cancels_once_something_is_kept() -> None:
    trt = SimpleNamespace(IProgressMonitor=object)
    interrupts = Interrupts()
    monitor = new_monitor(trt, Broken(), "fill", interrupts)
    monitor.phase_start("Building", None, 3)
    assert monitor.step_complete("another phase", 0) is True
    assert monitor.step_complete("Building", 0) is False
    with pytest.raises(OSError, match="no space"):
        interrupts.check()


def test_the_logger_keeps_what_logging_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError(record.getMessage())

    handler = Handler()
    log = logging.getLogger("lacache_trt.tensorrt")
    log.addHandler(handler)
    levels = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE")
    kind = type("ILogger", (), {name: index for index, name in enumerate(levels)})
    interrupts = Interrupts()
    try:
        new_logger(SimpleNamespace(ILogger=kind), interrupts).log(kind.WARNING, "words")  # type: ignore[attr-defined]
    finally:
        log.removeHandler(handler)
    with pytest.raises(OSError, match="words"):
        interrupts.check()


@pytest.mark.parametrize("plan", [b"plan", None])
def test_the_old_builder_loses_no_signal(
    monkeypatch: pytest.MonkeyPatch, plan: bytes | None
) -> None:
    for name in ("load_library", "LegacyRegistry", "check_network", "constrain", "configure"):
        monkeypatch.setattr(legacy_build, name, lambda *_: None)
    monkeypatch.setattr(legacy_build, "new_logger", lambda *_: SimpleNamespace(last_errors=str))

    def build(network: Any, config: Any) -> bytes | None:
        binding(lambda: signal.raise_signal(signal.SIGINT))
        return plan

    builder = SimpleNamespace(create_network=lambda _: None, build_serialized_network=build)
    trt = SimpleNamespace(
        Builder=lambda _: builder,
        OnnxParser=lambda *_: SimpleNamespace(parse=lambda *_: True),
        NetworkDefinitionCreationFlag=SimpleNamespace(EXPLICIT_BATCH=0),
        get_plugin_registry=lambda: None,
    )
    graph = LoweredGraph(b"", {}, ())
    spec: Any = SimpleNamespace(name="fill", inputs=(), outputs=())
    monkeypatch.setattr(legacy_build, "with_weights", lambda spec, _: spec)
    with pytest.raises(KeyboardInterrupt):
        build_legacy_plan(LegacyTarget(trt, Path("library")), graph, Path("fill.onnx"), spec, {})


# --- the real builder ---


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("interrupts")
    checkpoint = make_llada(
        folder / "model", hidden=128, heads=2, kv_heads=2, ffn=128, layers=2, vocab=97
    )
    options = ExportOptions(dtype="float16", validate="off", cache="exact")
    export_bundle(str(checkpoint), folder / "bundle", options)
    return load_manifest(folder / "bundle")


@TENSORRT_RTX
@pytest.mark.parametrize("raises", ["the progress", "a signal"])
def test_a_real_build_ends_with_what_was_raised_in_it(
    bundle: Manifest, tmp_path: Path, raises: str
) -> None:
    class Interrupted(SilentProgress):
        def advance(self, amount: int = 1) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    progress = Broken() if raises == "the progress" else Interrupted()
    options = TensorRTOptions(sm=89, profiles=(PROFILE,), plugins=False)
    with pytest.raises(OSError if raises == "the progress" else KeyboardInterrupt):
        build_plans(bundle, tmp_path, "tensorrt-rtx", options, progress)
    assert list(tmp_path.iterdir()) == []


STOPPED = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
SCRIPT = """
import sys
from lacache_trt.cli import progress_lines
def start(self, stage, total=None):
    if "building engine" in stage:
        print("ready", file=sys.stderr, flush=True)
progress_lines.LineProgress.start = start
from lacache_trt.cli.main import main
main()
"""


@TENSORRT_RTX
@pytest.mark.parametrize(("number", "code"), STOPPED)
def test_a_real_build_is_stopped_by_a_signal(
    bundle: Manifest, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    arguments = ["--engine", "tensorrt-rtx", "--sm", "89", "--no-plugins", "--profile", PROFILE]
    command = ["build", bundle.directory, tmp_path / "out", *arguments, "--json"]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if process.stderr is None or "ready\n" not in iter(process.stderr.readline, ""):
        pytest.fail("the build did not start")
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert json.loads(out)["error"]["exit_code"] == code
    assert list(tmp_path.iterdir()) == []
