"""Names of tasks: complete, cheap to check, and helpful when misspelt."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drq.envs import check_task, import_modules, task_names
from drq.envs.atari_games import GAMES_26
from drq.errors import UserError


def test_every_task_of_the_control_suite_is_listed() -> None:
    from drq.envs.rendering import mujoco_imports

    with mujoco_imports():
        from dm_control import suite
    assert task_names("dmc") == [f"dmc/{domain}-{task}" for domain, task in suite.ALL_TASKS]


def test_the_listing_has_all_families() -> None:
    names = task_names()
    assert len(names) == len(set(names))
    assert {"dmc/walker-walk", "toy/reach", "gym/Pendulum-v1", "atari/pong"} <= set(names)
    assert "gym/HalfCheetah-v4" not in names, "only the newest version belongs in the listing"
    assert {f"atari/{game}" for game in GAMES_26} <= set(task_names("atari"))
    for name in task_names("dmc") + task_names("toy") + task_names("atari") + task_names("gym"):
        check_task(name)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("dmc/walker-wlak", "dmc/walker-walk"),
        ("dmc/walker_walk", "dmc/walker-walk"),
        ("dmc/ball-in-cup-catch", "dmc/ball_in_cup-catch"),
        ("walker-walk", "dmc/walker-walk"),
        ("dcm/walker-walk", "dmc/walker-walk"),
        ("toy/reech", "toy/reach"),
        ("atari/pongg", "atari/pong"),
        ("ALE/Pong-v5", "'atari/pong'"),
        ("gym/Pendulum", "gym/Pendulum-v1"),
        ("gym/Pendullum-v1", "gym/Pendulum-v1"),
    ],
)
def test_a_misspelt_task_gets_the_nearest_names(wrong: str, nearest: str) -> None:
    with pytest.raises(UserError) as raised:
        check_task(wrong)
    assert nearest in str(raised.value)
    assert "`drq tasks`" in str(raised.value)


@pytest.mark.parametrize("nonsense", ["", "/", "zzz", "dmc/", "dmc/zzzzzzzz"])
def test_nonsense_is_pointed_to_the_listing(nonsense: str) -> None:
    with pytest.raises(UserError, match="`drq tasks` lists all"):
        check_task(nonsense)


def test_the_papers_spelling_of_a_game_will_do() -> None:
    check_task("atari/MsPacman")


def test_without_ale_py_the_benchmark_is_listed_and_playing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    assert task_names("atari") == [f"atari/{game}" for game in GAMES_26]
    with pytest.raises(UserError, match="pip install"):
        check_task("atari/pong")


def test_an_unknown_family_names_the_families() -> None:
    with pytest.raises(UserError, match="choose dmc, atari, gym, toy"):
        task_names("dm")


def test_an_unknown_gym_task_asks_for_the_module_that_registers_it() -> None:
    with pytest.raises(UserError, match="--import my_module"):
        check_task("gym/MyOwnEnvironment-v0")


def test_importing_the_package_loads_no_simulator() -> None:
    heavy = ["mujoco", "dm_control", "gymnasium", "ale_py", "PIL"]
    code = (
        "import sys, drq.envs; drq.envs.check_task('dmc/walker-walk');"
        f"print([module for module in {heavy} if module in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder, which is the current one; what is imported from it is forgotten afterwards."""
    import gymnasium

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("my_maze", None)
    gymnasium.registry.pop("MyMaze-v0", None)


def test_a_module_in_the_current_folder_registers_its_task(folder: Path) -> None:
    entry_point = "gymnasium.envs.classic_control:PendulumEnv"
    (folder / "my_maze.py").write_text(
        f"import gymnasium\ngymnasium.register('MyMaze-v0', entry_point='{entry_point}')\n"
    )
    with pytest.raises(UserError):
        check_task("gym/MyMaze-v0")
    check_task("gym/MyMaze-v0", imports=["my_maze"])
    assert "gym/MyMaze-v0" in task_names("gym")


def test_a_missing_module_is_said_with_the_folder_looked_in(folder: Path) -> None:
    with pytest.raises(UserError) as raised:
        import_modules(["no_such_module"])
    assert "no_such_module" in str(raised.value)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("x = 1\n\ny = x / 0\n", "broken.py, line 3 (ZeroDivisionError"),
        ("import not_installed_anywhere\n", "broken.py, line 1 (ModuleNotFoundError"),
        ("x = 1\ndef f(:\n", "broken.py, line 2 (SyntaxError"),
    ],
)
def test_a_module_that_fails_is_said_with_its_line(folder: Path, source: str, where: str) -> None:
    (folder / "broken.py").write_text(source)
    with pytest.raises(UserError) as raised:
        import_modules(["broken"])
    assert where in str(raised.value)
    assert "\n" not in str(raised.value)
