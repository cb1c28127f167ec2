"""The names of all tasks, without loading a simulator."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drq.envs.families import FAMILIES, family_of, split_task
from drq.envs.rendering import choose_backend
from drq.errors import UserError, did_you_mean, what_failed


def task_names(family: str | None = None) -> list[str]:
    """Full names of a family's tasks, or of all.

    gym: the newest version of whatever is registered by now. atari: all games of ale-py, or the 26 of the
    benchmark where it is not installed.
    """
    if family is None:
        return [name for each in FAMILIES for name in task_names(each)]
    if family not in FAMILIES:
        raise UserError(f"There is no family of tasks {family!r}: choose {', '.join(FAMILIES)}.")
    return [f"{family}/{name}" for name in FAMILIES[family].load().names()]


def check_task(task: str, imports: Iterable[str] = ()) -> str:
    """The task's one name, such as `atari/battle_zone` for `atari/BattleZone`.

    Raises UserError for a task that does not exist, naming the nearest ones. `imports` are modules that register
    Gymnasium environments; they are imported first.
    """
    import_modules(imports)
    family, name = split_task(task)
    found = FAMILIES[family].load().find(name) if family and name else None
    if found is None:
        # A name without its family, `walker-walk`, should find `dmc/walker-walk`.
        near = did_you_mean(task, task_names(family or None), most=3, key=lambda each: letters(split_task(each)[1]))
        raise UserError(f"There is no task {task!r}.{near} `drq tasks` lists all.{family_of(task).hint}")
    return f"{family}/{found}"


def letters(name: str) -> str:
    """What is the same in all spellings of a name: BattleZone, battle-zone and battle_zone."""
    return "".join(character for character in name.lower() if character.isalnum())


def import_modules(names: Iterable[str]) -> None:
    """Imports modules of the user, such as those that register environments: by their names, installed or in the
    current folder, or as files (`../my_env.py`)."""
    if isinstance(names, str):
        raise UserError(f"imports={names!r} is one text: give a list of them, imports=[{names!r}].")
    for name in names:
        choose_backend()  # before the module imports mujoco
        folder, module = os.getcwd(), name
        if name.endswith(".py"):
            file = Path(name).resolve()
            if not file.is_file():
                raise UserError(f"There is no file {name}: give --import your module's name, or its file.")
            folder, module = str(file.parent), file.stem
        _look_in(folder)
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise UserError(_failed_import(name, error)) from error
            raise UserError(
                f"There is no module {name!r} in {folder} or among the installed packages: "
                "give --import the name of the module that registers your environment, or its file."
            ) from error
        except (Exception, SystemExit) as error:
            raise UserError(_failed_import(name, error)) from error
        if name.endswith(".py") and Path(imported.__file__ or "").resolve() != file:
            raise UserError(f"{name} has the name of another module, {imported.__file__}: rename the file.")


def named_object(reference: str, what: str, *, made: bool = False) -> Any:
    """What `my_module:name` names, in a module of the current folder or an installed one; `made`: of a class, an
    object."""
    module, _, name = reference.partition(":")
    _look_in(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
        return found() if made and isinstance(found, type) else found
    except (Exception, SystemExit) as error:  # whatever the module's own code may raise
        raise UserError(
            f"The {what} {reference!r} cannot be imported ({type(error).__name__}: {error}): "
            f"write my_module:my_{what}, with my_module in the current folder or installed."
        ) from error


def _look_in(folder: str) -> None:
    if folder not in sys.path:  # an installed command does not look there by itself
        sys.path.insert(0, folder)


def _failed_import(name: str, error: BaseException) -> str:
    return f"Importing {name} failed {what_failed(error)}: mend that first."
