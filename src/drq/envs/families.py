"""The families of tasks: a row here and a file of its own make one (docs/extending.md).

All that sets one family apart from another, anywhere in the package, is a column of this table.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast

from drq.config import EnvConfig
from drq.envs.area import Resize
from drq.envs.atari_games import SCORES_26, PlayerScores
from drq.envs.group import EnvironmentGroup
from drq.envs.protocol import Environment


class FamilyModule(Protocol):
    """What the file of a family has. Importing it loads no simulator, so that tasks can be listed without one."""

    def make(self, name: str, config: EnvConfig, action_repeat: int) -> Environment:
        """The environment of a task, given by its name without the family."""
        ...

    def names(self) -> list[str]:
        """All tasks, as `drq tasks` lists them."""
        ...

    def find(self, name: str) -> str | None:
        """A task's one name, however it was spelt; None where there is no such task."""
        ...

    def action_kind(self, name: str, config: EnvConfig) -> Literal["continuous", "discrete"]:
        """Which actions a task takes. Needed only where the family's row does not say."""
        ...


class GroupModule(Protocol):
    """The file of a family whose environments share work when they are played side by side."""

    def make_group(self, name: str, config: EnvConfig, action_repeat: int, count: int) -> EnvironmentGroup:
        """So many environments; what each gives is what that of `make` gives."""
        ...


@dataclass(frozen=True)
class Family:
    """What the tasks of a family have in common."""

    name: str
    """What their names begin with: `dmc` of `dmc/walker-walk`."""
    module: str
    """A `FamilyModule`, imported when one of its tasks is."""
    group_module: str | None = None
    """A `GroupModule`. None: environments side by side have a thread each."""
    hint: str = ""
    """Said where a task is not found."""
    preset: str = "planet"
    """The preset of a command that names none."""
    action_kind: Literal["continuous", "discrete"] | None = None
    """None: its module says it of each task."""
    action_repeat: int = 1
    """Env steps per agent step where neither a preset nor the user says another number."""
    budget_counts: Literal["env_step", "agent_step"] = "env_step"
    """What `--steps` and evaluation intervals count."""
    channels: int = 3
    """Of a frame, for those who need its shape without its simulator."""
    resize: Resize = "box"
    """How pictures of another size than the agent sees are made smaller."""
    of_the_users: bool = False
    """Whether its environments are users' own: they take arguments, wrappers and a choice of images."""
    has_suite_settings: bool = False
    """Whether `--env.render` changes its pictures, and `--env.physics` what its simulator does."""
    has_game_settings: bool = False
    """Whether `--env.no-op-steps` and `--env.zero-stack` are for it."""
    packages: tuple[str, ...] = ()
    """Those whose versions decide what its pixels look like."""
    episodes_at_once: int = 10
    """How many episodes of an evaluation are played side by side."""
    evaluates_on_gpu: bool = False
    """Whether evaluations beside training on a GPU act there too. The others act on the CPU and leave the GPU alone."""
    runs_per_gpu: int = 2
    """Runs that a large GPU carries side by side."""
    cores_per_gpu_run: int = 3
    """Cores that such a run keeps busy: its loop, and its evaluation with what draws for it."""
    benchmark: str = "other"
    """Where the report compares those of its tasks that no published table names."""
    highest_return: float | None = None
    """No return of any task is higher, so that returns of different tasks are on one scale."""
    scores: Mapping[str, PlayerScores] = field(default_factory=dict)
    """What random and human players score, by a task's name without the family."""

    @property
    def env_steps_per_count(self) -> int:
        """Env steps of one step of a budget, where the action repeat is the family's."""
        return 1 if self.budget_counts == "env_step" else self.action_repeat

    def load(self) -> FamilyModule:
        return cast(FamilyModule, importlib.import_module(self.module))

    def load_groups(self) -> GroupModule | None:
        if self.group_module is None:
            return None
        return cast(GroupModule, importlib.import_module(self.group_module))


_ROWS = (
    Family(
        "dmc",
        module="drq.envs.dmc",
        group_module="drq.envs.dmc_group",
        action_kind="continuous",
        action_repeat=2,
        has_suite_settings=True,
        # On an H200 under MPS one run, drawn by CUDA, makes 345 updates/s, four 414 together.
        runs_per_gpu=4,
        packages=("mujoco", "dm_control"),
        highest_return=1000,
    ),
    Family(
        "atari",
        module="drq.envs.atari",
        group_module="drq.envs.atari_group",
        preset="atari100k",
        action_kind="discrete",
        action_repeat=4,
        budget_counts="agent_step",  # as the paper counts: "100k" are 400k frames
        channels=1,
        resize="area",
        has_game_settings=True,
        packages=("ale-py",),
        # Dealt out to all cores. Of 100 games that wait for the time limit, 27,000 agent steps, two follow
        # each other then. Loading a game takes 0.1 s, so that 100 at once would be no cheaper.
        episodes_at_once=50,
        evaluates_on_gpu=True,  # it has nothing to draw there, and plays at the end of training
        # On an H200 under MPS 16 runs train at 5,500 agent steps/s, one alone at 1,470.
        runs_per_gpu=16,
        cores_per_gpu_run=1,  # a run computes or emulates, in turns
        benchmark="atari",
        scores=SCORES_26,
    ),
    Family(
        "gym",
        module="drq.envs.gym",
        of_the_users=True,
        hint=" If it is yours, register it and name the module that does: --import my_module (in Python, import it).",
    ),
    Family("toy", module="drq.envs.toy", preset="toy"),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _ROWS}

_NO_FAMILY = Family("", module="")


def split_task(task: str) -> tuple[str, str]:
    """`dmc` and `walker-walk` of `dmc/walker-walk`; no family and the name itself where there is none that we know."""
    family, _, name = task.partition("/")
    return (family, name) if family in FAMILIES else ("", task)


def family_of(task: str) -> Family:
    """The family of a task. Tasks of somebody else's table, of no family here, have a plain one."""
    return FAMILIES.get(split_task(task)[0], _NO_FAMILY)
