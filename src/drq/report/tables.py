"""What the report compares: scores beside published ones, Atari's aggregate scores, grids of settings."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from drq.envs import family_of, split_task
from drq.report import statistics
from drq.report.benchmarks import Benchmark, task_title
from drq.report.labels import NAMED, settings_of
from drq.report.results import Place, RunResult, by_seeds
from drq.report.statistics import Array, Estimate, Published

METRICS: dict[str, Callable[[Sequence[Array]], Estimate]] = {
    "Median": partial(statistics.estimate, statistics.median),
    "IQM": partial(statistics.estimate, statistics.iqm),
    "Mean": statistics.estimated_mean,
    "Optimality gap": partial(statistics.estimate, statistics.optimality_gap),
}
MOST_PAIRS = 8
"""With more systems than this, ours are compared with published ones only, not with each other."""


@dataclass(frozen=True)
class Cell(Published):
    """The score of one system on one task. Published ones have no `runs`."""

    runs: Array | None = None
    steps: tuple[float, float] | None = None
    """Where the runs were read, from the earliest to the furthest."""


@dataclass(frozen=True)
class ScoreTable:
    """Tasks down, systems across. `budget` None reads runs that reached none at their last evaluation."""

    benchmark: Benchmark
    budget: int | None
    columns: tuple[str, ...]
    ours: int
    """The first `ours` columns come from the given runs, the others are published."""
    tasks: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]
    missing: Sequence[Place]
    """Runs that are not there, or not as far as the budget though they were given it."""
    finished: bool
    """Without a budget: whether its runs have finished. Those that have and have not are never in one table."""

    @property
    def title(self) -> str:
        if self.budget is None:
            return f"{self.benchmark.title}, last evaluation" + ("" if self.finished else " of unfinished runs")
        return f"{self.benchmark.title} at {short_count(self.budget)} {self.benchmark.unit}"

    def missing_in_words(self) -> list[str]:
        """`DrQ, seed 2: Alien, Amidar`: a line for the tasks that lack the same seeds."""
        return [
            f"{system}, seed {seeds}: {', '.join(sorted(map(task_title, tasks)))}"
            for (_, system, seeds), tasks in by_seeds(self.missing).items()
        ]


@dataclass(frozen=True)
class SameGames:
    """The part of an Atari table in which every system has every game. Over different games, aggregates would compare
    the games."""

    table: ScoreTable
    of: list[str]
    """The given systems that have these games and no others."""
    lacking: list[str]
    """The given systems that are left out, as they have not all of these games."""

    @property
    def title(self) -> str:
        count = len(self.table.tasks)
        return f"{self.table.title}, human-normalised, over {count} game{'s'[: count > 1]}"

    @property
    def complete(self) -> bool:
        """Whether these are all games of the benchmark."""
        return set(self.table.tasks) == set(self.table.benchmark.tasks)

    def in_words(self) -> list[str]:
        """Which games, and who is not here."""
        games = f"The games of {'; '.join(self.of)}: {', '.join(map(task_title, self.table.tasks))}."
        apart = [f"Not here, for want of games: {'; '.join(self.lacking)}."] if self.lacking else []
        return [f"All games of {self.table.benchmark.title}." if self.complete else games, *apart]


@dataclass(frozen=True)
class Aggregate:
    """Human-normalised scores of one system over Atari games."""

    system: str
    games: int
    runs: int
    """Runs over all games; 0 where only means over runs were published."""
    metrics: dict[str, Estimate]


@dataclass(frozen=True)
class Improvement:
    """How probably a run of `system` beats one of `other` on the same game."""

    system: str
    other: str
    probability: Estimate


@dataclass(frozen=True)
class Grid:
    """Scores over two or three varying settings on one task: panels of rows and columns."""

    title: str
    benchmark: Benchmark
    task: str
    budget: int
    names: tuple[str, ...]
    """Settings along columns, rows and, if there are three, panels."""
    values: tuple[tuple[float, ...], ...]
    """Of each setting, in order."""
    cells: dict[tuple[float, ...], Cell]
    """By the values."""


def short_count(steps: float) -> str:
    """100k, 1M, 1.5M."""
    for unit, name in ((1_000_000, "M"), (1_000, "k")):
        if steps >= unit:
            return f"{float(f'{steps / unit:.3g}'):g}{name}"  # 1000k, where the first alone would say 1e+03k
    return f"{steps:.0f}"


def order_systems(runs: Sequence[RunResult]) -> list[str]:
    """Ours before other people's, DrQ before its ablations, numbers in their order."""

    def rank(run: RunResult) -> tuple[Any, ...]:
        words = re.split(r"(\d+(?:\.\d+)?(?:e-?\d+)?)", run.system)
        natural = [(0, float(word), "") if index % 2 else (1, 0.0, word) for index, word in enumerate(words)]
        return (not run.ours, "DrQ" not in run.system, natural)

    return list(dict.fromkeys(run.system for run in sorted(runs, key=rank)))


