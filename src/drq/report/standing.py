"""Where runs stand among the published runs of the same settings: z-scores, and ranks where those say little.

A control run is compared by its return at the budget and by its area, the mean return over 20k, 30k, ... env steps up
to the budget, which is less noisy. An Atari run has one score.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from drq.config import RainbowConfig
from drq.errors import UserError
from drq.presets import preset_values, resolved
from drq.report import statistics
from drq.report.benchmarks import Benchmark, canonical_task, read_published
from drq.report.results import RunResult
from drq.report.statistics import Array
from drq.report.tables import order_systems, order_tasks, short_count
from drq.settings import config_from_json

Measure = Literal["return", "area"]

AREA_FROM, AREA_EVERY = 20_000, 10_000
"""Where the area begins, and how far its points lie apart, in env steps."""
COARSEST = 20_000
"""Env steps between two evaluations of a run that has an area; the published curves have 16,000 at most."""

ATARI_PRESETS = {
    "DrQ": "atari100k",
    "DrQ(eps)": "atari100k-eps",
    "BBF without SPR, 2 updates a step": "strong",
    "BBF without SPR, 8 updates a step": "strong8",
}
"""Published system -> the preset that has its settings."""


@dataclass(frozen=True)
class Reference:
    """The published runs of a task at a budget, by one measure."""

    system: str
    mean: float
    std: float
    runs: int
    scores: Array | None = None
    """Each run's score, where ranks are compared: where the runs hardly differ from the lowest or highest return."""

    def z(self, score: float) -> float:
        """Standard deviations by which a score lies above the published mean, or its rank in their place."""
        if self.scores is not None:
            return statistics.normal_score(score, self.scores)
        return (score - self.mean) / self.std


@dataclass(frozen=True)
class Standing:
    """One run among the published ones."""

    run: RunResult
    score: float
    reference: Reference

    @property
    def z(self) -> float:
        return self.reference.z(self.score)

    @property
    def above(self) -> int | None:
        """How many published runs it beats, where ranks are compared."""
        scores = self.reference.scores
        return None if scores is None else int((scores < self.score).sum())


@dataclass(frozen=True)
class Mean:
    """The mean z-score of some of the runs, its standard error, and how far its 95% interval goes either way."""

    of: str
    runs: int
    tasks: int
    z: float
    error: float | None
    reach: float | None

    def __str__(self) -> str:
        return f"{self.z:+.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")


@dataclass(frozen=True)
class StandingTable:
    """All runs of one system at one budget, by one measure."""

    benchmark: Benchmark
    budget: int
    measure: Measure
    system: str
    rows: dict[str, list[Standing]]
    """Task -> its runs, by seed."""

    @property
    def title(self) -> str:
        by = {"return": "return at the budget", "area": "area"}[self.measure]
        what = self.benchmark.title if self.benchmark.key == "atari" else f"{self.benchmark.title}, {by}"
        theirs = next(iter(self.rows.values()))[0].reference.system
        at = f"{short_count(self.budget)} {self.benchmark.unit}"
        return f"{self.system} among published runs of {theirs}: {what}, {at}"

    def means(self) -> list[Mean]:
        """Over all runs; and over those seeds alone that every task has, if some have more."""
        seeds = {task: {each.run.seed for each in runs} for task, runs in self.rows.items()}
        complete = set.intersection(*seeds.values())
        found = [_mean("all runs", self.rows.values())]
        if complete and any(complete != of_task for of_task in seeds.values()):
            numbers = ", ".join(map(str, sorted(complete)))
            rows = [[each for each in runs if each.run.seed in complete] for runs in self.rows.values()]
            found.append(_mean(f"seed {numbers}, which every task has", rows))
        return found

    def task_mean(self, task: str) -> Mean:
        """Over all runs of one task."""
        return _mean(task, [self.rows[task]])


def _mean(of: str, rows: Collection[Sequence[Standing]]) -> Mean:
    found = statistics.mean_z(
        [np.array([each.z for each in runs]) for runs in rows], [runs[0].reference.runs for runs in rows]
    )
    return Mean(of, sum(map(len, rows)), len(rows), *found)


