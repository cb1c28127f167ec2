"""A suite: tasks x settings x seeds, declared as data (docs/suites.md)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from drq import presets
from drq.agents import check_agent
from drq.config import EnvConfig, TrainConfig, check
from drq.envs import check_task, letters, split_task, task_names
from drq.errors import UserError, did_you_mean
from drq.settings import override
from drq.suites.search import Search

MOST_SEEDS = 10_000
OF_THE_SUITE = {
    **{"task": "`tasks`", "preset": "`preset`", "seed": "`seeds`", "steps": "`steps`", "imports": "`imports`"},
    "dir": "--dir on the command line",
}
"""Settings of a run that belong to the suite as a whole, and what says them there."""


@dataclass(frozen=True)
class Run:
    """One run of a suite."""

    task: str
    label: str
    seed: int
    steps: int
    """Budget: env steps (Atari: agent steps)."""

    @property
    def folder(self) -> Path:
        """Where the run is kept inside the suite's folder."""
        return Path(slug(self.task), slug(self.label), f"seed-{self.seed}")

    def __str__(self) -> str:
        return f"{self.task}, {self.label}, seed {self.seed}"


@dataclass(frozen=True)
class Setting:
    """One line of a figure, or one cell of a grid."""

    label: str
    """What the report calls it."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """What it changes in the preset: dotted names of settings and their values."""


@dataclass(frozen=True)
class Suite:
    """Tasks x settings x seeds."""

    name: str
    shows: str
    preset: str
    tasks: tuple[str, ...]
    settings: tuple[Setting, ...]
    seeds: tuple[int, ...]
    steps: int
    """Budget of each run: env steps (Atari: agent steps)."""
    imports: tuple[str, ...] = ()
    """Modules that register the tasks."""
    search: Search | None = None
    """What the settings are samples of."""

    def runs(self) -> list[Run]:
        """All runs. Seeds vary slowest, so that a suite cut short has every task and setting."""
        return [
            Run(task, setting.label, seed, self.steps)
            for seed, task, setting in product(self.seeds, self.tasks, self.settings)
        ]

    def config(self, run: Run, folder: Path) -> TrainConfig:
        """The configuration of a run kept inside `folder`."""
        overrides = next(setting.overrides for setting in self.settings if setting.label == run.label)
        for name in overrides:
            if said_by := OF_THE_SUITE.get(name.replace("-", "_")):
                raise UserError(f"{name!r} is the same for a whole suite: say it with {said_by}.")
        env = presets.env_of(presets.preset_values(self.preset, run.task), overrides)
        config = override(_preset(self.preset, run.task, self.imports, env), overrides)
        config = dataclasses.replace(
            config, seed=run.seed, steps=run.steps, dir=str(folder / run.folder), imports=self.imports
        )
        check(config)
        check_agent(config.agent)  # a misspelt augmentation or encoder is said before anything runs
        return config

    def narrowed(
        self,
        *,
        tasks: Iterable[str] | None = None,
        settings: Iterable[str] | None = None,
        seeds: int | str | None = None,
        steps: int | None = None,
    ) -> Suite:
        """The same suite on other tasks, with some of its settings, with other seeds, or with another budget."""
        if steps is not None and steps < 1:
            raise UserError(f"--steps is {steps}: set it to 1 or more.")
        families = dict.fromkeys(split_task(task)[0] for task in self.tasks)
        found = self.tasks if tasks is None else [find_task(name, families, self.imports) for name in tasks]
        return dataclasses.replace(
            self,
            tasks=tuple(dict.fromkeys(found)),
            settings=self.settings if settings is None else self._settings(settings),
            seeds=self.seeds if seeds is None else _seed_numbers(seeds),
            steps=steps or self.steps,
        )

    def _settings(self, names: Iterable[str]) -> tuple[Setting, ...]:
        """Those settings, by what the report or their folders call them, in the suite's order."""
        known = [slug(setting.label) for setting in self.settings]
        wanted = {slug(name): name for name in names}
        for folder, name in wanted.items():
            if folder not in known:
                meant = did_you_mean(folder, known)
                raise UserError(f"{self.name} has no setting {name!r}.{meant} Choose from {', '.join(known)}.")
        return tuple(setting for setting in self.settings if slug(setting.label) in wanted)


def _seed_numbers(said: int | str) -> tuple[int, ...]:
    """How many, from 1 on, or from which to which."""
    ends = re.fullmatch(r"(\d{1,9})-(\d{1,9})", f"1-{said}" if isinstance(said, int) else said)
    numbers = range(int(ends[1]), int(ends[2]) + 1) if ends else ()
    if not 1 <= len(numbers) <= MOST_SEEDS:
        raise UserError(
            f"--seeds is {said}: say how many, 1 to {MOST_SEEDS:,}, as in --seeds 3, or which, as in --seeds 4-7."
        )
    return tuple(numbers)


@cache
def _preset(name: str, task: str, imports: tuple[str, ...], env: EnvConfig) -> TrainConfig:
    """The preset with the agent that suits the task's actions."""
    check_task(task, imports)
    return presets.preset(name, task, env=env)


@cache
def slug(text: str) -> str:
    """A name as a folder: `dmc-walker-walk`, `k2-m2`, `impala-no-augmentation`."""
    return re.sub(r"((?<!\d)\.|[^\w.])+", "-", text.replace("=", "")).strip("-").lower()


def find_task(name: str, families: Iterable[str], imports: tuple[str, ...]) -> str:
    """The full name of a task. A short one is looked for in the families, however it spells - and _."""
    if "/" not in name:
        by_letters = {letters(split_task(task)[1]): task for family in families for task in task_names(family)}
        if letters(name) in by_letters:
            return by_letters[letters(name)]
    check_task(name, imports)
    return name