def order_tasks(runs: Sequence[RunResult]) -> list[str]:
    """In the order of the published table, then by name."""
    listed = dict.fromkeys(task for run in runs for task in run.benchmark.tasks)
    there = {run.task for run in runs}
    return [*(task for task in listed if task in there), *sorted(there - listed.keys())]


def score_cell(runs: Sequence[RunResult], budget: int | None) -> Cell | None:
    """Mean and spread over the runs that went as far as the budget."""
    read = [evaluation for run in runs if (evaluation := run.evaluation_at(budget))]
    if not read:
        return None
    steps, scores = np.array(read).T
    spread = statistics.sample_std(scores)
    return Cell(float(scores.mean()), spread, len(scores), scores, (float(steps.min()), float(steps.max())))


def common_grid(runs: Sequence[RunResult]) -> tuple[Array, list[Array]]:
    """All steps at which any of the runs was evaluated, and each run there: its own numbers where it was
    evaluated, interpolated linearly between them, nan before its first and after its last evaluation."""
    grid = np.unique(np.concatenate([run.steps for run in runs]))
    return grid, [np.interp(grid, run.steps, run.returns, left=np.nan, right=np.nan) for run in runs]


def mean_curve(runs: Sequence[RunResult]) -> tuple[Array, Array, Array]:
    """Steps, mean and sample standard deviation (nan for a single run) over the runs that reached each
    step."""
    grid, curves = common_grid(runs)
    reached = np.ma.masked_invalid(np.stack(curves))
    return grid, reached.mean(axis=0).filled(np.nan), reached.std(axis=0, ddof=1).filled(np.nan)


def by_finished(runs: Sequence[RunResult]) -> dict[bool, list[RunResult]]:
    """Runs that have finished, then those that have not: a mean over both would compare different lengths."""
    groups = {done: [run for run in runs if (run.status == "finished") is done] for done in (True, False)}
    return {done: members for done, members in groups.items() if members}


def score_tables(runs: Sequence[RunResult], missing: Sequence[Place] = ()) -> list[ScoreTable]:
    """One table for each benchmark and budget that a run reached: the published budgets, and those that finished runs
    were given. Runs that reached none are read at their last evaluation."""
    tables = []
    for benchmark in dict.fromkeys(run.benchmark for run in runs):
        members = [run for run in runs if run.benchmark is benchmark]
        given = {run.budget for run in members if run.budget and run.status == "finished"}
        budgets = [at for at in sorted({*benchmark.budgets, *given}) if any(run.evaluation_at(at) for run in members)]
        for budget in budgets:
            absent = [one for one in missing if one.benchmark is benchmark]
            short = [run for run in members if run.budget and run.budget >= budget and not run.evaluation_at(budget)]
            tables.append(_score_table(benchmark, budget, members, [*absent, *(run.place for run in short)]))
        rest = [run for run in members if len(run.steps) and not any(run.evaluation_at(at) for at in budgets)]
        tables += [_score_table(benchmark, None, others, (), done) for done, others in by_finished(rest).items()]
    return [table for table in tables if table.tasks]


