"""The command line: help, exit codes, JSON, errors, prompts, streaming."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
from sample_bundle import MODEL, write_bundle
from typer.testing import CliRunner, Result

import lacache_trt
from lacache_trt.cli.main import app
from lacache_trt.engines.base import Capabilities
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.errors import NumericalError
from lacache_trt.export.options import ExportOptions
from lacache_trt.generation import BlockTiming, GenerationConfig, GenerationResult, StepEvent
from lacache_trt.runtime import Runtime

VERBS = ("export", "build", "generate", "demo", "verify", "inspect", "doctor", "bench")
SMALL = ("--gen-length", "8", "--block-length", "4", "--steps", "4")
HEAVY = ("torch", "onnx", "onnxruntime", "numpy", "transformers", "rich", "tokenizers", "pydantic")


def invoke(*arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lacache_trt.cli", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, **options
    )


@dataclass
class FakeRuntime:
    """Answers `n + 1` for every token n of a prompt; remembers what it was asked."""

    calls: list[tuple[list[Any], GenerationConfig, bool]] = field(default_factory=list)
    codec: None = None
    engine: Any = field(
        default_factory=lambda: SimpleNamespace(
            config=MODEL,
            name="fake",
            device="cpu",
            capabilities=Capabilities(frozenset({"none", "exact"}), logits=True),
        )
    )
    error: BaseException | None = None

    def check_prompts(
        self, prompts: list[Any], config: GenerationConfig, *, raw: bool = False
    ) -> list[Any]:
        return prompts

    def generate(
        self, prompts: list[Any], config: GenerationConfig, *, raw: bool = False
    ) -> list[GenerationResult]:
        self.calls.append((prompts, config, raw))
        if self.error is not None:
            raise self.error
        timing = BlockTiming(block=0, forwards=4, fill_s=0.001, steps_s=0.004)
        return [
            GenerationResult(
                tokens=tuple(token + 1 for token in prompt) if isinstance(prompt, list) else (7,),
                text=None if isinstance(prompt, list) else prompt.upper(),
                finish_reason="length",
                forwards=4,
                tokens_per_forward=2.0,
                blocks=(timing,),
            )
            for prompt in prompts
        ]

    def stream(
        self, prompt: Any, config: GenerationConfig, *, raw: bool = False
    ) -> Generator[StepEvent, None, GenerationResult]:
        self.calls.append(([prompt], config, raw))
        for step in range(config.steps):
            columns = (2 * step, 2 * step + 1)
            yield StepEvent(0, step, step // 2, columns, (step + 10, step + 20), f"text {step}")
        return self.generate([prompt], config, raw=raw)[0]

    def __enter__(self) -> FakeRuntime:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(Runtime, "load", lambda directory: fake)
    return fake


# Help and usage


def test_help_names_every_verb_and_exit_code() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert all(f"  {verb} " in result.stdout for verb in VERBS)
    assert "130" in result.stdout
    assert "..." not in result.stdout.replace("[ARGS]...", "")


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_is_fast_and_imports_nothing_heavy(verb: str) -> None:
    code = (
        "import sys; from lacache_trt.cli.main import main\n"
        "try: main()\n"
        f"except SystemExit as end: print([m for m in {HEAVY} if m in sys.modules], end.code)"
    )
    arguments = [verb, "--help"] if verb else ["--help"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert found.stdout.endswith("[] 0\n")
    # Processor time: on an idle machine that is what a user waits; here other tests run too.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_version() -> None:
    assert invoke("--version").stdout == f"lacache-trt {lacache_trt.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["build"],
        ["build", "a"],
        ["build", "a", "b", "c"],
        ["generate", "e", "p", "--steps", "many"],
        ["generate", "e", "p", "--unknown"],
        ["demo", "--problems", "0"],
    ],
)
def test_usage_errors(arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("verb", "cls"),
    [
        ("generate", GenerationConfig),
        ("export", ExportOptions),
        ("build", BuildOptions),
        ("build", TensorRTOptions),
    ],
)
def test_flags_come_from_the_dataclass(verb: str, cls: type) -> None:
    own = {"overwrite": "force", "max_length": "max-seq-len", "profiles": "profile"}
    text = " ".join(invoke(verb, "--help").stdout.split())
    for item in fields(cls):
        if is_dataclass(item.default_factory):
            continue
        flag = own.get(item.name, item.name.replace("_", "-"))
        assert f"--{flag} " in text
        default = item.metadata.get("default", item.default)
        if default not in (None, False, True, ()):
            assert f"[default: {default}" in text or default == 0
    assert "--json" in text


# Errors


def test_error_says_what_got_expected_fix() -> None:
    result = invoke("generate", "engines", "hello", "--gen-length", "30")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: gen_length is not a multiple of block_length\n")
    assert all(f"  {part}:" in result.stderr for part in ("got", "expected", "fix"))
    assert "Traceback" not in result.stderr


def test_error_as_json() -> None:
    result = invoke("inspect", "/nowhere", "--json")
    assert result.exit_code == 3
    error = json.loads(result.stdout)["error"]
    assert set(error) == {"type", "what", "got", "expected", "fix", "exit_code"}
    assert (error["type"], error["exit_code"]) == ("ArtifactError", 3)
    assert "error: /nowhere" in result.stderr


def test_traceback_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in invoke("inspect", "/nowhere", "--debug").stderr
    monkeypatch.setenv("LACACHE_TRT_DEBUG", "1")
    assert "Traceback" in invoke("inspect", "/nowhere").stderr
    monkeypatch.setenv("LACACHE_TRT_DEBUG", "0")
    assert "Traceback" not in invoke("inspect", "/nowhere").stderr


def test_engine_auto_is_never_substituted(tmp_path: Path) -> None:
    result = invoke("build", "bundle", tmp_path / "out")
    assert result.exit_code == 3
    assert "choose --engine onnxruntime" in result.stderr
    assert not (tmp_path / "out").exists()


def test_damaged_bundle_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle")
    (tmp_path / "bundle" / "fill.onnx").write_bytes(b"x" * 3000)
    result = invoke("build", tmp_path / "bundle", tmp_path / "out", "--engine", "onnxruntime")
    assert result.exit_code == 3
    assert "fill.onnx was changed" in result.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["bundle"]


def test_errors_of_the_engine(runtime: FakeRuntime) -> None:
    runtime.error = NumericalError("the model produced NaN")
    assert invoke("generate", "e", "hello").exit_code == 3
    runtime.error = KeyboardInterrupt()
    result = invoke("generate", "e", "hello", "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["error"]["what"] == "interrupted"
    assert "discarded" in result.stderr
    runtime.error = OSError(28, "No space left on device")
    assert invoke("generate", "e", "hello").exit_code == 3


def test_a_bug_is_shown_as_one(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import lacache_trt.cli.main as main

    def broken() -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(main, "app", broken)
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 3
    assert "Traceback" in (text := capsys.readouterr().err)
    assert "this is a bug" in text


# generate


def test_one_prompt(runtime: FakeRuntime) -> None:
    result = invoke("generate", "e", "hello", "--raw", "--no-stop-at-eos", *SMALL)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "HELLO\n", "")
    config = GenerationConfig(8, 4, 4, stop_at_eos=False, seed=(0,))
    assert runtime.calls == [(["hello"], config, True)]


def test_prompts_from_stdin_in_batches(runtime: FakeRuntime) -> None:
    result = invoke("generate", "e", "--batch-size", "2", "--seed", "5,6,7", stdin="a\n\nb c\r\nd")
    assert result.stdout == "A\nB C\nD\n"
    assert [call[0] for call in runtime.calls] == [["a", "b c"], ["d"]]
    assert [call[1].seed for call in runtime.calls] == [(5, 6), (7,)]


def test_token_ids(runtime: FakeRuntime) -> None:
    assert invoke("generate", "e", "1, 2 3", "--tokens").stdout == "2 3 4\n"
    assert invoke("generate", "e", "-", "--tokens", stdin="1 2\n3\n").stdout == "2 3\n4\n"
    assert invoke("generate", "e", "one", "--tokens").exit_code == 2


def test_json_lines(runtime: FakeRuntime) -> None:
    lines = '"a\\nb"\n[1, 2]\n{"prompt": "c"}\n'
    result = invoke("generate", "e", "--jsonl", "--json", stdin=lines)
    answers = json.loads(result.stdout)["results"]
    assert runtime.calls[0][0] == ["a\nb", [1, 2], "c"]
    assert [answer["tokens"] for answer in answers] == [[7], [2, 3], [7]]
    assert answers[0]["blocks"][0]["forwards"] == 4


@pytest.mark.parametrize("line", ["{", "1", "[1.5]", "[true]", '{"text": "a"}', "[" * 100_000])
def test_bad_json_lines(runtime: FakeRuntime, line: str) -> None:
    result = invoke("generate", "e", "--jsonl", stdin=line)
    assert result.exit_code == 2
    assert "line 1" in result.stderr
    assert not runtime.calls


def test_no_prompt(runtime: FakeRuntime) -> None:
    assert invoke("generate", "e", stdin="\n\n").exit_code == 2
    assert not runtime.calls


def test_an_empty_answer_is_explained(runtime: FakeRuntime) -> None:
    said = "the answer is empty: the model ended it at once; --no-empty-answer keeps it from that\n"
    result = invoke("generate", "e", "")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "\n", said)
    result = invoke("generate", "e", "--jsonl", "--json", stdin='""\n"a"\n""\n[1]\n')
    assert len(json.loads(result.stdout)["results"]) == 4
    assert result.stderr.startswith("2 of 4 answers are empty: the model ended them at once;")
    result = invoke("generate", "e", "", "--no-empty-answer")
    assert result.stderr == "the answer is empty\n"


def test_an_empty_streamed_answer_is_explained(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stream(*arguments: Any, **settings: Any) -> Generator[StepEvent, None, GenerationResult]:
        yield StepEvent(0, 0, 0, (0,), (1,), "")
        return GenerationResult((1,) * 8, "", "stop", 1, 1.0, ())

    monkeypatch.setattr(runtime, "stream", stream)
    for flags in ((), ("--json",)):
        result = invoke("generate", "e", "hello", "--stream", *flags, *SMALL)
        assert result.stderr.startswith("the answer is empty: ")


def test_seeds_must_fit_the_prompts(runtime: FakeRuntime) -> None:
    assert invoke("generate", "e", "hello", "--seed", "1,2").exit_code == 2
    assert invoke("generate", "e", "hello", "--seed", "one").exit_code == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("s.json", '{"gen_length": 8, "block_length": 4, "steps": 4, "seed": [3]}'),
        ("s.toml", "gen_length = 8\nblock_length = 4\nsteps = 4\nseed = [3]\n"),
    ],
)
def test_settings_file_and_flags(
    runtime: FakeRuntime, tmp_path: Path, name: str, text: str
) -> None:
    if name.endswith("toml") and sys.version_info < (3, 11):
        pytest.skip("TOML needs Python 3.11")
    (tmp_path / name).write_text(text)
    assert invoke("generate", "e", "a", "--config", tmp_path / name).exit_code == 0
    assert invoke("generate", "e", "a", "--config", tmp_path / name, "--steps", "2").exit_code == 0
    first, second = (call[1] for call in runtime.calls)
    assert first == GenerationConfig(8, 4, 4, seed=(3,))
    assert second == GenerationConfig(8, 4, 2, seed=(3,))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("s.json", "{"),
        ("s.json", "[]"),
        ("s.json", '{"gen_len": 8}'),
        ("s.json", '{"steps": "8"}'),
        ("s.json", '{"steps": [8]}'),
        ("s.toml", "steps = "),
        ("s.toml", "gen_len = 8"),
    ],
)
def test_bad_settings_files(runtime: FakeRuntime, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    result = invoke("generate", "e", "a", "--config", tmp_path / name)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


def test_a_flag_at_its_default_is_refused_where_it_is_ignored(runtime: FakeRuntime) -> None:
    result = invoke("generate", "e", "a", "--threshold", "0.9")
    assert (result.exit_code, runtime.calls) == (2, [])
    assert "threshold has no meaning with policy='schedule'" in result.stderr
    flags = ("--policy", "threshold", "--threshold", "0.9")
    assert invoke("generate", "e", "a", *flags).exit_code == 0


def test_missing_settings_file(runtime: FakeRuntime, tmp_path: Path) -> None:
    assert invoke("generate", "e", "a", "--config", tmp_path / "none.json").exit_code == 2
    assert invoke("generate", "e", "a", "--config", tmp_path / "none.toml").exit_code == 2


def test_stream_as_lines(runtime: FakeRuntime) -> None:
    lines = invoke("generate", "e", "hello", "--stream", *SMALL).stdout.splitlines()
    assert lines[0] == "[block 1/2  step 1  2/8 tokens] 10 20 ░×6"
    assert lines[3] == "[block 2/2  step 4  8/8 tokens] 10 20 11 21 12 22 13 23"
    assert lines[4] == "text 3"


def test_stream_as_json_lines(runtime: FakeRuntime) -> None:
    lines = invoke("generate", "e", "hello", "--stream", "--json", *SMALL).stdout.splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["event"]["step"] for event in events[:-1]] == [0, 1, 2, 3]
    whole = json.loads(invoke("generate", "e", "hello", "--json", *SMALL).stdout)
    assert events[-1] == {"result": whole["results"][0]}


def test_a_stream_that_ends_in_an_error_is_json_lines_too(runtime: FakeRuntime) -> None:
    result = invoke("generate", "e", "hello", "--stream", "--json", "--steps", "7")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 2
    assert "error" in lines[-1]


def test_stream_shows_one_answer(runtime: FakeRuntime) -> None:
    assert invoke("generate", "e", "--stream", stdin="a\nb\n").exit_code == 2


# inspect, bench


def test_inspect_bundle(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle", dtype="float32", validation={"mode": "full"})
    found = json.loads(invoke("inspect", tmp_path / "bundle", "--json").stdout)
    assert found["kind"] == "bundle"
    assert found["cache_bytes_per_token"] == MODEL.cache_bytes_per_token(4)
    assert found["files"]["fill.onnx"] == 3000
    assert {"contract", "cut", "validation", "parameters", "architecture"} <= set(found)
    text = invoke("inspect", tmp_path / "bundle", "--hashes").stdout
    assert all(word in text for word in ("reuse.onnx", "block_columns", "[B, Bk]", "SHA-256"))
    (tmp_path / "bundle" / "fill.onnx").write_bytes(b"x" * 3000)
    assert invoke("inspect", tmp_path / "bundle").exit_code == 0
    assert invoke("inspect", tmp_path / "bundle", "--hashes").exit_code == 3


def test_bench(runtime: FakeRuntime, tmp_path: Path) -> None:
    arguments = ["bench", "generate", "e", "--prompt-length", "4", "--repeats", "2", *SMALL]
    result = invoke(*arguments, "--json", "--save-result", tmp_path / "b.json")
    report = json.loads(result.stdout)
    assert json.loads((tmp_path / "b.json").read_text()) == report
    assert [timing["cache"] for timing in report["timings"]] == ["none", "exact"]
    assert report["timings"][0]["ms_per_step"] == pytest.approx(1.25)
    assert report["timings"][0]["ms_per_fill"] == pytest.approx(1.0)
    assert all(not call[1].stop_at_eos for call in runtime.calls)
    assert "speedup" in invoke(*arguments).stdout
    assert invoke("bench", "generate", "e", "--batch", "0").exit_code == 2
    assert invoke("bench", "generate", "e", "--caches", "fast").exit_code == 2


# Whole processes


def test_broken_pipe_is_quiet(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle")
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-m", "lacache_trt.cli", "inspect", str(tmp_path / "bundle"), "--json"],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    os.close(writing)
    assert (process.returncode, process.stderr) == (141, b"")


def test_processes_end_with_the_documented_codes(tmp_path: Path) -> None:
    assert run("--version").returncode == 0
    assert run("fly").returncode == 2
    missing = run("inspect", tmp_path / "missing")
    assert (missing.returncode, missing.stdout) == (3, "")
    assert run("generate", tmp_path, "a", "--steps", "7").returncode == 2


def signalled(code: str, number: signal.Signals, *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and the last line of stderr of a verb that gets a signal at `ready`."""
    script = f"import sys, time\n{code}\nfrom lacache_trt.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    if process.stderr is None or "ready\n" not in iter(process.stderr.readline, ""):
        pytest.fail("the process did not start")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


