"""The names of all tasks, without loading a simulator."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Iterable

from drq.envs.atari_games import GAMES_26, game_id
from drq.errors import UserError

FAMILIES = ("dmc", "atari", "gym", "toy")

_DMC = {
    "acrobot": "swingup swingup_sparse",
    "ball_in_cup": "catch",
    "cartpole": "balance balance_sparse swingup swingup_sparse two_poles three_poles",
    "cheetah": "run",
    "dog": "stand walk trot run fetch",
    "finger": "spin turn_easy turn_hard",
    "fish": "upright swim",
    "hopper": "stand hop",
    "humanoid": "stand walk run run_pure_state",
    "humanoid_CMU": "stand walk run",
    "lqr": "lqr_2_1 lqr_6_2",
    "manipulator": "bring_ball bring_peg insert_ball insert_peg",
    "pendulum": "swingup",
    "point_mass": "easy hard",
    "quadruped": "walk run escape fetch",
    "reacher": "easy hard",
    "stacker": "stack_2 stack_4",
    "swimmer": "swimmer6 swimmer15",
    "walker": "stand walk run",
}
_TOY = ("reach", "catch")


def task_names(family: str | None = None) -> list[str]:
    """Full names of a family's tasks, or of all.

    gym: the newest version of whatever is registered by now. atari: all games of ale-py, or the 26 of the
    benchmark where it is not installed.
    """
    if family is None:
        return [name for each in FAMILIES for name in task_names(each)]
    if family == "dmc":
        names = [f"{domain}-{task}" for domain, tasks in _DMC.items() for task in tasks.split()]
    elif family == "atari":
        names = _atari_games()
    elif family == "gym":
        names = _newest_gym_ids()
    elif family == "toy":
        names = list(_TOY)
    else:
        raise UserError(f"There is no family of tasks {family!r}: choose {', '.join(FAMILIES)}.")
    return [f"{family}/{name}" for name in names]


def check_task(task: str, imports: Iterable[str] = ()) -> str:
    """The task's one name, such as `atari/battle_zone` for `atari/BattleZone`.

    Raises UserError for a task that does not exist, naming the nearest ones. `imports` are modules that register
    Gymnasium environments; they are imported first.
    """
    import_modules(imports)
    family, _, name = task.partition("/")
    if family not in FAMILIES or not name:
        # A name without its family, `walker-walk`, should find `dmc/walker-walk`.
        by_short_name = {full.partition("/")[2]: full for full in task_names()}
        near = [by_short_name[short] for short in _nearest(name or task, list(by_short_name))]
        raise UserError(_no_such_task(task, near))
    if family == "gym":
        _check_gym_id(name)
    elif family == "atari":
        from drq.envs.atari import games

        return f"atari/{game_id(name, games())}"
    elif task not in task_names(family):
        raise UserError(_no_such_task(task, _nearest(task, task_names(family))))
    return task


def import_modules(names: Iterable[str]) -> None:
    """Imports modules of the user, installed or in the current folder: those that register environments."""
    names = tuple(names)
    folder = os.getcwd()
    if names and folder not in sys.path:
        sys.path.insert(0, folder)
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise UserError(_failed_import(name, error)) from error
            raise UserError(
                f"There is no module {name!r} in {folder} or among the installed packages: "
                "give --import the name of the module that registers your environment, without .py."
            ) from error
        except Exception as error:
            raise UserError(_failed_import(name, error)) from error


def _failed_import(name: str, error: Exception) -> str:
    """One sentence that says where a user's module went wrong."""
    if isinstance(error, SyntaxError):
        file, line, reason = error.filename, error.lineno, error.msg
    else:
        # The innermost line of a file, leaving out importlib's frozen frames.
        trace = traceback.extract_tb(error.__traceback__)
        frame = [frame for frame in trace if os.path.isfile(frame.filename)][-1]
        file, line, reason = frame.filename, frame.lineno, str(error)
    where = f"{os.path.basename(str(file))}, line {line}"
    what = f"{type(error).__name__}: {' '.join(reason.split())}"
    return f"Importing {name} failed at {where} ({what}): mend that line first."


def _check_gym_id(name: str) -> None:
    module, _, identity = name.rpartition(":")
    if module:  # Gymnasium's own notation for a module to import first
        import_modules([module])
    import gymnasium

    if identity not in gymnasium.registry:
        near = _nearest(f"gym/{identity}", [f"gym/{known}" for known in gymnasium.registry])
        raise UserError(
            f"{_no_such_task(f'gym/{identity}', near)} "
            "If it is your own, name the module that registers it: --import my_module."
        )


def _newest_gym_ids() -> list[str]:
    """Registered ids, less older versions of the same task and those that are no tasks for an agent here."""
    import gymnasium

    newest: dict[tuple[str | None, str], tuple[int, str]] = {}
    for identity, spec in gymnasium.registry.items():
        # phys2d and tabular are made for jax; the others adapt environments of the old gym.
        if spec.namespace in ("phys2d", "tabular") or identity.startswith(("GymV21", "GymV26")):
            continue
        candidate = (spec.version or 0, identity)
        key = (spec.namespace, spec.name)
        newest[key] = max(newest.get(key, candidate), candidate)
    return sorted(identity for _, identity in newest.values())


def _atari_games() -> list[str]:
    from drq.envs.atari import games

    try:
        return games()
    except UserError:  # ale-py is not installed
        return list(GAMES_26)


def _nearest(name: str, names: list[str]) -> list[str]:
    return difflib.get_close_matches(name, names, n=3, cutoff=0.6)


def _no_such_task(task: str, near: list[str]) -> str:
    hint = f"did you mean {' or '.join(near)}? `drq tasks` lists all." if near else "`drq tasks` lists all."
    return f"There is no task {task!r}: {hint}"
