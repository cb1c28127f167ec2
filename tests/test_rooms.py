"""The order of the rooms: each imports only those before it; families of tasks are told apart by their table alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "drq"

ORDER = (
    # what every room may use
    *("errors", "cores", "child", "code_cache", "config"),
    # the way of an observation
    *("envs", "augment", "backend", "replay", "priorities", "regularize", "networks", "agents", "engine"),
    # runs, and what the package offers to Python
    *("settings", "presets", "training", "__init__"),
    # what to run, where, what came out, how fast
    *("machine", "suites", "launch", "report", "speed"),
    # what a user types
    *("demo", "doctor", "env_check", "completion", "cli", "__main__"),
)

DOORS = ("suites", "launch", "report", "speed")
"""Rooms of which others know the names in `__init__` alone."""

FILES = sorted(SOURCE.rglob("*.py"))


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in FILES}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def used(file: Path) -> Iterator[tuple[int, str]]:
    """Modules of ours that a file imports, at its top or inside a function, and those that it names in a text, to
    import them by name or to start them as processes. With the line of each."""
    package = module_name(file) if file.name == "__init__.py" else module_name(file).rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names if each.name.split(".")[0] == "drq")
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: 1 - node.level or None]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            for each in node.names if source.split(".")[0] == "drq" else ():
                inner = f"{source}.{each.name}"
                yield node.lineno, inner if inner in MODULES else source
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]  # as in "drq.agents.sac:SAC"
            if name in MODULES and name != "drq":
                yield node.lineno, name
        elif isinstance(node, ast.List):  # python -m drq
            words = [each.value for each in node.elts if isinstance(each, ast.Constant)]
            if ("-m", "drq") in pairwise(words):
                yield node.lineno, "drq.__main__"


def test_every_file_has_its_room() -> None:
    assert {room_of(name) if name != "drq" else "__init__" for name in MODULES} == set(ORDER)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_room_knows_only_the_rooms_before_it(file: Path) -> None:
    here = room_of(module_name(file))
    for line, module in used(file):
        there = room_of(module)
        assert ORDER.index(there) <= ORDER.index(here), f"{file}, line {line}: {here} comes before {there}"
        if there in DOORS and there != here and not is_started(module):
            assert module == f"drq.{there}", f"{file}, line {line}: import it from drq.{there}"


def is_started(module: str) -> bool:
    return '__name__ == "__main__"' in MODULES[module].read_text()


def test_what_is_looked_for_is_found() -> None:
    """The test above reads imports of all kinds."""
    found = {file.relative_to(SOURCE).as_posix(): {module for _, module in used(file)} for file in FILES}
    assert "drq.envs.protocol" in found["replay.py"]  # at the top
    assert "drq.replay" in found["machine.py"]  # inside a function
    assert "drq.presets" in found["suites/paper.py"]  # from drq import presets
    assert "drq.envs.atari_group" in found["envs/atari_group.py"]  # started as a process
    assert "drq.envs.dmc" in found["envs/families.py"]  # imported by name
    assert {room_of(module) for module in found["__init__.py"]} > {"agents", "training"}


@pytest.mark.parametrize("module", [name for name in MODULES if name.count(".") > 1 and is_started(name)])
def test_a_module_that_is_started_is_not_imported_by_its_room(module: str) -> None:
    """Python would run it a second time, and warn of that in the output of every process."""
    package = module.rpartition(".")[0]
    look = f"import sys, {package}; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look]).returncode == 0


def test_two_classes_never_share_a_name() -> None:
    homes = defaultdict(list)
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(file.relative_to(SOURCE).as_posix())
    shared = {name: files for name, files in homes.items() if len(files) > 1}
    assert not shared


def test_families_are_told_apart_by_their_table_alone() -> None:
    prefix = re.compile(r'startswith\(\(?"\w+/"|partition\("/"\)|split\("/"')
    found = [file.name for file in FILES if prefix.search(file.read_text())]
    assert found == ["families.py"]
