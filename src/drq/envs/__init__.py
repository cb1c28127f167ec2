"""Environments: where observations come from. One protocol, four families.

Importing this package loads no simulator: each family's module is imported when one of its tasks is made.
"""

from __future__ import annotations

from drq.config import EnvConfig
from drq.envs.group import EnvironmentGroup, ThreadedGroup
from drq.envs.protocol import Action, Environment, EnvSpec, Frame, Step
from drq.envs.tasks import FAMILIES, check_task, import_modules, task_names
from drq.errors import UserError

__all__ = [
    "FAMILIES",
    "Action",
    "EnvSpec",
    "Environment",
    "EnvironmentGroup",
    "Frame",
    "Step",
    "check_task",
    "import_modules",
    "make",
    "make_group",
    "task_names",
]


def make(task: str, config: EnvConfig, action_repeat: int) -> Environment:
    """The environment of a task such as `dmc/walker-walk`.

    The action repeat is the one to use: `config.action_repeat` may leave it to a preset. Atari's is always 4.
    An environment that draws with OpenGL belongs to the thread that first resets it.
    """
    check_task(task)
    _check_settings(config, action_repeat)
    family, _, name = task.partition("/")
    if family == "dmc":
        from drq.envs.dmc import make_dmc

        return make_dmc(name, config, action_repeat)
    if family == "atari":
        from drq.envs.atari import make_atari

        return make_atari(name, config)
    if family == "gym":
        from drq.envs.gym import make_gym

        return make_gym(name, config, action_repeat)
    from drq.envs.toy import make_toy

    return make_toy(name, config, action_repeat)


def make_group(task: str, config: EnvConfig, action_repeat: int, count: int) -> EnvironmentGroup:
    """So many environments of a task to play side by side. What each gives is what that of `make` gives."""
    family, _, name = task.partition("/")
    if family not in ("dmc", "atari"):
        return ThreadedGroup(lambda: make(task, config, action_repeat), count)
    check_task(task)
    _check_settings(config, action_repeat)
    if family == "dmc":
        from drq.envs.dmc_group import make_dmc_group

        return make_dmc_group(name, config, action_repeat, count)
    from drq.envs.atari_group import make_atari_group

    return make_atari_group(name, config, count)


def _check_settings(config: EnvConfig, action_repeat: int) -> None:
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
