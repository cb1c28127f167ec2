"""The paper's tables and figures as suites: tasks x settings x seeds, declared as data (docs/suites.md).

Where the paper leaves a choice open, the choice is written beside the suite that makes it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from drq import presets
from drq.augment import parse as parse_augmentation
from drq.config import TrainConfig
from drq.envs import check_task, task_names
from drq.envs.atari_games import GAMES_26
from drq.errors import UserError
from drq.experiments.overrides import Overrides, override


class Run(NamedTuple):
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
    overrides: Overrides = field(default_factory=dict)
    """What it changes in the preset."""


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

    def runs(self) -> list[Run]:
        """All runs. Seeds vary slowest, so that a suite cut short has every task and setting."""
        return [
            Run(task, setting.label, seed, self.steps)
            for seed, task, setting in product(self.seeds, self.tasks, self.settings)
        ]

    def config(self, run: Run, folder: Path) -> TrainConfig:
        """The configuration of a run kept inside `folder`."""
        overrides = next(setting.overrides for setting in self.settings if setting.label == run.label)
        config = override(_preset(self.preset, run.task, self.imports), overrides)
        parse_augmentation(config.agent.augmentation)  # a misspelt one is said before anything runs
        return dataclasses.replace(
            config, seed=run.seed, steps=run.steps, dir=str(folder / run.folder), imports=self.imports
        )

    def narrowed(
        self, *, tasks: Iterable[str] | None = None, seeds: int | None = None, steps: int | None = None
    ) -> Suite:
        """The same suite on other tasks, with seeds 1 to `seeds`, or with another budget."""
        changes: dict[str, object] = {}
        if tasks is not None:
            families = dict.fromkeys(task.partition("/")[0] for task in self.tasks)
            changes["tasks"] = tuple(dict.fromkeys(find_task(name, families, self.imports) for name in tasks))
        for name, value in (("--seeds", seeds), ("--steps", steps)):
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}: set it to 1 or more.")
        if seeds is not None:
            changes["seeds"] = tuple(range(1, seeds + 1))
        if steps is not None:
            changes["steps"] = steps
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


@cache
def _preset(name: str, task: str, imports: tuple[str, ...]) -> TrainConfig:
    """The preset with the agent that suits the task's actions."""
    check_task(task, imports)
    return presets.preset(name, task, presets.agent_config(None, task, name))


def slug(text: str) -> str:
    """A name as a folder: `dmc-walker-walk`, `k2-m2`, `impala-no-augmentation`."""
    return re.sub(r"((?<!\d)\.|[^\w.])+", "-", text.replace("=", "")).strip("-").lower()


def find_task(name: str, families: Iterable[str], imports: tuple[str, ...] = ()) -> str:
    """The full name of a task. A short one is looked for in the families, however it spells - and _."""
    if "/" not in name:
        by_letters = {_letters(task.partition("/")[2]): task for family in families for task in task_names(family)}
        if _letters(name) in by_letters:
            return by_letters[_letters(name)]
        near = [by_letters[match] for match in get_close_matches(_letters(name), by_letters, n=3)]
        if near:
            raise UserError(f"There is no task {name!r}: did you mean {' or '.join(near)}? `drq tasks` lists all.")
    check_task(name, imports)
    return name


