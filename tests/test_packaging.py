"""What is installed: the mapped packages, nothing at top level, nothing heavy, nothing unsafe."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parent.parent
MAPPING = {
    "lacache_trt": "lacache_trt",
    "lacache_trt.export": "export",
    "lacache_trt.engines": "engines",
    "lacache_trt.plugins": "plugins",
}
FOLDERS = tuple(MAPPING.values())


def python(code: str, *arguments: str, cwd: Path, path: Path | None = None) -> str:
    """Run code in a fresh interpreter, away from the checkout."""
    environment = {"PATH": "/usr/bin:/bin", **({"PYTHONPATH": str(path)} if path else {})}
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def packages_on_disk() -> list[str]:
    found = []
    for package, folder in MAPPING.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            found.append(".".join((package, *parts)))
    return sorted(found)


def test_the_list_of_packages_is_complete() -> None:
    tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    settings = project["tool"]["setuptools"]
    assert sorted(settings["packages"]) == packages_on_disk()
    assert settings["package-dir"] == MAPPING


def test_every_folder_with_code_is_a_package() -> None:
    for folder in FOLDERS:
        for source in (ROOT / folder).rglob("*.py"):
            assert (source.parent / "__init__.py").exists(), f"{source.parent} has no __init__.py"


NAMES = """
import importlib.util, sys
import lacache_trt, lacache_trt.export.options, lacache_trt.engines.registry, lacache_trt.plugins
print(lacache_trt.__file__)
generic = ("export", "engines", "plugins", "tests", "benchmarks", "examples")
print([name for name in generic if importlib.util.find_spec(name)])
"""
LAZY = """
import sys
import lacache_trt
dir(lacache_trt)
from lacache_trt import GenerationConfig, LaCacheError
heavy = ("torch", "onnx", "onnxruntime", "numpy", "transformers", "tokenizers", "typer", "rich")
print([name for name in heavy if name in sys.modules])
"""


def test_editable_install_has_no_generic_names(tmp_path: Path) -> None:
    file, names = python(NAMES, cwd=tmp_path).splitlines()
    assert names == "[]"
    assert file


def test_import_is_light(tmp_path: Path) -> None:
    assert python(LAZY, cwd=tmp_path) == "[]\n"


IN_CHECKOUT = """
import sys
sys.path[:0] = sys.argv[1:2]
sys.path += sys.argv[2:]
from lacache_trt import plugins, engines, export
import lacache_trt.engines.registry, lacache_trt.plugins.abi, lacache_trt.export.options
print([module.__name__ for module in (plugins, engines, export)])
print(lacache_trt.engines.registry.__file__)
"""


def test_the_source_folder_works_where_python_finds_it_first(tmp_path: Path) -> None:
    """As in a checkout after an installation that is not editable: -S leaves its hook out."""
    code = [sys.executable, "-I", "-S", "-c", IN_CHECKOUT, str(ROOT)]
    done = subprocess.run(
        [*code, sysconfig.get_path("purelib")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    names, file = done.stdout.splitlines()
    assert names == "['lacache_trt.plugins', 'lacache_trt.engines', 'lacache_trt.export']"
    assert Path(file) == ROOT / "engines" / "registry.py"


def test_an_installed_package_is_found_in_its_own_folder_alone(
    installed: Path, tmp_path: Path
) -> None:
    shown = python("import lacache_trt; print(lacache_trt.__path__)", cwd=tmp_path, path=installed)
    assert shown == f"{[str(installed / 'lacache_trt')]}\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "build", ".*")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*pip, *build, str(source)], check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    target = wheel.parent / "site"
    with ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    packages = {name.rsplit("/", 1)[0].replace("/", ".") for name in names if name.endswith(".py")}
    assert sorted(packages) == packages_on_disk()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lacache_trt"}
    assert "lacache_trt/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    model = {entry.name for entry in (ROOT / "lacache_trt" / "demo" / "tiny-llada").glob("*")}
    assert {f"lacache_trt/demo/tiny-llada/{name}" for name in model} <= set(names)


def test_wheel_has_no_generic_names_and_is_light(installed: Path, tmp_path: Path) -> None:
    file, names = python(NAMES, cwd=tmp_path, path=installed).splitlines()
    assert Path(file).is_relative_to(installed)
    assert names == "[]"
    assert python(LAZY, cwd=tmp_path, path=installed) == "[]\n"


def test_console_script(installed: Path, tmp_path: Path) -> None:
    (package,) = distributions(name="lacache-trt", path=[str(installed)])
    (script,) = package.entry_points
    assert (script.group, script.name) == ("console_scripts", "lacache-trt")
    start = f"import sys; sys.argv[1:] = ['--version']; from {script.module} import {script.attr}; "
    shown = python(f"{start}{script.attr}()", cwd=tmp_path, path=installed)
    assert shown.startswith("lacache-trt ")


# Unsafe constructs

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal"}
FORBIDDEN_MODULES |= {"shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load", "np.load", "numpy.load", "os.system"}
FORBIDDEN_ARGUMENTS = {"shell", "allow_pickle", "trust_remote_code"}
FORBIDDEN_NAMES = {"engine_host_code_allowed"}


def unsafe_constructs(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            yield f"line {node.lineno}: assert"
        elif isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
            yield from (f"line {node.lineno}: {name}" for name in names & FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
                yield f"line {node.lineno}: {node.module}"
        elif isinstance(node, ast.Call):
            if (name := ast.unparse(node.func)) in FORBIDDEN_CALLS:
                yield f"line {node.lineno}: {name}"
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in FORBIDDEN_ARGUMENTS and not off:
                    yield f"line {node.lineno}: {keyword.arg}"
        elif isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_NAMES:
            yield f"line {node.lineno}: {node.attr}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "torch.load(x)",
        "eval('1')",
        "exec('1')",
        "yaml.load(x)",
        "np.load(x)",
        "subprocess.run(x, shell=True)",
        "f(allow_pickle=flag)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "runtime.engine_host_code_allowed = True",
        "assert x",
    ],
)
def test_the_search_finds(source: str) -> None:
    assert len(list(unsafe_constructs(source))) == 1


def test_the_search_lets_pass() -> None:
    source = "model.eval()\nsubprocess.run(x, shell=False)\nf(trust_remote_code=False)\n"
    assert not list(unsafe_constructs(source))


def test_library_code_has_no_unsafe_constructs() -> None:
    found = [
        f"{path.relative_to(ROOT)} {what}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for what in unsafe_constructs(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_fetched_packages_are_pinned() -> None:
    for name in ("requirements-dev.txt", "requirements-kernels.txt"):
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                assert "==" in line, line
