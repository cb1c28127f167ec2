"""The published figures shipped with the package (`published/SOURCES.md`), and the names of tasks in them."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Literal

import numpy as np

from drq.envs import FAMILIES, family_of, letters, split_task, task_names
from drq.report.statistics import Array, Published

DRQ_TABLE_SEEDS = {"dmc/cheetah-run": 8, "dmc/reacher-easy": 9, "dmc/walker-walk": 9}
"""Seeds under the DrQ column of the paper's PlaNet table where they are not 10."""

SAC_STATE = "SAC State (authors' SAC)"
"""The seeds published with the code that the paper's SAC State column rests on."""
IN_THE_PAPER = {name: f"{name} (paper)" for name in ("DrQ", "SAC State", "Eff. DQN+DrQ", "Eff. DQN")}
"""Columns of the paper that runs of ours may be called as well."""
STUDY = {"DrQ(eps)": "DrQ(eps) (100 runs)", "DrQ": "DrQ (100 runs)"}
"""Of the study of 100 runs a game, with the epsilons of `atari100k-eps` and with the paper's: they come first."""


@dataclass(frozen=True)
class Curve:
    """A published learning curve: mean, standard deviation and number of seeds along training."""

    name: str
    steps: Array
    mean: Array
    std: Array
    seeds: Array

    def at(self, budget: int) -> Published:
        """The last evaluation at or before the budget, as the paper reads its table."""
        index = int(np.searchsorted(self.steps, budget, side="right")) - 1
        return Published(float(self.mean[index]), float(self.std[index]), int(self.seeds[index]))


@dataclass(frozen=True, eq=False)
class Benchmark:
    """A set of tasks with the budgets at which scores are compared and what has been published there. There is one
    object of each, and it can be a key."""

    key: str
    title: str
    counts: Literal["env_step", "agent_step"] = "env_step"
    """What budgets and the axes of charts count."""
    budgets: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()
    """In the order of the published table."""
    table: Mapping[tuple[str, int], Mapping[str, Published]] = field(default_factory=dict)
    """(task, budget) -> system -> score."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """Task -> published curve of DrQ."""
    digits: int = 0
    """Decimals with which scores are printed."""

    @property
    def unit(self) -> str:
        """What budgets count, as a reader says it."""
        return self.counts.replace("_", " ") + "s"

    def systems(self, budget: int) -> list[str]:
        """Published systems at a budget, in the table's order."""
        rows = [row for (_, at), row in self.table.items() if at == budget]
        return list(dict.fromkeys(name for row in rows for name in row))


