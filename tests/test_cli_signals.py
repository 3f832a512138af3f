"""Signals while the command line starts, and those that native code turns, puts off or swallows."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

STOPPED = [
    (signal.SIGINT, 130, "interrupted"),
    (signal.SIGTERM, 143, "stopped by SIGTERM"),
    (signal.SIGHUP, 129, "stopped by SIGHUP"),
]
MAIN = "from lacache_trt.cli.main import main; main()"
ARGUMENTS = ("generate", "e", "hello", "--json")


def started(load: str) -> subprocess.Popen[str]:
    """A `generate --json` whose engine is opened by `load`, once it has printed `ready`."""
    ready = "def ready(): print('ready', file=sys.stderr, flush=True)\n"
    code = f"import sys, time\nfrom lacache_trt.runtime import Runtime\n{ready}{load}"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}\nRuntime.load = load\n{MAIN}", *ARGUMENTS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if process.stderr is None or "ready\n" not in iter(process.stderr.readline, ""):
        pytest.fail("the process did not start")
    return process


@pytest.mark.parametrize(("number", "code", "what"), STOPPED)
@pytest.mark.parametrize("error", ["ImportError('initialization failed')", "SystemExit(0)"])
def test_an_error_behind_a_signal_is_the_signal(
    number: signal.Signals, code: int, what: str, error: str
) -> None:
    """As pybind11 makes an ImportError of what is raised while a module starts."""
    process = started(
        "def load(directory):\n"
        "    try: ready(); time.sleep(60)\n"
        f"    except BaseException as error: raise {error} from error\n"
    )
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, f"{what}; partial output was discarded\n")
    found = json.loads(out)["error"]
    assert (found["what"], found["exit_code"]) == (what, code)


@pytest.mark.parametrize(("number", "code", "what"), STOPPED)
def test_nothing_is_raised_while_native_code_is_imported(
    number: signal.Signals, code: int, what: str
) -> None:
    process = started(
        "from importlib.machinery import ExtensionFileLoader\n"
        "class Loader(ExtensionFileLoader):\n"
        "    def exec_module(self, module):\n"
        "        try: ready(); time.sleep(1)\n"
        "        except BaseException: print('torn', file=sys.stderr)\n"
        "def load(directory):\n"
        "    Loader('m', 'm.so').exec_module(None)\n"
        "    print('imported', file=sys.stderr)\n"
        "    time.sleep(60)\n"
    )
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    expected = f"imported\n{what}; partial output was discarded\n"
    assert (process.returncode, err) == (code, expected)
    assert json.loads(out)["error"]["exit_code"] == code


@pytest.mark.parametrize(("number", "code", "what"), STOPPED)
def test_a_second_signal_ends_what_swallows_the_first(
    number: signal.Signals, code: int, what: str
) -> None:
    process = started(
        "def load(directory):\n"
        "    while True:\n"
        "        try: ready(); time.sleep(60)\n"
        "        except BaseException: pass\n"
    )
    process.send_signal(number)
    time.sleep(1.5)
    assert process.poll() is None
    for _ in range(5):  # the first may be seen late on a busy machine
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1.5)
            break
    process.kill()
    process.communicate()
    assert process.returncode == code


def test_a_signal_that_comes_twice_at_once_lets_tidying_end() -> None:
    """As a terminal that closes sends SIGHUP."""
    process = started(
        "def load(directory):\n"
        "    try: ready(); time.sleep(60)\n"
        "    finally: ready(); time.sleep(1.5); print('tidied', file=sys.stderr)\n"
    )
    process.send_signal(signal.SIGHUP)
    if process.stderr is None or process.stderr.readline() != "ready\n":
        pytest.fail("the signal did not arrive")
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 129
    assert err.startswith("tidied\n")


SLOW_IMPORT = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            print('ready', file=sys.stderr, flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
sys.argv = ['lacache-trt', 'doctor']
"""


@pytest.mark.parametrize("module", ["typer", "lacache_trt.cli.main", "lacache_trt.doctor"])
@pytest.mark.parametrize(
    "start",
    [
        "from lacache_trt.cli.entry import main; main()",
        "import runpy; runpy.run_module('lacache_trt.cli', run_name='__main__')",
    ],
    ids=["script", "module"],
)
def test_ctrl_c_while_the_command_line_is_imported(start: str, module: str) -> None:
    """130 without a traceback; a verb has begun when `lacache_trt.doctor` is imported."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORT.format(module=module) + start],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if process.stderr is None or process.stderr.readline() != "ready\n":
        pytest.fail("the process did not start")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    begun = module == "lacache_trt.doctor"
    expected = "interrupted; partial output was discarded\n" if begun else ""
    assert (process.returncode, out, err) == (130, "", expected)


@pytest.mark.parametrize("own", ["signal.SIG_IGN", "print"])
def test_a_handler_of_ctrl_c_that_is_there_already_stays(own: str) -> None:
    code = (
        f"import signal; signal.signal(signal.SIGINT, {own})\n"
        "from lacache_trt.cli.entry import main\n"
        "try: main()\n"
        f"except SystemExit: print(signal.getsignal(signal.SIGINT) == {own})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.endswith("True\n"), done.stderr