STOPPED = [
    (signal.SIGINT, 130, "interrupted"),
    (signal.SIGTERM, 143, "stopped by SIGTERM"),
    (signal.SIGHUP, 129, "stopped by SIGHUP"),
]


@pytest.mark.parametrize(("number", "code", "what"), STOPPED)
def test_signals_while_generating(number: signal.Signals, code: int, what: str) -> None:
    slow = (
        "from lacache_trt.runtime import Runtime\n"
        "def load(directory): print('ready', file=sys.stderr, flush=True); time.sleep(60)\n"
        "Runtime.load = load"
    )
    found = signalled(slow, number, "generate", "e", "hello")
    assert found == (code, "", f"{what}; partial output was discarded\n")


@pytest.mark.parametrize(("number", "code", "what"), STOPPED)
def test_signals_while_building_leave_nothing(
    tmp_path: Path, number: signal.Signals, code: int, what: str
) -> None:
    write_bundle(tmp_path / "bundle")
    slow = (
        "import lacache_trt.engines.onnxruntime as engine\n"
        "def build(bundle, directory, options, progress):\n"
        "    (directory / 'half.onnx').write_bytes(b'x')\n"
        "    print('ready', file=sys.stderr, flush=True); time.sleep(60)\n"
        "engine.build = build"
    )
    arguments = ("build", tmp_path / "bundle", tmp_path / "out", "--engine", "onnxruntime")
    returned, out, err = signalled(slow, number, *arguments, "--json")
    assert (returned, err) == (code, f"{what}; partial output was discarded\n")
    error = json.loads(out)["error"]
    assert (error["what"], error["exit_code"]) == (what, code)
    assert [entry.name for entry in tmp_path.iterdir()] == ["bundle"]