def read_published(name: str) -> list[dict[str, str]]:
    """Rows of one shipped file."""
    text = resources.files("drq.report").joinpath("published", name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def sources() -> str:
    """Where the published figures come from, with the licences."""
    return resources.files("drq.report").joinpath("published", "SOURCES.md").read_text(encoding="utf-8")


@cache
def benchmarks() -> dict[str, Benchmark]:
    """Every benchmark by its key, in the order of the report."""
    dreamer = _dreamer()
    return {
        "planet": _planet(),
        "dreamer": dreamer,
        "control": _control(exclude=dreamer.tasks),
        "atari": _atari(),
        "other": Benchmark("other", "Other tasks", digits=1),
    }


def canonical_task(name: str) -> str:
    """The package's name of a task, however a file spells it: `walker_walk`, `Walker Walk` and
    `dmc/walker-walk` are one task, and so are `MsPacman` and `atari/ms_pacman`. Unknown names stay."""
    family, short = split_task(name)
    known = _our_names().get(letters(short))
    return known if known and family in ("", split_task(known)[0]) else name.strip()


def task_title(task: str) -> str:
    """`Walker Walk` for `dmc/walker-walk`; tasks of no benchmark keep their name."""
    if not any(task in benchmark.tasks for benchmark in benchmarks().values()):
        return task
    words = re.split("[-_]", split_task(task)[1])
    return " ".join(word if word == "in" else word.capitalize() for word in words)


def benchmark_of(task: str, preset: str = "") -> Benchmark:
    """Where a task is compared; the preset decides between PlaNet's and Dreamer's settings of the same
    task."""
    known = benchmarks()
    if preset.startswith("dreamer") and task in known["dreamer"].tasks:
        return known["dreamer"]
    own = known[family_of(task).benchmark]
    return next((benchmark for benchmark in known.values() if task in benchmark.tasks), own)


@cache
def _our_names() -> dict[str, str]:
    """Our names of control tasks and of the benchmark's games, by the letters in all their spellings."""
    games = [f"atari/{game}" for game in FAMILIES["atari"].scores]
    ours = {letters(split_task(task)[1]): task for task in (*task_names("dmc"), *games)}
    return ours | {"cupcatch": "dmc/ball_in_cup-catch", "reachduplo": "dmc/reach-duplo"}


def _curves(file: str) -> dict[str, Curve]:
    rows = defaultdict(list)
    for row in read_published(file):
        point = [float(row[key]) for key in ("env_step", "mean", "std", "seeds")]
        rows[canonical_task(row["task"])].append(point)
    return {task: Curve("DrQ (published curves)", *np.array(points).T) for task, points in rows.items()}


def _planet() -> Benchmark:
    curves = _curves("drq_planet_mean.csv")
    table: dict[tuple[str, int], dict[str, Published]] = defaultdict(dict)
    for row in read_published("paper_planet_table.csv"):
        task, budget, system = canonical_task(row["task"]), int(row["env_step"]), row["system"]
        seeds = DRQ_TABLE_SEEDS.get(task, 10) if system == "DrQ" else None
        if system == "DrQ":
            table[task, budget][curves[task].name] = curves[task].at(budget)
        name = IN_THE_PAPER.get(system, system)
        table[task, budget][name] = Published(float(row["mean"]), float(row["std"]), seeds)
    _add_sac_state(table)
    tasks = tuple(dict.fromkeys(task for task, _ in table))
    return Benchmark("planet", "PlaNet tasks", "env_step", (100_000, 500_000), tasks, table, curves)


def _add_sac_state(table: dict[tuple[str, int], dict[str, Published]]) -> None:
    for row in read_published("sac_state_table.csv"):
        if (place := (row["task"], int(row["env_step"]))) in table:
            table[place][SAC_STATE] = _score(row, "std", "seeds")


def _score(row: Mapping[str, str], std: str, seeds: str) -> Published:
    """Of a row with its mean, and standard deviation and seeds in these columns."""
    return Published(float(row["mean"]), float(row[std]) if row[std] else None, int(row[seeds]))


def _dreamer() -> Benchmark:
    curves = _curves("drq_dreamer_mean.csv")
    names = {"drqv2": "DrQ-v2", "curl": "CURL", "sac": "SAC", "dreamerv3": "DreamerV3"}
    table: dict[tuple[str, int], dict[str, Published]] = {}
    for row in read_published("dreamer15_peers.csv"):
        task, budget = canonical_task(row["env"]), int(row["env_step"])
        if task in curves:
            peers = {title: Published(float(row[column])) for column, title in names.items()}
            table[task, budget] = {curves[task].name: curves[task].at(budget), **peers}
    _add_sac_state(table)
    budgets = (100_000, 500_000, 1_000_000)
    return Benchmark("dreamer", "Dreamer tasks", "env_step", budgets, tuple(curves), table, curves)


def _control(exclude: tuple[str, ...]) -> Benchmark:
    table: dict[tuple[str, int], dict[str, Published]] = {}
    for row in read_published("drqv2_table.csv"):
        if (task := canonical_task(row["task"])) not in exclude:
            table[task, int(row["frame"])] = {row["agent"]: _score(row, "std_ddof1", "n_seeds")}
    _add_sac_state(table)
    tasks = tuple(dict.fromkeys(task for task, _ in table))
    budgets = tuple(sorted({budget for _, budget in table}))
    return Benchmark("control", "Other control tasks", "env_step", budgets, tasks, table)


def _atari() -> Benchmark:
    runs: dict[str, dict[str, Published]] = defaultdict(dict)
    for row in read_published("atari100k_runs.csv"):
        system = STUDY.get(row["system"], row["system"])
        runs[canonical_task(row["game"])][system] = _score(row, "std", "runs")
    names = ("Eff. DQN+DrQ", "Eff. DQN", "OT/Eff. Rainbow+CURL", "Eff. Rainbow", "OTRainbow", "SimPLe")
    table: dict[tuple[str, int], dict[str, Published]] = {}
    for row in read_published("paper_atari_table.csv"):
        task = canonical_task(row["game"])
        players = family_of(task).scores[split_task(task)[1]]
        study = {title: runs[task][title] for title in STUDY.values()}
        paper = {IN_THE_PAPER.get(name, name): Published(float(row[name])) for name in names}
        ends = {"Human": Published(players.human), "Random": Published(players.random)}
        table[task, 100_000] = study | paper | runs[task] | ends
    tasks = tuple(task for task, _ in table)
    return Benchmark("atari", "Atari 100k", "agent_step", (100_000,), tasks, table, digits=1)
