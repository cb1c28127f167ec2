"""A fresh clone installs, from pinned versions, or says in one sentence what it lacks."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from drq import errors
from drq.machine import REQUIRED
from runs import script

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FOR_USERS = {name: lines for name, lines in EXTRAS.items() if name != "dev"}
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def run(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    # These tests may themselves run under make, whose flags the make under test must not inherit.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    inherited.pop("PYTHON", None)
    return subprocess.run(
        command, cwd=cwd, env=inherited | environment, capture_output=True, text=True, check=False, timeout=120
    )


# --- versions -----------------------------------------------------------------------------------------------------


def required(lines: list[str], python: str, extras: set[str]) -> Iterator[Requirement]:
    """The requirements among these lines that hold on Linux with this version of Python and these extras."""
    for line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        base = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
        if marker is None or any(marker.evaluate(base | {"extra": extra}) for extra in extras | {""}):
            yield requirement


def dependencies(python: str) -> set[str]:
    """Every package that an installation with all extras reaches, by the metadata of what is installed here."""
    top = [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    waiting = list(required(top, python, set()))
    if python >= "3.13":
        waiting.append(Requirement("dm_control"))
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen or (name == "labmaze" and python >= "3.13"):
            continue
        seen.add(key)
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # an extra, or a requirement of another Python: its name alone is checked
        children = required(lines, python, requirement.extras)
        # CUDA builds of torch pin their own libraries.
        waiting += [child for child in children if name != "torch" or not re.match("nvidia|cuda|triton", child.name)]
    return {name for name, _ in seen}


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_pinned(python: str) -> None:
    if any(Version(metadata.version(name)).public != PINS[canonicalize_name(name)] for name in REQUIRED):
        pytest.skip("other versions than the pinned are installed, which may require other packages")
    found = dependencies(python)
    assert {"torch", "mujoco", "dm-control", "jinja2", "pluggy"} <= found  # the walk goes deep
    assert found - PINS.keys() == set()


def test_declared_ranges_contain_the_pins() -> None:
    declared = [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    for requirement in map(Requirement, declared):
        assert PINS[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_the_pins_are_the_papers_pair() -> None:
    assert (PINS["dm-control"], PINS["mujoco"]) == ("1.0.44", "3.11.0")


def test_the_doctor_asks_for_what_the_package_asks_for() -> None:
    declared = {item.name: item.specifier for item in required(PROJECT["dependencies"], "3.12", set())}
    assert REQUIRED.keys() == declared.keys()
    for name, requirement in REQUIRED.items():
        bounds = {f">={requirement.oldest}"} | ({f"<{requirement.below}"} if requirement.below else set())
        assert {str(part) for part in declared[name]} == bounds


def test_every_import_of_the_package_is_declared() -> None:
    """What src/drq imports comes with the package or with one of its extras for users."""
    lines = [*PROJECT["dependencies"], *(line for lines in FOR_USERS.values() for line in lines)]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    brought_along = {"OpenGL": "dm_control", "triton": "torch"}
    distributions = metadata.packages_distributions()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [node.module]
            for module in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"drq"}:
                module = brought_along.get(module, module)
                owners = {canonicalize_name(owner) for owner in distributions.get(module, [module])}
                assert owners & declared, f"{file.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("extra", FOR_USERS)
def test_without_a_checkout_an_extra_is_installed_by_the_names_of_its_packages(
    extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package index knows another project as drq."""
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "lib" / "site-packages" / "drq" / "errors.py"))
    wheel = [f'{line}; extra == "{name}"' for name, lines in FOR_USERS.items() for line in lines]
    monkeypatch.setattr(errors, "requires", lambda name: [*PROJECT["dependencies"], *wheel])
    pip, install, *packages = shlex.split(errors.install_command(extra))
    assert (pip, install) == ("pip", "install")
    assert list(map(Requirement, packages)) == list(map(Requirement, EXTRAS[extra]))


def test_every_data_file_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["drq"]
    package = ROOT / "src" / "drq"
    for file in package.rglob("*"):
        if file.is_file() and file.suffix not in (".py", ".pyc"):
            name = str(file.relative_to(package))
            assert any(fnmatch(name, pattern) for pattern in patterns), name