def _score_table(
    benchmark: Benchmark, budget: int | None, runs: Sequence[RunResult], missing: Sequence[Place], finished: bool = True
) -> ScoreTable:
    by_place = defaultdict(list)
    for run in runs:
        by_place[run.task, run.system].append(run)
    systems = order_systems(runs)
    published = benchmark.systems(budget) if budget is not None else []
    tasks, rows = [], []
    for task in order_tasks(runs):
        ours = [score_cell(by_place[task, system], budget) for system in systems]
        known = benchmark.table.get((task, budget), {}) if budget is not None else {}
        theirs = [Cell(**vars(known[name])) if name in known else None for name in published]
        if any(ours):
            tasks.append(task)
            rows.append((*ours, *theirs))
    titles = [f"{name} (published)" if name in systems else name for name in published]
    columns = (*systems, *titles)
    return ScoreTable(benchmark, budget, columns, len(systems), tuple(tasks), tuple(rows), missing, finished)


def differences(table: ScoreTable, ours: int) -> tuple[list[list[Estimate | None]], list[Estimate | None]]:
    """Our column minus every other one: task by task, and the mean over all tasks that ours has. There is no such mean
    where the other lacks one of them, as it would not be over the tasks of its neighbours, nor outside the control
    suite, where returns of different tasks are not on one scale."""
    others = [
        index
        for index in range(len(table.columns))
        if index != ours and (index >= table.ours or table.ours <= MOST_PAIRS)
    ]
    by_task: list[list[Estimate | None]] = [[None] * len(table.columns) for _ in table.tasks]
    overall: list[Estimate | None] = [None] * len(table.columns)
    for other in others:
        shared = [(at, row[ours], row[other]) for at, row in enumerate(table.cells)]
        pairs = [(at, mine, theirs) for at, mine, theirs in shared if mine and theirs]
        for at, mine, theirs in pairs:
            by_task[at][other] = _difference([mine], [theirs])
        every = len(pairs) == sum(row[ours] is not None for row in table.cells)
        if every and len(pairs) > 1 and all(family_of(task).highest_return for task in table.tasks):
            overall[other] = _difference([mine for _, mine, _ in pairs], [theirs for _, _, theirs in pairs])
    return by_task, overall


def _difference(ours: Sequence[Cell], theirs: Sequence[Cell]) -> Estimate:
    mine = [cell.runs for cell in ours if cell.runs is not None]
    if all(cell.runs is not None for cell in theirs):
        return statistics.difference(mine, [cell.runs for cell in theirs if cell.runs is not None])
    return statistics.difference_from_published(mine, theirs)


def same_games(table: ScoreTable) -> list[SameGames]:
    """The table anew for each set of games that one of the given systems has, the largest first, with every system that
    has them all."""
    sets: dict[tuple[int, ...], list[str]] = defaultdict(list)
    known = [at for at, task in enumerate(table.tasks) if split_task(task)[1] in family_of(task).scores]
    for column, system in enumerate(table.columns[: table.ours]):
        if rows := tuple(at for at in known if table.cells[at][column]):
            sets[rows].append(system)
    found = []
    for rows, systems in sorted(sets.items(), key=lambda one: -len(one[0])):
        kept = [column for column in range(len(table.columns)) if all(table.cells[at][column] for at in rows)]
        part = dataclasses.replace(
            table,
            columns=tuple(table.columns[column] for column in kept),
            ours=sum(column < table.ours for column in kept),
            tasks=tuple(table.tasks[at] for at in rows),
            cells=tuple(tuple(table.cells[at][column] for column in kept) for at in rows),
        )
        lacking = [name for name in table.columns[: table.ours] if name not in part.columns]
        found.append(SameGames(part, systems, lacking))
    return found


