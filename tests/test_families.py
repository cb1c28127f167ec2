"""The table of families: what a row says, and that a file and a row are enough for a new one."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import drq
from drq.config import EnvConfig, SACConfig
from drq.envs import FAMILIES, Family, check_task, family_of, make, split_task, task_names
from drq.errors import UserError
from drq.presets import configure, preset
from drq.report import report
from drq.training.folder import RunFolder
from runs import small

EXTENDING = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()


@pytest.fixture
def slide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    """The family that docs/extending.md adds, by its own code: one file, and one row."""
    (code,) = re.findall(r"```python\n(# src/drq/envs/slide.py.*?)```", EXTENDING, flags=re.S)
    (row,) = re.findall(r'```python\n(Family\("slide".*?)```', EXTENDING, flags=re.S)
    (tmp_path / "slide.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    family: Family = eval(row.replace("drq.envs.slide", "slide"), {"Family": Family})
    monkeypatch.setitem(FAMILIES, family.name, family)
    yield family
    sys.modules.pop("slide", None)


def test_a_file_and_a_row_make_a_family(slide: Family, tmp_path: Path) -> None:
    assert task_names("slide") == ["slide/bar"]
    assert configure("slide/bar", {}).preset == "cpu"
    assert preset("cpu", "slide/bar").agent == SACConfig(batch_size=64, hidden_dim=256)
    with pytest.raises(UserError, match="Did you mean 'slide/bar'"):
        check_task("slide/baar")
    folder = tmp_path / "run"
    result = drq.train(small(folder, "slide/bar"), quiet=True)
    assert [row["env_step"] for row in result.evaluations] == [40, 80, 120]
    again = small(folder, "slide/bar", steps=160)
    assert [row["env_step"] for row in drq.train(again, quiet=True).evaluations] == [40, 80, 120, 160]  # resumed
    assert len(drq.evaluate(folder, episodes=2).episodes) == 2
    assert report([folder], tmp_path / "report.csv", format="csv") == []
    with (tmp_path / "report.csv").open(newline="") as file:
        assert [(row["task"], row["benchmark"]) for row in csv.DictReader(file)] == [("slide/bar", "other")]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_says_what_its_environments_are(name: str) -> None:
    """What other rooms read from the table without a simulator is what an environment says of itself."""
    tasks = {"dmc": "dmc/walker-walk", "atari": "atari/pong", "gym": "gym/CartPole-v1", "toy": "toy/reach"}
    if name == "atari":
        pytest.importorskip("ale_py")
    family, env = FAMILIES[name], make(tasks[name], EnvConfig(), FAMILIES[name].action_repeat)
    try:
        assert family.action_kind in (None, env.spec.action_kind)
        assert family.action_repeat == env.spec.action_repeat
        assert family.channels == env.spec.frame_shape[0]
    finally:
        env.close()


def test_a_task_of_no_family_is_a_plain_one() -> None:
    for task in ("", "walker_walk", "unknown/thing"):
        assert split_task(task) == ("", task)
        assert (family_of(task).benchmark, family_of(task).budget_counts) == ("other", "env_step")
    assert split_task("gym/ns/Maze-v0") == ("gym", "ns/Maze-v0")


def test_the_simulators_of_the_table_are_recorded_with_a_run(tmp_path: Path) -> None:
    drq.train(small(tmp_path / "run", steps=20), quiet=True)
    versions = json.loads(RunFolder(tmp_path / "run").config_file.read_text())["versions"]
    assert {package for family in FAMILIES.values() for package in family.packages} <= versions.keys() | {"ale-py"}