def test_no_package_index_is_named() -> None:
    files = [ROOT / "Makefile", ROOT / "constraints.txt", ROOT / "pyproject.toml", ROOT / ".ci" / "run"]
    for file in [*files, *(ROOT / "scripts").iterdir()]:
        if file.is_file():
            assert "index-url" not in file.read_text(), file


def test_licence_and_citation() -> None:
    assert (ROOT / "LICENSE").read_text().startswith("MIT License")
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {PROJECT['version']}\n" in citation
    assert "2004.13649" in citation


# --- make ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """As much of a fresh clone as comes before anything is installed."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@needs_make
def test_make_alone_lists_the_targets() -> None:
    done = run(["make"], ROOT)
    assert done.returncode == 0
    for target in ("demo", "test", "lint", "format", "clean"):
        assert re.search(rf"^  make {target} +\S", done.stdout, re.MULTILINE)


def fake_python(folder: Path, tampering: str) -> str:
    """A Python that differs from this one by a statement run first."""
    start = "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    code = f"import sys, runpy, importlib.util; {tampering}; {start}"
    return str(executable(folder / "fake-python", f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n'))


OLD = "sys.version_info = (3, 9, 2, 'final', 0)"
NO_VENV = "find = importlib.util.find_spec; importlib.util.find_spec = lambda n: n != 'ensurepip' and find(n) or None"


@needs_make
@pytest.mark.parametrize(
    ("tampering", "fault", "remedy"),
    [
        (OLD, "needs Python 3.11 or newer and this is 3.9", "make test PYTHON=python3.12"),
        (NO_VENV, "cannot make a virtual environment", "apt-get install python3-venv"),
    ],
)
@pytest.mark.parametrize("target", ["demo", "test"])
def test_an_unfit_python_is_refused_in_one_sentence(
    clone: Path, target: str, tampering: str, fault: str, remedy: str
) -> None:
    done = run(["make", target, f"PYTHON={fake_python(clone, tampering)}"], clone)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(said) == 1
    assert fault in said[0]
    assert remedy in said[0]
    assert not (clone / ".venv").exists()


@needs_make
def test_a_python_that_is_not_there_is_named(clone: Path) -> None:
    done = run(["make", "test"], clone, PYTHON="python3.99")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(said) == 1
    assert "no Python called python3.99" in said[0]
    assert "apt-get install python3 python3-venv" in said[0]


def test_the_check_is_readable_by_any_python_3() -> None:
    tree = ast.parse((ROOT / "scripts" / "check_python.py").read_text(), feature_version=(3, 4))
    too_new = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr)
    assert not any(isinstance(node, too_new) for node in ast.walk(tree))


def test_ci_installs_system_packages_and_then_runs_make_test(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    record = f'#!/bin/sh\necho "$(basename "$0")" "$@" >> "{calls}"\n'
    executable(tmp_path / "make", record)
    python = executable(tmp_path / "python", record)
    done = run([str(ROOT / ".ci" / "run")], tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHON=str(python))
    assert done.returncode == 0, done.stderr
    assert calls.read_text().splitlines() == ["python scripts/system_packages.py --install", "make test"]


# --- scripts/install.py -------------------------------------------------------------------------------------------


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, at home in a folder of its own, with a .venv whose python is `true`."""
    module = script("install")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    virtual = tmp_path / ".venv"
    (virtual / "bin").mkdir(parents=True)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", virtual)
    monkeypatch.setattr(module, "PYTHON", executable(virtual / "bin" / "python", "#!/bin/sh\nexit 0\n"))
    monkeypatch.setattr(module, "STAMP", virtual / "stamp")
    monkeypatch.setattr(module, "LOG", virtual / "log")
    monkeypatch.setattr(module, "CONSTRAINTS", tmp_path / "constraints.txt")
    monkeypatch.setattr(module, "venv_is_ours", lambda: True)
    return module


def installs(installer: Any, monkeypatch: pytest.MonkeyPatch, *extras: str) -> list[str]:
    """What pip is asked for when these extras are wanted."""
    asked: list[str] = []
    with monkeypatch.context() as context:
        context.setattr(installer, "pip_install", lambda *arguments: asked.append(arguments[-1]))
        installer.main(set(extras))
    return asked


def test_it_installs_once_and_again_only_when_something_changed(
    installer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert installs(installer, monkeypatch)[:2] == ["setuptools", "."]
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert installs(installer, monkeypatch) == []
    assert capsys.readouterr().out == ""
    assert installs(installer, monkeypatch, "dev", "atari")[1] == ".[atari,dev]"
    assert installs(installer, monkeypatch, "dev") == []
    assert installs(installer, monkeypatch) == []
    installer.CONSTRAINTS.write_text("another pin\n")
    assert installs(installer, monkeypatch, "dev")[1] == ".[dev]"
    (installer.ROOT / "pyproject.toml").write_text("another dependency\n")
    assert installs(installer, monkeypatch)[1] == "."


def test_the_control_suite_comes_without_labmaze_from_python_3_13_on(
    installer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer.sys, "version_info", (3, 13, 1, "final", 0))
    assert installs(installer, monkeypatch) == ["setuptools", ".", "dm_control"]
    monkeypatch.setattr(installer.sys, "version_info", (3, 12, 1, "final", 0))
    assert installs(installer, monkeypatch) == ["setuptools", "."]


@pytest.mark.parametrize(
    ("pip_says", "sentence"),
    [
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "the disk is full: free"),
        ("ERROR: No matching distribution found for torch==2.13.0", "no wheel for this Python"),
        ("NewConnectionError(...)\nERROR: No matching distribution found for torch", "cannot be reached: check"),
        ("Segmentation fault", "read why at the end of"),
    ],
)
def test_a_failed_installation_is_one_sentence_and_is_tried_again(
    installer: Any, monkeypatch: pytest.MonkeyPatch, pip_says: str, sentence: str
) -> None:
    executable(installer.PYTHON, f"#!/bin/sh\ncat <<'EOF'\n{pip_says}\nEOF\nexit 1\n")
    with pytest.raises(SystemExit) as stopped:
        installer.main(set())
    message = str(stopped.value)
    assert sentence in message
    assert "repeat the command" in message
    assert len(message.strip().splitlines()) == 1
    assert installs(installer, monkeypatch) != []


def test_ctrl_c_while_it_installs_is_one_sentence(installer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        context.setattr(installer.subprocess, "run", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
        context.setattr(installer, "venv_is_ours", lambda: True)
        with pytest.raises(BaseException, match="stopped: the same command again") as stopped:
            installer.main(set())
    assert stopped.type is SystemExit
    assert installs(installer, monkeypatch) != []


def test_a_venv_of_another_python_or_without_pip_is_not_ours(installer: Any, tmp_path: Path) -> None:
    fresh = script("install")
    fresh.PYTHON = tmp_path / "nowhere"
    assert not fresh.venv_is_ours()
    fresh.PYTHON = executable(tmp_path / "python", "#!/bin/sh\necho 3 10\n")
    assert not fresh.venv_is_ours()
    fresh.PYTHON = executable(tmp_path / "python", "#!/bin/sh\nexit 1\n")
    assert not fresh.venv_is_ours()
    fresh.PYTHON = Path(sys.executable)
    assert fresh.venv_is_ours() == (importlib.util.find_spec("pip") is not None)


# --- scripts/system_packages.py -----------------------------------------------------------------------------------


def test_missing_system_libraries_are_one_sentence() -> None:
    system = script("system_packages")
    assert system.missing(loads=lambda name: True, which=lambda name: f"/usr/bin/{name}") == {}
    lacking = system.missing(loads=lambda name: name != "libEGL.so.1", which=lambda name: None)
    said = system.sentence(lacking)
    assert "g++ for drawing control-suite images; libegl1 for drawing with OpenGL" in said
    assert "`apt-get install g++ libegl1 chromium`" in said
    assert "skipped" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("user", "arguments", "installs"), [(0, ["--install"], 1), (1000, ["--install"], 0), (0, [], 0)]
)
def test_system_packages_are_installed_only_when_asked_and_able(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    user: int,
    arguments: list[str],
    installs: int,
) -> None:
    system = script("system_packages")
    calls: list[dict[str, list[str]]] = []
    lacking = {"drawing": ["libegl1"]}
    monkeypatch.setattr(system, "missing", lambda: lacking)
    monkeypatch.setattr(system, "install", calls.append)
    monkeypatch.setattr(system.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(system.os, "geteuid", lambda: user)
    monkeypatch.setattr(system.sys, "platform", "linux")
    system.main(arguments)
    assert len(calls) == installs
    assert "libegl1" in capsys.readouterr().err  # still missing: said, never silent
