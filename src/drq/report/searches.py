"""Searches over settings: what each setting came to, the best first."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drq.launch import SuiteRecord
from drq.report.benchmarks import Benchmark
from drq.report.results import RunResult, suite_record
from drq.report.tables import Cell, score_cell
from drq.suites import as_toml, ranking


@dataclass(frozen=True)
class SearchRow:
    """One setting: its values, the budget it was given, and its return there over seeds."""

    values: tuple[float | str, ...]
    steps: float
    cell: Cell


@dataclass(frozen=True)
class SearchTable:
    """The settings of a search on one task, the best of the whole search first."""

    title: str
    benchmark: Benchmark
    task: str
    names: tuple[str, ...]
    rows: tuple[SearchRow, ...]
    best: str
    """The best settings as a TOML file for `drq train --config`."""


def search_tables(runs: Sequence[RunResult]) -> list[SearchTable]:
    """A table for each task of each search that runs belong to."""
    suites: dict[Path, list[RunResult]] = defaultdict(list)
    for run in runs:
        if len(run.steps) and (suite := run.suite):
            suites[suite].append(run)
    tables = []
    for path, members in suites.items():
        record = suite_record(path)
        if record and record.search and record.runs:
            members = [run for run in members if str(run.record.get("label")) in record.settings]
            tables += _tables(record, members) if members else []
    return tables


def _tables(record: SuiteRecord, runs: Sequence[RunResult]) -> list[SearchTable]:
    groups: dict[str, dict[str, list[RunResult]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        groups[str(run.record["label"])][run.task].append(run)
    rows = {
        label: {task: _row(record, label, seeds) for task, seeds in tasks.items()} for label, tasks in groups.items()
    }
    results = {
        label: {task: (row.steps, row.cell.mean) for task, row in tasks.items()} for label, tasks in rows.items()
    }
    order = ranking(results)
    asked = tuple(dict.fromkeys(run.task for run in record.runs))
    best = as_toml(record.preset, asked, max(run.steps for run in record.runs), record.settings[order[0]])
    names, tables = tuple(record.search), []
    for task, benchmark in {run.task: run.benchmark for run in runs}.items():
        members = tuple(rows[label][task] for label in order if task in rows[label])
        tables.append(SearchTable(record.name, benchmark, task, names, members, best))
    return tables


def _row(record: SuiteRecord, label: str, seeds: Sequence[RunResult]) -> SearchRow:
    steps = [run.budget if run.status == "finished" and run.budget else run.last_step for run in seeds]
    cell = score_cell(seeds, None)
    assert cell is not None  # every run has an evaluation
    values = [record.settings[label].get(name) for name in record.search]
    plain = [each if isinstance(each, int | float) and math.isfinite(each) else str(each) for each in values]
    return SearchRow(tuple(plain), min(steps), cell)