def standing_tables(runs: Sequence[RunResult]) -> list[StandingTable]:
    """A table for each system with published settings, budget and measure, in the order of the score tables."""
    groups: dict[tuple[Benchmark, str], list[RunResult]] = defaultdict(list)
    for run in runs:
        if _has_published_settings(run):
            groups[run.benchmark, run.system].append(run)
    systems, tasks = order_systems(runs), order_tasks(runs)
    tables = []
    for (benchmark, system), members in sorted(groups.items(), key=lambda group: systems.index(group[0][1])):
        members.sort(key=lambda run: (tasks.index(run.task), run.seed))
        for budget in benchmark.budgets:
            for measure in ("area", "return"):
                rows: dict[str, list[Standing]] = defaultdict(list)
                for run in members:
                    reference = _references().get((run.config["preset"], run.task, budget, measure))
                    score = area(run, budget) if measure == "area" else _return(run, budget)
                    if reference and score is not None:
                        rows[run.task].append(Standing(run, score, reference))
                if rows:
                    tables.append(StandingTable(benchmark, budget, measure, system, dict(rows)))
    return tables


def area(run: RunResult, budget: int) -> float | None:
    """Mean return over 20k, 30k, ... env steps up to the budget, interpolated between evaluations; None for a run that
    stopped before, or was evaluated too seldom to tell."""
    gaps = np.diff(run.steps, prepend=0.0)[: np.searchsorted(run.steps, budget) + 1]  # the one over the budget, too
    if run.evaluation_at(budget) is None or gaps.max() > COARSEST:
        return None
    points = np.arange(AREA_FROM, budget + 1, AREA_EVERY)
    return float(np.interp(points, run.steps, run.returns).mean())


def _return(run: RunResult, budget: int) -> float | None:
    """Interpolated between evaluations as the published curves are, some of which have none at the budget itself."""
    return None if run.evaluation_at(budget) is None else float(np.interp(budget, run.steps, run.returns))


def _has_published_settings(run: RunResult) -> bool:
    """A run from scratch of an agent, environment and replay as its preset has them, however drawn or computed.

    Limbs of today's weight and of the paper's time count alike, as tables of others do not say which they had. Where
    `strong` departs from the published code and a setting takes that back (docs/atari.md), both ways count.
    """
    try:
        config = resolved(config_from_json(run.config))
        published = preset_values(config.preset, config.task)
    except UserError:  # somebody's CSV, or a preset or an agent that is not ours
        return False
    agent, theirs = config.agent, published.env
    env = dataclasses.replace(config.env, render=theirs.render, physics=theirs.physics)
    if isinstance(agent, RainbowConfig):
        agent = dataclasses.replace(agent, prioritised=True, early_bootstrap=False)
        env = dataclasses.replace(env, no_op_steps=False, zero_stack=False)
    same = (agent, env, config.replay) == (published.agent, published.env, published.replay)
    return same and config.init_from is None


@cache
def _references() -> dict[tuple[str, str, int, Measure], Reference]:
    """By preset, task, budget and measure."""
    found: dict[tuple[str, str, int, Measure], Reference] = {}
    for row in read_published("atari100k_runs.csv"):
        if name := ATARI_PRESETS.get(row["system"]):
            reference = Reference(row["system"], float(row["mean"]), float(row["std"]), int(row["runs"]))
            found[name, canonical_task(row["game"]), 100_000, "return"] = reference
    measures: dict[str, Measure] = {"area": "area", "last": "return"}
    seeds = {
        (row["task"], row["set"], row["budget"], row["measure"]): np.array(row["scores"].split(), dtype=np.float64)
        for row in read_published("drq_control_seeds.csv")
    }
    # Rows of both sets together come after those of one, and take their place.
    for row in sorted(read_published("drq_control_spread.csv"), key=lambda row: "+" in row["set"]):
        for column, measure in measures.items():
            scores = seeds.get((row["task"], row["set"], row["budget"], column))
            mean, std = float(row[f"{column}_mean"]), float(row[f"{column}_std"])
            reference = Reference("DrQ", mean, std, int(row["seeds"]), scores)
            for name in row["set"].split("+"):
                found[name, row["task"], int(row["budget"]), measure] = reference
    return found