def _letters(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def find_suite(name: str) -> Suite:
    """The suite of that name, or the one that a TOML file describes."""
    if name.endswith(".toml"):
        from drq.experiments.suite_file import read_suite

        return read_suite(Path(name))
    if name not in SUITES:
        near = get_close_matches(name, SUITES, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"There is no suite {name!r}.{meant} Choose from {', '.join(SUITES)}, or name a file: my_suite.toml."
        )
    return SUITES[name]


THREE_TASKS = ("dmc/cartpole-swingup", "dmc/cheetah-run", "dmc/walker-walk")
"""Where the paper shows three tasks without naming them."""

PLANET_TASKS = tuple(presets.PLANET_ACTION_REPEAT)

DREAMER_TASKS = (
    "dmc/ball_in_cup-catch",
    "dmc/cartpole-balance",
    "dmc/cartpole-balance_sparse",
    "dmc/cartpole-swingup",
    "dmc/cartpole-swingup_sparse",
    "dmc/cheetah-run",
    "dmc/finger-spin",
    "dmc/hopper-hop",
    "dmc/hopper-stand",
    "dmc/pendulum-swingup",
    "dmc/reacher-easy",
    "dmc/reacher-hard",
    "dmc/walker-run",
    "dmc/walker-stand",
    "dmc/walker-walk",
)

ENCODER_TITLES = {"sac-ae": "SAC-AE", "nature": "Nature", "dreamer": "Dreamer", "impala": "IMPALA", "d4pg": "D4PG"}

AUGMENTATION_TITLES = {
    "shift": "Random shift",
    "cutout": "Cutout",
    "hflip": "Horizontal flip",
    "vflip": "Vertical flip",
    "rotate": "Rotate",
    "intensity": "Intensity",
}

# Plain SAC has no views to average: without augmentation they would only repeat each other.
NO_AUGMENTATION = {"agent.augmentation": "none", "agent.k": 1, "agent.m": 1}

TEN_SEEDS = tuple(range(1, 11))


def _views(k: int, m: int) -> Setting:
    return Setting(f"K={k} M={m}", {"agent.k": k, "agent.m": m})


def _encoders() -> tuple[Setting, ...]:
    """The figure's augmented half is random shifts alone, K = M = 1: it comes before the paper averages views."""
    shift = {"agent.augmentation": "shift", "agent.k": 1, "agent.m": 1}
    return tuple(
        Setting(f"{title}, {name}", {"agent.encoder": encoder, **augmentation})
        for (name, augmentation), (encoder, title) in product(
            (("no augmentation", NO_AUGMENTATION), ("random shift", shift)), ENCODER_TITLES.items()
        )
    )


def _robustness() -> tuple[Setting, ...]:
    return tuple(
        Setting(
            f"batch {batch}, lr {rate:g}, temperature {temperature:g}",
            {"agent.batch_size": batch, "agent.learning_rate": rate, "agent.init_temperature": temperature},
        )
        for batch, rate, temperature in product(
            (128, 256, 512), (1e-4, 5e-4, 1e-3, 5e-3), (0.005, 0.01, 0.05, 0.1)
        )
    )


def _data_efficiency() -> tuple[Setting, ...]:
    """The targets and the actor move every 2nd update, however many updates an agent step has."""
    updates = {"1 x 512": (1, 512), "4 x 128": (4, 128)}
    return tuple(
        Setting(f"{system}, {name}", {"agent.updates_per_step": count, "agent.batch_size": batch, **augmentation})
        for (system, augmentation), (name, (count, batch)) in product(
            (("SAC", NO_AUGMENTATION), ("DrQ", {})), updates.items()
        )
    )


_ALL = (
    Suite(
        "planet",
        "the PlaNet benchmark: table at 100k and 500k env steps, and figure",
        preset="planet",
        tasks=PLANET_TASKS,
        settings=(Setting("DrQ"),),
        seeds=TEN_SEEDS,
        steps=500_000,  # one run serves both columns: scores at 100k are read off on the way
    ),
    Suite(
        "dreamer",
        "the Dreamer benchmark: 15 tasks, action repeat 2",
        preset="dreamer",
        tasks=DREAMER_TASKS,
        settings=(Setting("DrQ"),),
        seeds=TEN_SEEDS,
        steps=1_000_000,  # as far as the published figures and their peers are compared
    ),
    Suite(
        "atari100k",
        "Atari 100k: 26 games, Efficient DQN with and without DrQ",
        preset="atari100k",
        tasks=tuple(f"atari/{game}" for game in GAMES_26),
        settings=(Setting("Eff. DQN+DrQ"), Setting("Eff. DQN", {"agent.augmentation": "none"})),
        seeds=(1, 2, 3, 4, 5),
        steps=100_000,
    ),
    Suite(
        "encoders",
        "over-fitting: five encoders with and without random shifts",
        preset="ablation",
        tasks=THREE_TASKS,
        settings=_encoders(),
        seeds=TEN_SEEDS,
        steps=500_000,
    ),
    Suite(
        "versions",
        "what each part of DrQ adds: SAC, then random shifts, target views, loss views",
        preset="ablation",
        tasks=THREE_TASKS,
        settings=(Setting("SAC", NO_AUGMENTATION), _views(1, 1), _views(2, 1), _views(2, 2)),
        seeds=TEN_SEEDS,
        steps=500_000,
    ),
    Suite(
        "augmentations",
        "six image augmentations in DrQ K=2 M=2",  # the paper does not say which K and M: its final ones
        preset="ablation",
        tasks=THREE_TASKS,
        settings=tuple(Setting(title, {"agent.augmentation": name}) for name, title in AUGMENTATION_TITLES.items()),
        seeds=TEN_SEEDS,
        steps=500_000,
    ),
    Suite(
        "km",
        "the grid of K and M",
        preset="ablation",
        tasks=THREE_TASKS,
        settings=tuple(_views(k, m) for k, m in product((1, 2, 4), (1, 2, 4))),  # the text names no values
        seeds=TEN_SEEDS,
        steps=500_000,
    ),
    Suite(
        "robustness",
        "batch size x learning rate x initial temperature",
        preset="planet",
        tasks=("dmc/walker-walk", "dmc/cartpole-swingup", "dmc/finger-spin"),
        settings=_robustness(),
        seeds=(1, 2, 3),
        steps=500_000,
    ),
    Suite(
        "data-efficiency",
        "1 update of 512 against 4 of 128 at 100k env steps, with and without augmentation",
        preset="planet",
        tasks=THREE_TASKS,
        settings=_data_efficiency(),
        seeds=TEN_SEEDS,
        steps=100_000,
    ),
    Suite(
        "frozen-encoder",
        "random convolutions with augmentation against trained ones without",
        preset="ablation",
        tasks=THREE_TASKS,
        settings=(
            Setting("DrQ, frozen encoder", {"agent.freeze_encoder": True}),
            Setting("SAC, trained encoder", NO_AUGMENTATION),
            Setting("DrQ, trained encoder"),
        ),
        seeds=TEN_SEEDS,
        steps=500_000,
    ),
    Suite(
        "state",
        "SAC State: the upper bound, from the simulator's state",
        preset="state",
        tasks=PLANET_TASKS,
        settings=(Setting("SAC State", NO_AUGMENTATION),),
        seeds=TEN_SEEDS,
        steps=500_000,
    ),
)

SUITES = {suite.name: suite for suite in _ALL}
"""The paper's suites by name."""
