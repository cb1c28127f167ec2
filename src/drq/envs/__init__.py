"""Environments: where observations come from. One protocol, one table of families.

Importing this package loads no simulator: each family's module is imported when one of its tasks is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from drq.config import EnvConfig, Render
from drq.envs.families import FAMILIES, Family, family_of, split_task
from drq.envs.group import EnvironmentGroup, ThreadedGroup
from drq.envs.protocol import Action, Environment, EnvSpec, Frame, Step
from drq.envs.tasks import check_task, import_modules, letters, task_names
from drq.errors import UserError, what_failed

__all__ = [
    "FAMILIES",
    "Action",
    "EnvSpec",
    "Environment",
    "EnvironmentGroup",
    "Family",
    "Frame",
    "Step",
    "action_kind",
    "check_settings",
    "check_task",
    "choose_render",
    "family_of",
    "import_modules",
    "leave_undrawn",
    "letters",
    "make",
    "make_group",
    "split_task",
    "task_names",
]


def make(task: str, config: EnvConfig, action_repeat: int) -> Environment:
    """The environment of a task such as `dmc/walker-walk`.

    The action repeat is the one to use: `config.action_repeat` may leave it to a preset. Atari's is always 4.
    An environment that draws with OpenGL belongs to the thread that first resets it.
    """
    family, name = split_task(check_task(task))
    check_settings(config, action_repeat)
    users = config.kwargs != "{}" or config.wrap or config.image_key or config.own_process
    if users and not FAMILIES[family].of_the_users:
        flags = "--env.kwargs, --env.wrap, --env.image-key and --env.own-process"
        raise UserError(f"{flags} are for gym tasks, not {task}: leave them out.")
    if not FAMILIES[family].has_game_settings and (config.no_op_steps or config.zero_stack):
        raise UserError(f"--env.no-op-steps and --env.zero-stack are for Atari games, not {task}: leave them out.")
    if not FAMILIES[family].has_suite_settings and config.physics != "current":
        raise UserError(f"--env.physics {config.physics} is for the control suite, not {task}: leave it out.")
    with _constructing(task):
        return FAMILIES[family].load().make(name, config, action_repeat)


@contextmanager
def _constructing(task: str) -> Iterator[None]:
    """Puts what an environment of somebody's raises there into words."""
    try:
        yield
    except (UserError, ImportError):
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{task} failed in its constructor {what_failed(error)}: mend that first.") from error


def action_kind(task: str, config: EnvConfig) -> Literal["continuous", "discrete"]:
    """Which actions a task takes. Its row tells, or its file does."""
    family, name = split_task(check_task(task))
    row = FAMILIES[family]
    with _constructing(task):
        return row.action_kind or row.load().action_kind(name, config)


def make_group(task: str, config: EnvConfig, action_repeat: int, count: int) -> EnvironmentGroup:
    """So many environments of a task to play side by side. What each gives is what that of `make` gives."""
    together = family_of(task).load_groups()
    if together is None:
        return ThreadedGroup(lambda: make(task, config, action_repeat), count)
    check_settings(config, action_repeat)
    return together.make_group(split_task(check_task(task))[1], config, action_repeat, count)


def choose_render(task: str, config: EnvConfig, rays: Literal["ray", "cuda"] | None) -> Render:
    """What `--env.render auto` is for a task. `rays`: how this machine casts them, if it shall rather than OpenGL."""
    family, name = split_task(check_task(task))
    if not FAMILIES[family].has_suite_settings:
        return "fast"  # it has one way to draw
    from drq.envs import dmc

    return dmc.choose_render(name, config, rays)


def leave_undrawn(env: Environment) -> bool:
    """Has an environment hand over scenes, which a GPU draws, instead of frames. False where it cannot."""
    from drq.envs import dmc

    simulator = getattr(env, "simulator", None)
    return isinstance(simulator, dmc.ControlSuite) and simulator.leave_undrawn()


def check_settings(config: EnvConfig, action_repeat: int) -> None:
    """Refuses numbers that no environment can work with."""
    numbers = {
        "action-repeat": action_repeat,
        "image-size": config.image_size,
        "frame-stack": config.frame_stack,
        "max-episode-steps": config.max_episode_steps,
    }
    for flag, value in numbers.items():
        if value is not None and value < 1:
            raise UserError(f"--env.{flag} is {value}: set it to 1 or more.")