def test_an_ignored_signal_stays_ignored() -> None:
    """As `nohup` starts a process."""
    code = (
        "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from lacache_trt.runtime import Runtime\n"
        "def load(directory): print('ready', file=sys.stderr, flush=True); "
        "time.sleep(1); sys.exit(7)\n"
        "Runtime.load = load"
    )
    assert signalled(code, signal.SIGHUP, "generate", "e", "hello")[0] == 7


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(tmp_path: Path, closed: str) -> None:
    command = f"{sys.executable} -m lacache_trt.cli inspect {tmp_path / 'none'} {closed}"
    result = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=False)
    assert result.returncode == 3
    assert b"Traceback" not in result.stdout + result.stderr


def test_json_to_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "lacache_trt.cli", "doctor", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=120,
            check=False,
        )
    assert result.returncode == 3
    assert b"Traceback" not in result.stderr


def test_settings_files_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "loop.json").symlink_to("loop.json")
    (tmp_path / "deep.toml").write_text("a=" + "[" * 5000 + "]" * 5000)
    os.mkfifo(tmp_path / "pipe.toml")
    for name in ("loop.json", "deep.toml", "pipe.toml"):
        result = invoke("generate", "e", "a", "--config", tmp_path / name)
        assert result.exit_code == 2, result.output