def atari_scores(table: ScoreTable) -> dict[str, dict[str, Array]]:
    """System -> game -> human-normalised scores (a single one where only a mean was published)."""
    scores: dict[str, dict[str, Array]] = defaultdict(dict)
    for task, cells in zip(table.tasks, table.cells, strict=True):
        players = family_of(task).scores.get(split_task(task)[1])
        for at, (name, cell) in enumerate(zip(table.columns, cells, strict=True)):
            player = at >= table.ours and name.startswith(("Human", "Random"))
            if players and cell and not player:
                runs = np.array([cell.mean]) if cell.runs is None else cell.runs
                scores[name][task] = statistics.human_normalised(runs, *players)
    return {name: scores[name] for name in table.columns if name in scores}


def aggregates(table: ScoreTable) -> tuple[list[Aggregate], list[Improvement]]:
    """Every system over the games of the table, which all of them have, and our systems against all the others."""
    scores = atari_scores(table)
    ours = [name for name in table.columns[: table.ours] if name in scores]
    rows = [
        Aggregate(
            name,
            len(games),
            sum(map(len, games.values())) if name in ours else 0,
            {metric: estimated(list(games.values())) for metric, estimated in METRICS.items()},
        )
        for name, games in scores.items()
    ]
    pairs = []
    for system in ours:
        for other in scores:
            if other != system and (other not in ours or len(ours) <= MOST_PAIRS):
                mine, theirs = (list(scores[name].values()) for name in (system, other))
                improvement = statistics.probability_of_improvement
                if other in ours:
                    chance = statistics.estimate(improvement, mine, theirs, by_rank=True)
                else:  # only a mean was published, which is taken as exact
                    chance = statistics.estimate(partial(improvement, theirs=theirs), mine, by_rank=True)
                pairs.append(Improvement(system, other, chance))
    return rows, pairs


GRIDS = {
    "K and M": {"m": "M", "k": "K"},
    "Robustness": {
        "batch_size": "batch size",
        "learning_rate": "learning rate",
        "init_temperature": "initial temperature",
    },
}
"""Settings along columns, rows and panels, and what they are called there."""


def grids(runs: Sequence[RunResult]) -> list[Grid]:
    """A grid wherever runs of one task differ in at least two settings of a grid, crossed, and in nothing else.

    Scores are read at the smallest budget any of its runs was given, so that finished runs all have one.
    """
    found = []
    for title, settings in GRIDS.items():
        groups: dict[tuple[Any, ...], list[RunResult]] = defaultdict(list)
        for run in runs:
            if run.ours and run.budget and all(_is_number(run.config["agent"].get(name)) for name in settings):
                groups[_all_but(run, settings)].append(run)
        found += [grid for members in groups.values() if (grid := _grid(title, settings, members))]
    return sorted(found, key=lambda grid: (list(GRIDS).index(grid.title), task_title(grid.task)))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _all_but(run: RunResult, names: Iterable[str]) -> tuple[Any, ...]:
    agent = run.config["agent"]
    fixed = [str(agent.get(name)) for name in NAMED if name not in names]
    rest = settings_of(run.config, without=(*NAMED, *names))
    return (run.benchmark, run.task, *fixed, *sorted(rest.items()))


def _grid(title: str, settings: Mapping[str, str], runs: Sequence[RunResult]) -> Grid | None:
    places: dict[tuple[float, ...], list[RunResult]] = defaultdict(list)
    for run in runs:
        places[tuple(float(run.config["agent"][name]) for name in settings)].append(run)
    values = tuple(tuple(sorted(set(options))) for options in zip(*places, strict=True))
    budget = min(run.budget for run in runs if run.budget)
    cells = {place: cell for place, members in places.items() if (cell := score_cell(members, budget))}
    varying = sum(len(options) > 1 for options in values)
    if varying < 2 or len(cells) <= max(map(len, values)):  # settings that only change together are a list, not a grid
        return None
    return Grid(title, runs[0].benchmark, runs[0].task, budget, tuple(settings.values()), values, cells)
